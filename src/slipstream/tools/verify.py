"""`slipstream verify`: compare an engine with fresh engines before and after a publish.

A batch is generated greedily by policy A, and B is published meanwhile. Fresh engines that loaded the files of A and B
generate each token again. The link under test has no part in that, so a difference is a fault of engine or link.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slipstream.config.adapter import ADAPTER_WEIGHTS
from slipstream.config.loading import with_options
from slipstream.config.schema import Config, ConfigError
from slipstream.controller.launch import Cluster, start_generators
from slipstream.controller.setup import validate_models
from slipstream.generators.generator_worker import Engine, GeneratorWorker, OpenWeights
from slipstream.generators.vllm.engine import VllmEngine, VllmWorker
from slipstream.model.device import dtype_name
from slipstream.model.images import image_processor
from slipstream.model.tokenizer import load_tokenizer, save_tokenizer
from slipstream.rollout import Completion, Sampling, VersionSpan
from slipstream.runtime.placement import gpus_here, place, resolve_auto
from slipstream.runtime.run_directory import scratch_directory
from slipstream.runtime.worker import handle, succeeded
from slipstream.runtime.worker_process import WorkerProcess
from slipstream.sync.sharded_weights import full_tensor, local_part_like
from slipstream.trainers.trainer_worker import PytorchTrainerWorker

SEED = 0  # of the prompts and of the noise
MAX_BATCHED_TOKENS = 128
# vLLM's batch-invariant mode, and the NCCL settings that it implies: both ends of a link need the same settings.
BATCH_INVARIANT = {
    "VLLM_BATCH_INVARIANT": "1", "NCCL_LAUNCH_MODE": "GROUP", "NCCL_COLLNET_ENABLE": "0", "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_NET_DISABLE": "1", "NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "1", "NCCL_PROTO": "Simple",
    "NCCL_ALGO": "allreduce:tree", "NCCL_NTHREADS": "1", "NCCL_SOCKET_NTHREADS": "1",
}  # fmt: skip
# Engines that are compiled separately may get kernels that round differently. In vLLM 0.25.1 `fused_add_rms_norm` sums
# in another order in passes of 256 tokens or more, batch-invariant or not, so passes are kept shorter.
INVARIANT = {
    "compilation_config": {"mode": 0, "custom_ops": ["all"], "cudagraph_mode": "FULL_DECODE_ONLY"},
    "max_num_batched_tokens": MAX_BATCHED_TOKENS,
}
Spans = Sequence[tuple[Completion, VersionSpan]]
CHANGE = 0.05  # difference between A and B, in standard deviations of each parameter
FRESH = 0.02  # difference for an adapter factor that starts as zeros: gives a product of similar size
STRENGTHS = (1, 64)  # factors of both; the second if A and B answer alike, as in untrained models with tied embeddings
# Tokens of a completion: the first length that outlasts the swap is used, on GPUs the last, since each try starts all
# engines again, which takes minutes, and 1,024 tokens take seconds.
LENGTHS = (64, 256, 1024)
PROMPT_TOKENS = (4, 24)
MAX_SHOWN = 5  # inexact completions
POLL_S = 0.02
RAISE_TOKENS = "raise --tokens"
ALIKE = (
    "A and B answer every prompt alike: with few of them raise --prompts or --tokens; else this model answers the same "
    "by most weights, as one that is untrained may: give a trained model"
)


@dataclass(frozen=True)
class Verdict:
    """The result: pairs are (exact, all) completions or tokens by A and by B."""

    completions: int
    met: int  # in flight when the publish started
    changed: int  # with tokens of both versions
    differ: int  # prompts that A and B answer differently
    before: tuple[int, int]
    after: tuple[int, int]
    tokens: tuple[int, int]
    pause_s: float  # seconds of the pause
    misses: tuple[str, ...]  # the first difference of each inexact completion
    how: str = "continue"  # `sync.in_flight`
    tokens_discarded: int = 0  # tokens that the engine discarded at the swap
    longer: str = RAISE_TOKENS  # advice to get longer completions
    link: str = ""  # the link that was verified, where the configuration says "auto"

    @property
    def exact(self) -> bool:
        """Whether the swap was observed and every token is exact."""
        return not self.misses and not self.unseen

    @property
    def unseen(self) -> str:
        """Why these completions can't show the swap, with advice; "" if they can."""
        if not self.met:
            return f"nothing was in flight at the publish: {self.longer}"
        # A restarted engine does not count what it discarded, but then tokens by A are missing.
        nothing_restarted = self.how == "retry" and not self.tokens_discarded and self.before[1]
        if (self.how == "recompute" and not self.changed) or nothing_restarted:
            return f"all that was in flight had ended at the swap: {self.longer}"
        if not self.after[1]:
            return f"nothing was sampled by B: {self.longer}"
        return "" if self.differ else ALIKE

    def describe(self, config: Config) -> str:
        """The verdict as a table."""
        generator = config.generator
        discarded = f"; {self.tokens_discarded} tokens were discarded" if self.tokens_discarded else ""
        stages = generator.pipeline_parallel_size
        pipeline = f", pipeline parallel {stages}" if stages > 1 else ""
        parallel = f"tensor parallel {generator.tensor_parallel_size}{pipeline}"
        rows = [
            ("engine", f"{generator.engine}, {parallel}, {dtype_name(config)}"),
            ("link", f"{self.link or config.sync.link}, in flight: {config.sync.in_flight}"),
            ("completions", f"{self.completions}, of which {self.changed} changed policy in the middle"),
            ("in flight", f"{self.met} at the publish{discarded}"),
            ("A and B", f"answer {self.differ} prompts differently"),
            ("before A to B", f"{self.before[0]} of {self.before[1]} exact ({self.tokens[0]} tokens)"),
            ("after A to B", f"{self.after[0]} of {self.after[1]} exact ({self.tokens[1]} tokens)"),
            ("paused", f"{1000 * self.pause_s:.2f} ms"),
            *(("not exact", miss) for miss in self.misses[:MAX_SHOWN]),
            ("", "EXACT" if self.exact else "NOT EXACT" if self.misses else f"NOT SEEN: {self.unseen}"),
        ]
        return "\n".join(f"{name:15}{text}" for name, text in rows)


class PerturbingTrainer(PytorchTrainerWorker):
    """A trainer that adds seeded noise to every parameter instead of learning."""

    _computed: list[torch.Tensor] | None = None

    async def precompute_change(self, seed: int, strength: float = 1.0) -> None:
        """Compute the noise of `change` in advance on a CPU, where sequences in flight could end meanwhile.

        A GPU is fast, and its memory may be too short for another copy of the weights.
        """
        if self._trainer.device.type == "cpu":
            self._computed = list(self._noise(seed, strength))

    async def change(self, seed: int, strength: float = 1.0) -> None:
        """Go from A to B: add noise to every parameter, the same for a seed."""
        if self._sender:
            self._sender.before_update()
        noise, self._computed = self._computed or self._noise(seed, strength), None
        with torch.no_grad():
            for parameter, change in zip(self._trainer.parameters.values(), noise, strict=True):
                parameter.add_(change)

    @torch.no_grad()
    def _noise(self, seed: int, strength: float) -> Iterator[torch.Tensor]:
        """The noise of each parameter, or of this rank's shard of it."""
        generator = torch.Generator(self._trainer.device).manual_seed(seed)
        for parameter in self._trainer.parameters.values():
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            values = full_tensor(parameter).float()
            size = CHANGE * max(float(values.std(correction=0)), 0.02) if values.any() else FRESH  # ones deviate by 0
            yield local_part_like(noise.mul_(strength * size), parameter)

    async def store(self, path: Path) -> None:
        """Write the policy and its tokenizer in the format that engines load."""
        self._trainer.export(path)
        save_tokenizer(self._config.model.path, path)


class AdapterFromFiles(VllmWorker):
    """A generator that loads adapters from PEFT files without a weight link: by vLLM itself, or into the parameters."""

    def _load(self) -> tuple[Engine, OpenWeights]:
        kind = VllmWorker if self._config.generator.engine == "vllm" else GeneratorWorker
        return kind._load(self)

    async def load_adapter(self, path: str) -> None:
        """Load the adapter in a PEFT directory."""
        engine: Any = self._engine
        if isinstance(engine, VllmEngine):
            engine.load_adapters({"": path})
            return
        for name, tensor in load_file(Path(path) / ADAPTER_WEIGHTS).items():
            inner = re.sub(r"(\.lora_\w+)\.weight$", r"\1.default.weight", name.removeprefix("base_model.model."))
            engine.model.get_parameter(inner).data.copy_(tensor)


async def verify(config: Config, *, prompts: int = 16, tokens: int | None = None, after: int = 16) -> Verdict:
    """Publish B once a completion has `after` tokens by A, and compare with fresh engines.

    The duration of a publish is unknown before: without `tokens`, lengths of LENGTHS are tried. If A and B answer
    alike, the next of STRENGTHS is tried. Raises `ConfigError`.
    """
    tried = LENGTHS[-1:] if gpus_here() else LENGTHS
    lengths = [tokens] if tokens is not None else [n for n in tried if n > after] or [LENGTHS[-1] + after]
    # `tokens` bounds completions here, not the run's option, for which a small context may have no room.
    config = resolve_auto(with_options(config, sampling=config.sampling.model_dump() | {"max_tokens": 1}))
    validate_models(config)
    strengths = list(STRENGTHS)
    while True:
        verdict = await _verify(config, prompts, lengths[0], after, strengths[0])
        more = strengths if verdict.unseen == ALIKE else lengths if verdict.longer == RAISE_TOKENS else []
        if len(more) < 2 or verdict.exact or verdict.misses:
            return verdict
        more.pop(0)
        how = "a larger change" if more is strengths else f"{lengths[0]} tokens"
        print(f"{verdict.unseen.partition(':')[0]}; once more with {how}", file=sys.stderr)


async def _verify(config: Config, prompts: int, tokens: int, after: int, strength: float) -> Verdict:
    fresh = _for_local_engines(config)
    if not config.generator.servers:
        config = fresh
    fresh = _with_one_engine(fresh)
    if min(prompts, tokens) < 1 or after < 0:
        raise ConfigError(
            f"verify with --prompts {prompts} --tokens {tokens} --after {after} compares nothing; give at least 1 "
            "prompt and token, and --after 0 or more"
        )
    trainer = f"{PerturbingTrainer.__module__}:{PerturbingTrainer.__qualname__}"
    config = with_options(config, trainer={**config.trainer.model_dump(), "kind": trainer})
    vocabulary, rng = len(load_tokenizer(config.model.path)), random.Random(SEED)
    asked = [[rng.randrange(vocabulary) for _ in range(rng.randint(*PROMPT_TOKENS))] for _ in range(prompts)]
    # A placeholder without an image is refused: prompts have none, and completions, which become prompts, end at one.
    placeholders = (images.placeholder,) if (images := image_processor(config.model.path)) else ()
    asked = [[token for token in prompt if token not in placeholders] for prompt in asked]
    sampling = _greedy(tokens, placeholders)
    with scratch_directory("verify") as folder:
        completions, observed = await _publish_midway(config, folder, asked, sampling, after, strength)
        by_a, by_b = ([(c, s) for c in completions for s in c.spans if s.version == v] for v in (0, 1))
        # If no token by A was kept, as under `retry`, A answers all of B's prompts, to see that the answers differ.
        by_a = by_a or [(c, c.spans[-1]) for c in completions[prompts:]]
        again = [await _generate_fresh(fresh, folder / name, s, sampling) for name, s in (("A", by_a), ("B", by_b))]
    longer = _longer(completions[:prompts], tokens)
    return _verdict(completions, again, how=config.sync.in_flight, longer=longer, link=config.sync.link, **observed)


def _with_one_engine(config: Config) -> Config:
    one = {"generator": config.generator.model_dump() | {"replicas": 1, "min_replicas": 1}}
    if config.sync.link == "single_copy" and config.generator.replicas > 1:  # with a trainer rank for each engine
        several = {"parallel", "context_parallel"}  # options of several ranks
        one["trainer"] = config.trainer.model_dump(exclude_unset=True, exclude=several) | {"ranks": 1}
    return with_options(config, **one)


def _for_local_engines(config: Config) -> Config:
    """The configuration of engines that run here, without the user's servers. Makes vLLM on GPUs batch-invariant in
    all processes that start from here on."""
    generator, others = config.generator.model_dump(), {}
    if config.generator.servers:
        generator |= {"servers": [], "replicas": 1}
        others = {"sync": {"link": "lora" if config.serves_adapters else "shared"}}
    if gpus_here() and config.generator.engine == "vllm":
        os.environ.update(BATCH_INVARIANT)
        engine_args = INVARIANT | config.generator.engine_args
        generator |= {"max_num_seqs": MAX_BATCHED_TOKENS, "engine_args": engine_args}
    return with_options(config, generator=generator, **others)


def _longer(completions: Sequence[Completion], tokens: int) -> str:
    """What to raise for longer completions."""
    return RAISE_TOKENS if any(len(c.token_ids) == tokens for c in completions) else "raise generator.max_model_len"


async def _publish_midway(
    config: Config, folder: Path, asked: Sequence[Sequence[int]], sampling: Sampling, after: int, strength: float
) -> tuple[list[Completion], dict[str, Any]]:
    """Publish B while the prompts are answered, then ask them again. Writes A and B to directories in `folder`.

    Returns the completions of the first round, then of the second, and fields of the verdict: `pause_s`, `met`,
    `tokens_discarded`.
    """
    cluster = await Cluster.start(config, folder)
    try:
        await cluster.link.connect(0)
        trainer = handle(PerturbingTrainer, cluster.trainer_process)
        async with cluster.trainer_turn(publishes=False):
            await trainer.store(folder / "A")
        await trainer.precompute_change(SEED, strength)
        requests = [asyncio.ensure_future(cluster.generator.generate(prompt, sampling)) for prompt in asked]
        answers = asyncio.gather(*requests)
        answers.add_done_callback(succeeded)  # marks an exception as retrieved; it is raised below
        while not answers.done() and await cluster.generator.longest_in_flight() < after:
            await asyncio.sleep(POLL_S)
        async with cluster.trainer_turn(publishes=True):
            await trainer.change(SEED, strength)
            met = sum(not request.done() for request in requests)
            stats = await cluster.link.publish(1)
        # A second round, since new sequences must not read A's entries in a prefix cache.
        later = await asyncio.gather(*(cluster.generator.generate(prompt, sampling) for prompt in asked))
        async with cluster.trainer_turn(publishes=False):
            await trainer.store(folder / "B")
        discarded = sum(
            [(await generator.stats()).get("tokens_discarded", 0.0) for generator in cluster.generator.generators]
        )
        return [*await answers, *later], {"pause_s": stats.pause_s, "met": met, "tokens_discarded": round(discarded)}
    finally:
        await cluster.close()


async def _generate_fresh(config: Config, store: Path, spans: Spans, sampling: Sampling) -> list[array[int]]:
    """The tokens that a fresh engine with the weights in `store` generates in place of these spans."""
    if not spans:
        return []
    service, adapted = "", bool(config.lora.rank)
    if adapted:  # A and B share the base model
        service = f"{AdapterFromFiles.__module__}:{AdapterFromFiles.__qualname__}"
    else:
        config = with_options(config, model={**config.model.model_dump(), "path": str(store)})
    pool = await start_generators(config, store.parent, place(config, gpus_here()), service)
    try:
        for generator in pool.generators if adapted else ():
            assert isinstance(generator.process, WorkerProcess)
            await handle(AdapterFromFiles, generator.process).load_adapter(str(store))
        prefixes = [c.prompt_ids + c.token_ids[: s.start] for c, s in spans]
        samplings = [replace(sampling, max_tokens=span.end - span.start) for _, span in spans]
        completions = await asyncio.gather(*map(pool.generate, prefixes, samplings))
        return [completion.token_ids for completion in completions]
    finally:
        await pool.close()


def _greedy(tokens: int, stop: tuple[int, ...]) -> Sampling:
    """Greedy sampling up to a token of `stop`. The end of text is ignored: short answers would end before the swap."""
    return Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, stop_tokens=stop)


def _verdict(completions: Sequence[Completion], again: Sequence[list[array[int]]], **observed: Any) -> Verdict:
    """The comparison of both rounds with the tokens `again` of fresh A and B, span by span, and `observed` fields."""
    half, counts, misses = len(completions) // 2, [], list[str]()
    for version, name in enumerate("AB"):
        spans = [(i, c, s) for i, c in enumerate(completions) for s in c.spans if s.version == version]
        sampled = [(i, c.token_ids[s.start : s.end]) for i, c, s in spans]
        already = len(misses)
        for (i, expected), tokens in zip(sampled, again[version] if sampled else [], strict=True):
            if expected != tokens:
                pairs = enumerate(zip(expected, tokens, strict=False))
                at = next((n for n, (a, b) in pairs if a != b), min(len(expected), len(tokens)))
                when = "in flight" if i < half else "begun after the change"
                misses.append(f"{when}, by {name}: at token {at + 1} of {len(expected)}")
        exact = len(sampled) - (len(misses) - already)
        counts.append((exact, len(sampled), sum(len(tokens) for _, tokens in sampled)))
    (exact_a, all_a, tokens_a), (exact_b, all_b, tokens_b) = counts
    first, second = completions[:half], completions[half:]
    old = {c.prompt_ids.tobytes(): c.token_ids for c in first if c.versions[0] == 0}
    if not all_a:  # then a fresh A answered all prompts
        old = {c.prompt_ids.tobytes(): tokens for c, tokens in zip(second, again[0], strict=True)}
    return Verdict(
        completions=len(completions), changed=sum(len(c.spans) > 1 for c in completions),
        differ=sum(old.get(c.prompt_ids.tobytes(), c.token_ids) != c.token_ids for c in second),
        before=(exact_a, all_a), after=(exact_b, all_b), tokens=(tokens_a, tokens_b), misses=tuple(misses), **observed,
    )  # fmt: skip
