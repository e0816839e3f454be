"""A teacher: a model that draws nothing and says how likely it would have drawn what the policy drew.

It runs in a process of its own and takes whatever rollouts wait for it as one batch: one forward pass a micro-batch, no
sampling. It is a model that stays as it is, or the policy itself some versions ago.
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from slipstream.actor import Actor, ActorDied, Reply
from slipstream.config import Config, ConfigError
from slipstream.rollout import Completion, numbers, samples_of

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Teacher:
    """The controller's end."""

    def __init__(self, config: Config, log: Path | None) -> None:
        teacher, mine = config.teacher, os.environ.get(VISIBLE)
        self._config, self._log = config, log
        gpu = gpu_of(teacher.device, mine) if teacher.kind == "vllm" else {}
        self._actor = Actor("teacher", log, gpu, progress_timeout=config.runtime.progress_timeout)

    async def start(self) -> None:
        """Load the model. Raises what the process raises as `ActorError`."""
        await self._actor.start("slipstream.scoring.teacher:TeacherService", self._config, self._log)

    async def score(self, completions: Sequence[Completion]) -> tuple[array[float], ...]:
        """Log-probabilities of the drawn tokens, a row a completion, at the temperature that they were drawn with."""
        rows: tuple[array[float], ...] = await self._actor.call("score", tuple(completions))
        return rows

    @property
    def dead(self) -> ActorDied | None:
        return self._actor.dead

    async def load(self, path: Path) -> None:
        """Be the model at `path` from now on."""
        await self._actor.call("load", str(path))

    async def close(self) -> None:
        await self._actor.stop()


def gpu_of(device: str, visible: str | None) -> dict[str, str]:
    """The environment of a process that takes the first GPU it sees, so that this is `device` of the `visible` ones."""
    if not device.startswith("cuda:"):
        return {}
    number = device.removeprefix("cuda:")
    return {VISIBLE: visible.split(",")[int(number)] if visible else number}


class Snapshots:
    """The policy's last `lag + 1` versions as directories in `path`, for a teacher that is `lag` versions behind."""

    def __init__(self, path: Path, lag: int) -> None:
        self._path, self._lag = path, lag

    def new(self, version: int) -> Path:
        """Where this version belongs. Those that are too old now go, and so do those that a resumed run takes back."""
        for known, directory in self._versions():
            if not version - self._lag <= known < version:
                shutil.rmtree(directory)
        path = self._path / f"version_{version:06d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def oldest(self) -> Path:
        """The version that is `lag` behind, or, as long as there is none, the first."""
        return self._versions()[0][1]

    def _versions(self) -> list[tuple[int, Path]]:
        return sorted((int(path.name.removeprefix("version_")), path) for path in self._path.glob("version_*"))


class Reader(Protocol):
    """A model that scores completions; `progress` counts its passes."""

    progress: int

    def score(self, completions: Sequence[Completion]) -> list[list[float]]: ...
    def close(self) -> None: ...


class TeacherService:
    """What runs in the process: questions are collected, and all that have arrived are answered together."""

    def __init__(self, config: Config, log: Path | None = None) -> None:
        self._config, self._log = config, log
        self._waiting: list[tuple[Sequence[Completion], Reply]] = []
        self._reader = self._read(config.teacher.path or config.model.path)

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    @property
    def progress(self) -> int:
        return self._reader.progress

    def handle(self, method: str, arguments: tuple[Any, ...], reply: Reply) -> None:
        if method == "score":
            self._waiting.append((arguments[0], reply))
        else:
            self.tick()  # what was asked before is answered by the model as it was
            self._reader = self._read(*arguments)
            reply(None)

    def tick(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            rows = iter(self._reader.score([c for completions, _ in waiting for c in completions]))
        except Exception as error:
            for _, reply in waiting:
                reply(error)
            return
        for completions, reply in waiting:
            reply(tuple(numbers(next(rows)) for _ in completions))

    def close(self) -> None:
        self._reader.close()

    def _read(self, path: str) -> Reader:
        try:
            if self._config.teacher.kind == "vllm":
                return VllmReader(self._config, path, self._log)
            return TorchReader(self._config, path)
        except ConfigError as error:
            raise ConfigError(str(error).replace("model.path", "teacher.path", 1)) from None


class TorchReader:
    """A transformers model. Tokens that top-k or top-p removed when a token was drawn are removed here, too."""

    def __init__(self, config: Config, path: str) -> None:
        import torch

        from slipstream.models import dtype_of, load_causal_lm, pick_device
        from slipstream.packed.policy import Policy

        teacher = config.teacher
        cores = os.cpu_count() or 1
        torch.set_num_threads(teacher.threads or max(1, cores // (config.generator.engines + 2)))
        self._device = pick_device(teacher.device, "teacher.device")
        model = load_causal_lm(path, device=self._device, dtype=dtype_of(config)).eval()
        refuse_other_vocabulary(config, path, model.config.vocab_size)
        self._model = Policy(model)
        self.progress = 0
        self._budget = config.trainer.tokens_per_microbatch

    def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        import torch

        from slipstream.packed.packing import bundle, bundle_length, pack, plan

        known = [i for i, c in enumerate(completions) if c.token_ids]
        # Experts that the policy's generator chose are not the teacher's.
        samples = [sample for i in known for sample in samples_of([replace(completions[i], experts=None)])]
        bundles = bundle(samples, self._budget, share=self._model.packs)
        rows: list[list[float]] = [[] for _ in completions]
        [planned] = plan([bundle_length(samples, members) for members in bundles], self._budget)
        for items in filter(None, planned):
            micro = pack(samples, [bundles[i] for i in items], self._device)
            with torch.no_grad():
                logprobs, _ = self._model(micro)
            for index, row in zip(
                micro.order, logprobs.split([len(samples[i].drawn) for i in micro.order]), strict=True
            ):
                rows[known[index]] = row.tolist()
            self.progress += 1
        return rows

    def close(self) -> None: ...


class VllmReader:
    """vLLM, asked for the log-probabilities of prompts, which it gives at temperature 1 alone."""

    progress = 0  # vLLM tells of none: all prompts together have `runtime.progress_timeout`

    def __init__(self, config: Config, path: str, log: Path | None) -> None:
        from slipstream.generators.vllm_calls import end_with_core
        from slipstream.generators.vllm_start import start_vllm

        self._llm: Any = start_vllm("teacher", lambda: _new_engine(config, path), log)
        self._over = end_with_core(self._llm.llm_engine)
        refuse_other_vocabulary(config, path, self._llm.llm_engine.model_config.get_vocab_size())

    def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": [*c.prompt_ids, *c.token_ids]} for c in completions]
        outputs = self._llm.generate(prompts, asked, use_tqdm=False)
        return [_tail(output.prompt_logprobs, c.token_ids) for output, c in zip(outputs, completions, strict=True)]

    def close(self) -> None:
        self._over.set()


def _new_engine(config: Config, path: str) -> Any:
    import torch
    from vllm import LLM

    from slipstream.generators.vllm_start import cpu_arguments, refuse_head_size
    from slipstream.models import dtype_name, dtype_of
    from slipstream.vllm_releases import cpu_head_sizes

    arguments: dict[str, Any] = {
        "model": path, "dtype": dtype_name(config), "gpu_memory_utilization": config.teacher.memory or 0.4,
        "max_model_len": config.generator.context or None, "seed": config.loop.seed, "disable_log_stats": True,
    }  # fmt: skip
    if not torch.cuda.is_available():
        refuse_head_size(path, cpu_head_sizes())
        arguments |= cpu_arguments(path, dtype_of(config), config.generator.context, config.teacher.memory)
    return LLM(**arguments | config.teacher.options)


def _tail(positions: Any, token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of the last tokens of a prompt."""
    last = positions[len(positions) - len(token_ids) :]
    return [p[token].logprob for p, token in zip(last, token_ids, strict=True)]


def refuse_other_vocabulary(config: Config, path: str, size: int) -> None:
    """Raise `ConfigError` for a teacher to which the policy's tokens are not what they are to the policy."""
    from slipstream.models import load_tokenizer

    mine = load_tokenizer(config.model.path).get_vocab()
    alone = Path(path).is_dir() and not any(Path(path).glob("tokenizer*"))  # saved without its tokenizer
    theirs = mine if alone else load_tokenizer(path).get_vocab()
    if theirs != mine or size <= max(mine.values()):
        raise ConfigError(
            f"teacher.path = {path!r} has another vocabulary than the policy; a teacher scores the policy's own "
            "tokens, so give one of the same family"
        )
