"""A reward model or process-reward model as a scorer, in its own worker process.

Waiting requests are scored together, in micro-batches of similar lengths. A model with the policy's vocabulary reads
the sampled tokens; any other reads the text.
"""

from __future__ import annotations

import bisect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from slipstream.config.schema import ConfigError, RuntimeConfig
from slipstream.config.section import Section, parse_options
from slipstream.environments.base import Task
from slipstream.environments.reward_workers import ScoringError
from slipstream.rollout import Completion, Rollout
from slipstream.runtime.runtime import current_runtime
from slipstream.runtime.worker import Worker, WorkerError, handle
from slipstream.runtime.worker_process import WorkerProcess
from slipstream.scoring.batching import Batched
from slipstream.scoring.process import ScoringProcess

REDUCE: dict[str, Callable[[list[float]], float]] = {
    "last": lambda values: values[-1],
    "min": min,
    "mean": lambda values: math.fsum(values) / len(values),
}
OPTION = "scoring.options.path"
KINDS = ("SequenceClassification", "TokenClassification")


class RewardModelOptions(Section):
    """`scoring.options`, which docs/scoring.md describes."""

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    threads: int = Field(0, ge=0)
    label: int = -1
    tokens: int = Field(8192, ge=1)
    separator: str = ""
    reduce: Literal["last", "min", "mean"] = "last"


class RewardModel(ScoringProcess):
    """The controller's handle of the worker. Raises `ConfigError` for invalid options, or a model that can't score."""

    def __init__(self, options: Mapping[str, Any], policy: str, log: Path | None, limits: RuntimeConfig) -> None:
        self._options, self._policy = parse_options("scoring", RewardModelOptions, options), policy
        _validate_model(self._options.path, policy)
        launcher = current_runtime().service(self._options.device)
        super().__init__(lambda: WorkerProcess("reward model", log, launcher, limits=limits), limits.max_restarts)

    async def _start(self, process: WorkerProcess) -> None:
        reference = "slipstream.scoring.model:RewardModelWorker"
        await process.start(RewardModelWorker, reference, self._options, self._policy)

    async def score(self, task: Task, rollout: Rollout) -> Any:
        """The reward of the last completion; from a process-reward model, rewards of the steps of all completions."""
        try:
            return await handle(RewardModelWorker, self.process).score(task.prompt, rollout.completions)
        except WorkerError as error:
            kind = "input" if error.kind == ScoringError.__name__ else error.kind
            raise ScoringError(f"reward model {kind}", str(error)) from None


@dataclass(frozen=True)
class ScoredSequence:
    """The model's input, and pairs (position whose score is read, token of the completion that the score is for)."""

    ids: Sequence[int]
    reads: Sequence[tuple[int, int]]


class RewardModelWorker(Worker):
    """The worker process of a reward model; scores all waiting requests together. `progress` counts forward passes."""

    progress = 0

    def __init__(self, options: RewardModelOptions, policy: str) -> None:
        import torch

        from slipstream.model.device import pick_device
        from slipstream.model.tokenizer import load_tokenizer

        torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 1) // 3))
        self._device = pick_device(options.device, "scoring.options.device")
        self._model = load_classifier(options.path, self._device, getattr(torch, options.dtype))
        self._per_token = type(self._model).__name__.endswith(KINDS[1])
        self._label, self._budget = options.label, options.tokens
        self._separator, self._reduce = options.separator, REDUCE[options.reduce]
        self._policy_tokenizer = load_tokenizer(policy)
        self._tokenizer = load_tokenizer(options.path, OPTION)
        self._same = self._tokenizer.get_vocab() == self._policy_tokenizer.get_vocab()
        self._requests = Batched(self._score_all)

    async def score(self, prompt: Any, completions: Sequence[Completion]) -> Any:
        """The reward of the last completion; from a process-reward model, rewards of the steps of all completions."""
        if len(completions) > 1 and not self._same and self._tokenizer.chat_template:
            raise ScoringError(
                "reward model input",
                f"an episode of {len(completions)} turns can't be given to a reward model with its own vocabulary and "
                "chat template, which would read the task and one reply only; take one with the policy's "
                'vocabulary, or write a scorer of your own: scoring.kind = "module:Class"',
            )
        readings = [self._sequence(prompt, c) for c in (completions if self._per_token else completions[-1:])]
        return self._answer(await self._requests.ask(readings))

    def _score_all(self, requests: Sequence[list[ScoredSequence]]) -> list[list[list[list[Any]]]]:
        values = iter(self._score_sequences([reading for readings in requests for reading in readings]))
        return [[next(values) for _ in readings] for readings in requests]

    def _answer(self, steps: list[list[list[Any]]]) -> Any:
        rewards = [reward for completion in steps for _, reward in completion]
        if not self._per_token:
            return rewards[0]
        return {"reward": self._reduce(rewards) if rewards else 0.0, "tokens": steps}

    def _sequence(self, prompt: Any, completion: Completion) -> ScoredSequence:
        if self._same:
            before = len(completion.prompt_ids)
            ids: Sequence[int] = (*completion.prompt_ids, *completion.token_ids)
            steps = self._steps(completion) if self._per_token else []
            return ScoredSequence(ids, [(before + end, end) for end in steps] or [(len(ids) - 1, 0)])
        text, special = self._text(prompt, completion), not self._tokenizer.chat_template  # a template writes its own
        ids = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ScoredSequence(ids, [(len(ids) - 1, 0)])

    def _text(self, prompt: Any, completion: Completion) -> str:
        """The prompt and the reply in the reward model's chat template.

        Without a template: the policy's decoded prompt tokens, followed by the completion's text.
        """
        if not self._tokenizer.chat_template:
            before: str = self._policy_tokenizer.decode(completion.prompt_ids, skip_special_tokens=True)
            return before + completion.text
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        chat = [*messages, {"role": "assistant", "content": completion.text}]
        text: str = self._tokenizer.apply_chat_template(chat, tokenize=False)
        return text

    def _steps(self, completion: Completion) -> list[int]:
        """The last token of each step of a completion."""
        ids = completion.token_ids
        if not self._separator:
            return list(range(len(ids)))
        text = completion.text

        def characters(tokens: int) -> int:
            return len(self._policy_tokenizer.decode(ids[:tokens], skip_special_tokens=True))

        ends = [found.end() for found in re.finditer(re.escape(self._separator), text)]
        if not ends or text[ends[-1] :].strip():
            ends.append(len(text))
        counts = [min(bisect.bisect_left(range(len(ids) + 1), at, key=characters), len(ids)) for at in ends]
        return [count - 1 for count in counts if count]

    def _score_sequences(self, sequences: list[ScoredSequence]) -> list[list[list[Any]]]:
        """For each sequence, pairs [token of the completion, score]."""
        import torch

        found: dict[int, list[list[Any]]] = {}
        with torch.inference_mode():
            for indices in padded([len(s.ids) for s in sequences], self._budget):
                chosen = [sequences[i] for i in indices]
                scores = self._scores([s.ids for s in chosen])
                for row, (index, sequence) in enumerate(zip(indices, chosen, strict=True)):
                    own = scores[row] if self._per_token else scores[row].expand(len(sequence.ids))
                    found[index] = [[end, own[at].item()] for at, end in sequence.reads]
                self.progress += 1
        return [found[i] for i in range(len(sequences))]

    def _scores(self, rows: list[Sequence[int]]) -> Any:
        """The model's scores, `[rows]` or `[rows, tokens]`: its one output, or the probability of a label."""
        import torch

        longest, last = max(map(len, rows)), {row[-1] for row in rows}
        # A classifier looks for the last token that differs from padding, so no row may end with the padding token.
        padding = next(i for i in range(len(last) + 1) if i not in last)
        self._model.config.pad_token_id = padding
        ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._device)
        logits = self._model(input_ids=ids, attention_mask=mask).logits.float()
        return logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., self._label]


def padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of the sequences of each forward pass: similar lengths together, at most `budget` padded tokens.

    A sequence longer than the budget has its own pass.
    """
    passes: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if passes and lengths[index] * (len(passes[-1]) + 1) <= budget:
            passes[-1].append(index)
        else:
            passes.append([index])
    return passes


def load_classifier(path: str, device: Any, dtype: Any) -> Any:
    """The sequence- or token-classification model at `path`. Raises `ConfigError`."""
    import transformers

    from slipstream.model.loading import explain_damaged_files, load_pretrained
    from slipstream.model.paths import check_path

    check_path(path, OPTION)
    with explain_damaged_files(path, OPTION):
        config = transformers.AutoConfig.from_pretrained(path)
    named = (config.architectures or [""])[0]
    kind = next((k for k in KINDS if named.endswith(f"For{k}")), None)
    if kind is None:
        raise ConfigError(
            f"{OPTION} = {path!r} is a {named or 'model of no kind'}, no classifier of sequences or tokens; give a "
            "reward model, as saved by AutoModelForSequenceClassification or AutoModelForTokenClassification"
        )
    loader = getattr(transformers, f"AutoModelFor{kind}")
    return load_pretrained(loader, path, device=device, dtype=dtype, option=OPTION).eval()


def _validate_model(path: str, policy: str) -> None:
    import torch

    from slipstream.model.tokenizer import load_tokenizer, validate_same_vocabulary

    model = load_classifier(path, torch.device("meta"), torch.float32)
    if type(model).__name__.endswith(KINDS[1]):
        validate_same_vocabulary(path, OPTION, policy)
    load_tokenizer(path, OPTION)
