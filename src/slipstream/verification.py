"""Does this engine, with this link, really change from one policy to the other, and at the token that it says?

A batch is generated greedily on weights A; while it runs, B is published; then a fresh engine that has loaded A's files
is asked for every token before the change again, and one that has loaded B's for every token after it, each given the
same prefix. Nothing of the link under test takes part in the second half.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slipstream.actor import went_well
from slipstream.config import Config, ConfigError, with_options
from slipstream.generators.vllm import VllmEngine
from slipstream.models import dtype_name, load_tokenizer
from slipstream.rollout import Completion, Sampling, VersionSpan
from slipstream.runtime.generating import Engine, GeneratorService, OpenWeights
from slipstream.runtime.local import Pools, start_generators
from slipstream.runtime.placement import gpus_here, place, settled
from slipstream.runtime.pool import GeneratorPool
from slipstream.runtime.training import TrainerService
from slipstream.runtime.vllm import VllmService
from slipstream.sync.adapters import WEIGHTS
from slipstream.sync.gathered import part_of, whole

SHORT = 128  # tokens of a pass
# vLLM's mode in which no two batches differ, and what it sets for NCCL then: both ends of a link have to agree on that.
BATCH_INVARIANT = {
    "VLLM_BATCH_INVARIANT": "1", "NCCL_LAUNCH_MODE": "GROUP", "NCCL_COLLNET_ENABLE": "0", "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_NET_DISABLE": "1", "NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "1", "NCCL_PROTO": "Simple",
    "NCCL_ALGO": "allreduce:tree", "NCCL_NTHREADS": "1", "NCCL_SOCKET_NTHREADS": "1",
}  # fmt: skip
# Engines that are compiled one by one may get kernels that round otherwise. Graphs of the passes stay. In vLLM 0.25.1
# the normalisation of a residual (`fused_add_rms_norm`) sums in another order in passes of 256 tokens or more,
# batch-invariant or not, and short prompts prefilled with long ones get other tokens: no such passes, then.
INVARIANT = {
    "compilation_config": {"mode": 0, "custom_ops": ["all"], "cudagraph_mode": "FULL_DECODE_ONLY"},
    "max_num_batched_tokens": SHORT,
}
Wanted = Sequence[tuple[Completion, VersionSpan]]
CHANGE = 0.05  # size of the difference between A and B, in standard deviations of each parameter
FRESH = 0.02  # and of the factor of an adapter that begins as zeros: its product is about as large then
SHOWN = 5  # completions that were not exact
POLL = 0.02  # seconds between two looks at how far generation is
PROMPT = (4, 24)  # tokens
CUT = "raise --tokens"
LENGTHS = (64, 256, 1024)  # tokens of a completion, of which the first serves that is not over before the swap


@dataclass(frozen=True)
class Verdict:
    """How many completions were exact before and after the change, of how many that have such tokens."""

    completions: int
    met: int  # in flight when the publish began
    changed: int  # with tokens of both versions
    differ: int  # prompts that A and B answer differently
    before: tuple[int, int]
    after: tuple[int, int]
    tokens: tuple[int, int]
    hold: float
    misses: tuple[str, ...]  # where those that were not exact first differ
    how: str = "continue"  # `sync.interruption`
    wasted: int = 0  # tokens that an engine threw away at the change, to draw them anew
    longer: str = CUT  # what makes completions end later

    @property
    def exact(self) -> bool:
        """Whether there was something to see, and all of it was right."""
        return not self.misses and not self.unseen

    @property
    def unseen(self) -> str:
        """Why these completions could not show the change, and what to do, if they could not."""
        if not self.met:
            return f"nothing was in flight at the publish: {self.longer}"
        # An engine that was started anew has not counted what went with it; but something drawn by A is gone then.
        kept = self.how == "retry" and not self.wasted and self.before[1]
        if (self.how == "recompute" and not self.changed) or kept:
            return f"all that was in flight had ended at the swap: {self.longer}"
        if not self.after[1]:
            return f"nothing was drawn by B: {self.longer}"
        return "" if self.differ else "A and B answer every prompt alike: raise --prompts or --tokens"

    def describe(self, config: Config) -> str:
        """All of it as a table."""
        engine = f"{config.generator.kind}, tensor parallel {config.generator.tensor_parallel}, {dtype_name(config)}"
        thrown = f"; {self.wasted} tokens were thrown away" if self.wasted else ""
        verdict = "EXACT" if self.exact else "NOT EXACT" if self.misses else f"NOT SEEN: {self.unseen}"
        rows = [
            ("engine", engine),
            ("link", f"{config.sync.link}, in flight: {config.sync.interruption}"),
            ("completions", f"{self.completions}, of which {self.changed} changed policy in the middle"),
            ("in flight", f"{self.met} at the publish{thrown}"),
            ("A and B", f"answer {self.differ} prompts differently"),
            ("before A to B", f"{self.before[0]} of {self.before[1]} exact ({self.tokens[0]} tokens)"),
            ("after A to B", f"{self.after[0]} of {self.after[1]} exact ({self.tokens[1]} tokens)"),
            ("held", f"{1000 * self.hold:.2f} ms"),
            *(("not exact", miss) for miss in self.misses[:SHOWN]),
            ("", verdict),
        ]
        return "\n".join(f"{name:15}{text}" for name, text in rows)


class ChangingTrainer(TrainerService):
    """A trainer that, instead of learning, goes to other weights at once."""

    _foreseen: tuple[int, list[torch.Tensor]] | None = None

    @torch.no_grad()
    def foresee(self, seed: int) -> None:
        """Work out on a CPU what `change` does, since sequences that are in flight might end before it would be done.

        It takes the memory of one copy of the weights until then. On a GPU it is quick, and memory may be short."""
        if self._trainer.device.type == "cpu":
            self._foreseen = (seed, list(self._noise(seed)))

    @torch.no_grad()
    def change(self, seed: int) -> None:
        """From A to B: noise on every parameter, the same for a seed."""
        if self._sender:
            self._sender.before_update()
        foreseen, self._foreseen = self._foreseen, None
        noise = foreseen[1] if foreseen and foreseen[0] == seed else self._noise(seed)
        for parameter, change in zip(self._trainer.parameters.values(), noise, strict=True):
            parameter.add_(change)

    def _noise(self, seed: int) -> Iterator[torch.Tensor]:
        """What is added to each parameter, or to the part of it that is here."""
        generator = torch.Generator(self._trainer.device).manual_seed(seed)
        for parameter in self._trainer.parameters.values():
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            values = whole(parameter).float()  # of which a vector of ones has no deviation
            size = CHANGE * max(float(values.std(correction=0)), 0.02) if values.any() else FRESH
            yield part_of(noise.mul_(size), parameter)

    def store(self, path: Path) -> None:
        """The policy with its tokenizer, as an engine loads it."""
        self._trainer.export(path)
        load_tokenizer(self._config.model.path).save_pretrained(path)


class FromFiles(VllmService):
    """A generator that reads an adapter from files, as its engine does without Slipstream."""

    def _load(self) -> tuple[Engine, OpenWeights]:
        kind = VllmService if self._config.generator.kind == "vllm" else GeneratorService
        return kind._load(self)

    def load_adapter(self, path: str) -> None:
        """Draw by the adapter in a PEFT directory from now on."""
        if isinstance(self._engine, VllmEngine):
            self._engine.load_adapter(path)
            return
        engine: Any = self._engine
        for name, tensor in load_file(Path(path) / WEIGHTS).items():
            inner = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
            engine.model.get_parameter(inner).data.copy_(tensor)


async def verify(
    config: Config, *, prompts: int = 16, tokens: int | None = None, after: int = 16, seed: int = 0
) -> Verdict:
    """Publish B once a sequence of A has drawn `after` tokens, and compare. See the module.

    How long a publish takes is not known before: without `tokens`, completions of LENGTHS are tried."""
    config = settled(config)
    lengths = [tokens] if tokens is not None else [n for n in LENGTHS if n > after] or [LENGTHS[-1] + after]
    while True:
        verdict = await _verify(config, prompts, lengths.pop(0), after, seed)
        if not lengths or verdict.misses or not (verdict.unseen and verdict.longer == CUT):
            return verdict
        print(f"{verdict.unseen.partition(':')[0]}; once more with {lengths[0]} tokens", file=sys.stderr)


async def _verify(config: Config, prompts: int, tokens: int, after: int, seed: int) -> Verdict:
    alone = _of_engines(config)
    if not config.generator.servers:
        config = alone
    if min(prompts, tokens) < 1 or after < 0:
        raise ConfigError(
            f"verify with --prompts {prompts} --tokens {tokens} --after {after} compares nothing; give at least 1 "
            "prompt and token, and --after 0 or more"
        )
    trainer = f"{ChangingTrainer.__module__}:{ChangingTrainer.__qualname__}"
    config = with_options(config, trainer={**config.trainer.model_dump(), "kind": trainer})
    vocabulary = len(load_tokenizer(config.model.path))
    draw = random.Random(seed)
    asked = [tuple(draw.randrange(vocabulary) for _ in range(draw.randint(*PROMPT))) for _ in range(prompts)]
    with _scratch() as folder:
        stores = [folder / name for name in "AB"]
        completions, hold, met, wasted = await _publish_midway(config, folder, stores, asked, tokens, after, seed)
        wanted = [_by_version(completions, version) for version in (0, 1)]
        # Where no token of A was kept, as under `retry`, A is asked all that B was: they have to differ.
        by_b = [(c, c.spans[-1]) for c in completions[prompts:]]
        again = [
            await _fresh(alone, folder, store, asked_of)
            for store, asked_of in zip(stores, (wanted[0] or by_b, wanted[1]), strict=True)
        ]
    verdict = _verdict(completions, again, hold, met)
    return replace(verdict, how=config.sync.interruption, wasted=wasted, longer=_longer(completions[:prompts], tokens))


def _of_engines(config: Config) -> Config:
    """The configuration for engines that are started here: those to compare with, and that under test if it is none of
    the user's servers. On GPUs, vLLM is batch-invariant in all processes that are started from here on."""
    generator, others = config.generator.model_dump(), {}
    if config.generator.servers:
        generator |= {"servers": [], "count": 1}
        others = {"sync": {"link": "shared"}}
    if gpus_here() and config.generator.kind == "vllm":
        os.environ.update(BATCH_INVARIANT)
        generator |= {"slots": SHORT, "options": INVARIANT | config.generator.options}
    return with_options(config, generator=generator, **others)


def _longer(completions: Sequence[Completion], tokens: int) -> str:
    """What would have let the longest of them go on."""
    return CUT if any(len(c.token_ids) == tokens for c in completions) else "raise generator.context"


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory that is gone afterwards; but for logs, which what is raised may name, if something was."""
    folder = Path(tempfile.mkdtemp(prefix="slipstream-verify-"))
    gone = [folder]
    try:
        yield folder
    except Exception:
        gone = [path for path in folder.iterdir() if path.name != "logs"]
        raise
    finally:
        for path in gone:
            shutil.rmtree(path)


def _by_version(completions: Sequence[Completion], version: int) -> Wanted:
    return [(c, span) for c in completions for span in c.spans if span.version == version]


async def _publish_midway(
    config: Config, folder: Path, stores: Sequence[Path], asked: Sequence[tuple[int, ...]], tokens: int, after: int,
    seed: int,
) -> tuple[list[Completion], float, int, int]:  # fmt: skip
    pools = await Pools.start(config, folder)
    try:
        await pools.link.connect(0)
        await pools.trainer.actor.call("store", stores[0])
        await pools.trainer.actor.call("foresee", seed)
        sampling = _greedy(tokens)
        drawn = [asyncio.ensure_future(pools.generator.generate(prompt, sampling)) for prompt in asked]
        drawing = asyncio.gather(*drawn)
        drawing.add_done_callback(went_well)  # else raised below
        while not drawing.done() and await pools.generator.drawn() < after:
            await asyncio.sleep(POLL)
        async with pools.trainers_turn(publishes=True):
            await pools.trainer.actor.call("change", seed)
            met = sum(not one.done() for one in drawn)
            stats = await pools.link.publish(1)
        # The same prompts once more: no new sequence may read what A has left in a prefix cache.
        later = await asyncio.gather(*(pools.generator.generate(prompt, sampling) for prompt in asked))
        await pools.trainer.actor.call("store", stores[1])
        wasted = sum([(await generator.stats()).get("wasted", 0.0) for generator in pools.generator.generators])
        return [*await drawing, *later], stats.hold, met, round(wasted)
    finally:
        await pools.close()


async def _fresh(config: Config, folder: Path, store: Path, wanted: Wanted) -> list[array[int]]:
    """What an engine that has loaded `store` draws in the place of these tokens of completions."""
    if not wanted:
        return []
    service, adapted = "", bool(config.lora.rank)
    if adapted:  # the base is the same, and the adapter is loaded into it
        service = f"{FromFiles.__module__}:{FromFiles.__qualname__}"
    else:
        config = with_options(config, model={**config.model.model_dump(), "path": str(store)})
    pool = await start_generators(config, folder, place(config, gpus_here()), service)
    try:
        if adapted:
            await pool.ask("load_adapter", str(store))
        return await _drawn_again(pool, wanted)
    finally:
        await pool.close()


def _greedy(tokens: int) -> Sampling:
    """Past the end of the text: a model that answers in a few tokens would have ended before the change."""
    return Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)


async def _drawn_again(pool: GeneratorPool, wanted: Wanted) -> list[array[int]]:
    samplings = [_greedy(span.end - span.start) for _, span in wanted]
    prefixes = [c.prompt_ids + c.token_ids[: span.start] for c, span in wanted]
    drawn = await asyncio.gather(*map(pool.generate, prefixes, samplings))
    return [completion.token_ids for completion in drawn]


def _verdict(completions: Sequence[Completion], again: Sequence[list[array[int]]], hold: float, met: int) -> Verdict:
    exact, total, tokens, misses = [0, 0], [0, 0], [0, 0], []
    for version in (0, 1):
        spans = [(i, c, span) for i, c in enumerate(completions) for span in c.spans if span.version == version]
        for (i, c, span), drawn in zip(spans, again[version] if spans else [], strict=True):
            expected = c.token_ids[span.start : span.end]
            total[version] += 1
            tokens[version] += len(expected)
            exact[version] += expected == drawn
            if expected != drawn:
                pairs = enumerate(zip(expected, drawn, strict=False))
                at = next((n for n, (a, b) in pairs if a != b), min(len(expected), len(drawn)))
                when = "in flight" if i < len(completions) // 2 else "begun after the change"
                misses.append(f"{when}, by {'AB'[version]}: at token {at + 1} of {len(expected)}")
    changed = sum(len(c.spans) > 1 for c in completions)
    half = len(completions) // 2
    old = {c.prompt_ids.tobytes(): c.token_ids for c in completions[:half] if c.versions[0] == 0}
    if not total[0]:  # a fresh A has been asked all prompts instead
        old = {c.prompt_ids.tobytes(): drawn for c, drawn in zip(completions[half:], again[0], strict=True)}
    differ = sum(old.get(c.prompt_ids.tobytes(), c.token_ids) != c.token_ids for c in completions[half:])
    before, afterwards = zip(exact, total, strict=True)
    counts = len(completions), met, changed, differ
    return Verdict(*counts, before, afterwards, (tokens[0], tokens[1]), hold, tuple(misses))
