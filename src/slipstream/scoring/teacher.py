"""A teacher: a model that computes log-probabilities of the policy's sampled tokens.

It runs in a worker process and scores all waiting rollouts in one batch, without sampling. The teacher is a fixed model
or an earlier version of the policy.
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.config.schema import Config, ConfigError
from slipstream.rollout import Completion, build_samples, float32_array
from slipstream.runtime.runtime import current_runtime
from slipstream.runtime.worker import Worker, handle
from slipstream.runtime.worker_process import WorkerProcess
from slipstream.scoring.batching import Batched
from slipstream.scoring.process import ScoringProcess

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Teacher(ScoringProcess):
    """The controller's handle of the teacher's worker."""

    def __init__(self, config: Config, log: Path | None) -> None:
        teacher, mine = config.teacher, os.environ.get(VISIBLE)
        self._config, self._log = config, log
        gpu = visible_device_env(teacher.device, mine) if teacher.engine == "vllm" else {}
        launcher = current_runtime().service(teacher.device)
        limits = config.runtime
        super().__init__(lambda: WorkerProcess("teacher", log, launcher, gpu, limits), limits.max_restarts)

    async def _start(self, process: WorkerProcess) -> None:
        reference = "slipstream.scoring.teacher:TeacherWorker"
        await process.start(TeacherWorker, reference, self._config, self._log)

    async def score(self, completions: Sequence[Completion]) -> tuple[array[float], ...]:
        """Log-probabilities of the sampled tokens, one row for each completion, at their sampling temperature.

        Raises `WorkerError` or `WorkerDied`.
        """
        return await self.repeat(lambda: handle(TeacherWorker, self.process).score(tuple(completions)))

    async def load(self, path: Path) -> None:
        """Replace the teacher by the model at `path`. Raises `WorkerError` or `WorkerDied`."""
        self._config = replace_teacher(self._config, path)  # a process that is restarted starts with it
        await self.repeat(lambda: handle(TeacherWorker, self.process).load(str(path)))


def replace_teacher(config: Config, path: Path) -> Config:
    return config.model_copy(update={"teacher": config.teacher.model_copy(update={"path": str(path)})})


def visible_device_env(device: str, visible: str | None) -> dict[str, str]:
    """Environment of a process that uses its first visible GPU: restricts it to `device` of the `visible` GPUs."""
    if not device.startswith("cuda:"):
        return {}
    number = device.removeprefix("cuda:")
    return {VISIBLE: visible.split(",")[int(number)] if visible else number}


def rotate_snapshots(path: Path, lag: int, version: int) -> tuple[Path, Path]:
    """Create the directory of a version. Returns it and that of the version `lag` versions behind, or of the oldest.

    Removes versions that are too old, or newer than a resumed run.
    """
    for directory in list(path.glob("version_*")):
        if not version - lag <= int(directory.name.removeprefix("version_")) < version:
            shutil.rmtree(directory)
    new = path / f"version_{version:06d}"
    new.mkdir(parents=True)
    return new, min(path.glob("version_*"), key=lambda directory: int(directory.name.removeprefix("version_")))


class TeacherWorker(Worker):
    """The teacher's worker process; scores all waiting requests together."""

    def __init__(self, config: Config, log: Path | None = None) -> None:
        self._config, self._log = config, log
        self._model = self._load(config.teacher.path or config.model.path)
        self._requests = Batched(self._score_all)

    @property
    def progress(self) -> int:
        return self._model.progress

    async def score(self, completions: Sequence[Completion]) -> tuple[array[float], ...]:
        """Log-probabilities of the sampled tokens, one row for each completion."""
        return await self._requests.ask(completions)

    async def load(self, path: str) -> None:
        """Replace the model, after waiting requests are scored by the current one."""
        self._requests.flush()
        self._model = self._load(path)

    def close(self) -> None:
        self._model.close()

    def _score_all(self, requests: Sequence[Sequence[Completion]]) -> list[tuple[array[float], ...]]:
        rows = iter(self._model.score([c for completions in requests for c in completions]))
        return [tuple(float32_array(next(rows)) for _ in completions) for completions in requests]

    def _load(self, path: str) -> TorchTeacher | VllmTeacher:
        try:
            if self._config.teacher.engine == "vllm":
                return VllmTeacher(self._config, path, self._log)
            return TorchTeacher(self._config, path)
        except ConfigError as error:
            raise ConfigError(str(error).replace("model.path", "teacher.path", 1)) from None


class TorchTeacher:
    """A transformers model. Tokens that top-k or top-p removed at sampling have probability 0 here, too."""

    def __init__(self, config: Config, path: str) -> None:
        import torch

        from slipstream.model.device import dtype_of, pick_device
        from slipstream.model.loading import load_causal_lm
        from slipstream.model.policy import PackedPolicy

        teacher = config.teacher
        cores = os.cpu_count() or 1
        torch.set_num_threads(teacher.threads or max(1, cores // (config.generator.engines + 2)))
        self._device = pick_device(teacher.device, "teacher.device")
        model = load_causal_lm(path, device=self._device, dtype=dtype_of(config)).eval()
        self._model = PackedPolicy(model)
        self.progress = 0
        self._budget = config.trainer.tokens_per_microbatch

    def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        import torch

        from slipstream.model.packing import group_by_prefix, pack, plan, prefix_group_length

        nonempty = [i for i, c in enumerate(completions) if c.token_ids]
        # Experts that the policy's generator chose are not the teacher's.
        samples = [sample for i in nonempty for sample in build_samples([replace(completions[i], experts=None)])]
        prefix_groups = group_by_prefix(samples, self._budget, share=self._model.packs)
        rows: list[list[float]] = [[] for _ in completions]
        [planned] = plan([prefix_group_length(samples, members) for members in prefix_groups], self._budget)
        for items in filter(None, planned):
            micro = pack(samples, [prefix_groups[i] for i in items], self._device)
            with torch.no_grad():
                logprobs, _ = self._model(micro)
            lengths = [len(samples[i].sampled_positions) for i in micro.order]
            for index, row in zip(micro.order, logprobs.split(lengths), strict=True):
                rows[nonempty[index]] = row.tolist()
            self.progress += 1
        return rows

    def close(self) -> None: ...


class VllmTeacher:
    """vLLM, whose prompt log-probabilities are those of temperature 1."""

    progress = 0  # vLLM reports none: `runtime.progress_timeout` bounds a whole batch

    def __init__(self, config: Config, path: str, log: Path | None) -> None:
        from slipstream.generators.vllm.compat import exit_when_core_dies
        from slipstream.generators.vllm.launch import start_vllm

        self._llm: Any = start_vllm("teacher", lambda: _new_engine(config, path), log, config.teacher.engine_args)
        self._closing = exit_when_core_dies(self._llm.llm_engine)

    def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": [*c.prompt_ids, *c.token_ids]} for c in completions]
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [
            _last_logprobs(output.prompt_logprobs, c.token_ids) for output, c in zip(outputs, completions, strict=True)
        ]

    def close(self) -> None:
        self._closing.set()


def _new_engine(config: Config, path: str) -> Any:
    import torch
    from vllm import LLM

    from slipstream.generators.vllm.launch import cpu_arguments, validate_on_cpu
    from slipstream.model.device import dtype_name, dtype_of

    arguments: dict[str, Any] = {
        "model": path, "dtype": dtype_name(config),
        "gpu_memory_utilization": config.teacher.gpu_memory_utilization or 0.4,
        "max_model_len": config.generator.max_model_len or None, "seed": config.loop.seed, "disable_log_stats": True,
    }  # fmt: skip
    if not torch.cuda.is_available():
        validate_on_cpu(path)
        arguments |= cpu_arguments(
            path, dtype_of(config), config.generator.max_model_len, config.teacher.gpu_memory_utilization
        )
    return LLM(**arguments | config.teacher.engine_args)


def _last_logprobs(positions: Any, token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of the last tokens of a prompt."""
    last = positions[len(positions) - len(token_ids) :]
    return [p[token].logprob for p, token in zip(last, token_ids, strict=True)]
