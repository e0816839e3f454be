"""A reward model, or a process-reward model, as a scorer: on an engine of its own, in a process of its own.

Whatever waits for it goes through it together, in micro-batches of like lengths. A model with the policy's vocabulary
reads the very tokens that were drawn; any other reads the text.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.actor import Actor, ActorDied, ActorError, Reply
from slipstream.config import ConfigError
from slipstream.environments.base import Task
from slipstream.environments.scoring import ScoringError
from slipstream.rollout import Completion, Rollout
from slipstream.scoring.base import take

DEFAULTS = {
    "path": None, "dtype": "float32", "device": "auto", "threads": 0, "label": -1, "tokens": 8192,
    "separator": "", "reduce": "last",
}  # fmt: skip
REDUCE: dict[str, Callable[[list[float]], float]] = {
    "last": lambda values: values[-1],
    "min": min,
    "mean": lambda values: math.fsum(values) / len(values),
}
MARK = "reply"  # stands for a reply where it is asked what a chat template writes after one
KINDS = ("SequenceClassification", "TokenClassification")


class RewardModel:
    """The controller's end. Options: those of `DEFAULTS`. Raises `ConfigError` for options that can't be."""

    def __init__(
        self, options: Mapping[str, Any], policy: str, log: Path | None, progress_timeout: float | None = None
    ) -> None:
        self._options, self._policy = take(options, DEFAULTS, "model"), policy
        if self._options["reduce"] not in REDUCE:
            raise ConfigError(f"scoring.options.reduce = {self._options['reduce']!r}; give {', '.join(REDUCE)}")
        if self._options["dtype"] not in ("float32", "bfloat16"):
            raise ConfigError(f"scoring.options.dtype = {self._options['dtype']!r}; give float32 or bfloat16")
        self._actor = Actor("reward model", log, progress_timeout=progress_timeout)

    async def start(self) -> None:
        """Load the model. Raises what the process raises as `ActorError`."""
        await self._actor.start("slipstream.scoring.model:RewardModelService", self._options, self._policy)

    async def score(self, task: Task, rollout: Rollout) -> Any:
        """What the model says of the last completion; a process-reward model, of the steps of all."""
        try:
            return await self._actor.call("score", task.prompt, rollout.completions)
        except ActorError as error:
            kind = "input" if error.kind == ScoringError.__name__ else error.kind
            raise ScoringError(f"reward model {kind}", str(error)) from None
        except ActorDied as error:
            raise ScoringError("reward model died", str(error)) from None

    @property
    def dead(self) -> ActorDied | None:
        return self._actor.dead

    async def close(self) -> None:
        await self._actor.stop()


@dataclass(frozen=True)
class Reading:
    """Token ids for the model, and where in them the score of which token of the completion is read."""

    ids: Sequence[int]
    reads: Sequence[tuple[int, int]]


class RewardModelService:
    """What runs in the process: questions are collected, and all that have arrived are answered together."""

    def __init__(self, options: Mapping[str, Any], policy: str) -> None:
        import torch

        from slipstream.models import load_tokenizer, pick_device

        torch.set_num_threads(options["threads"] or max(1, (os.cpu_count() or 1) // 3))
        self._device = pick_device(options["device"], "scoring.options.device")
        self._model = load_classifier(options["path"], self._device, getattr(torch, options["dtype"]))
        self._per_token = type(self._model).__name__.endswith(KINDS[1])
        self._label, self._budget = options["label"], options["tokens"]
        self._separator, self._reduce = options["separator"], REDUCE[options["reduce"]]
        self._policy_tokenizer = load_tokenizer(policy)
        self._tokenizer = load_tokenizer(options["path"])
        self._same = self._tokenizer.get_vocab() == self._policy_tokenizer.get_vocab()
        if self._per_token and not self._same and not self._separator:
            raise ConfigError(
                "scoring.options.separator is not set; a process-reward model with a vocabulary of its own scores "
                r'steps, not tokens, so say what ends one, such as "\n\n"'
            )
        self._waiting: list[tuple[list[Reading], Reply]] = []
        self.progress = 0  # passes

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def handle(self, method: str, arguments: tuple[Any, ...], reply: Reply) -> None:
        prompt, completions = arguments
        if len(completions) > 1 and not self._same and self._tokenizer.chat_template:
            raise ScoringError(
                "reward model input",
                f"an episode of {len(completions)} turns can't be given to a reward model with a vocabulary and a chat "
                "template of its own, which would see the task and one reply of it; take one with the policy's "
                'vocabulary, or write a scorer of your own: scoring.kind = "module:Class"',
            )
        readings = [self._sequence(prompt, c) for c in (completions if self._per_token else completions[-1:])]
        self._waiting.append((readings, reply))

    def tick(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            values = iter(self._read([reading for readings, _ in waiting for reading in readings]))
        except Exception as error:
            for _, reply in waiting:
                reply(error)
            return
        for readings, reply in waiting:
            reply(self._answer([next(values) for _ in readings]))

    def close(self) -> None: ...

    def _answer(self, steps: list[list[list[Any]]]) -> Any:
        rewards = [reward for completion in steps for _, reward in completion]
        if not self._per_token:
            return rewards[0]
        return {"reward": self._reduce(rewards), "tokens": steps} if rewards else {"reward": 0.0, "tokens": steps}

    def _sequence(self, prompt: Any, completion: Completion) -> Reading:
        """What the model reads of a completion."""
        steps = self._steps(completion) if self._per_token else []
        if self._same:
            before = len(completion.prompt_ids)
            ids: Sequence[int] = (*completion.prompt_ids, *completion.token_ids)
            return Reading(ids, [(before + end, end) for _, end in steps] or [(len(ids) - 1, 0)])
        text, start, stop = self._text(prompt, completion)
        # What a chat template writes has its special tokens already.
        encoded = self._tokenizer(
            text, return_offsets_mapping=True, add_special_tokens=not self._tokenizer.chat_template
        )
        spans = encoded["offset_mapping"]
        tokens = [i for i, (first, last) in enumerate(spans) if first < last]  # special ones that were added have none
        starts = [spans[i][0] for i in tokens]
        reads = [(tokens[max(0, bisect.bisect_left(starts, min(start + at, stop)) - 1)], end) for at, end in steps]
        return Reading(encoded["input_ids"], reads or [(len(spans) - 1, 0)])

    def _text(self, prompt: Any, completion: Completion) -> tuple[str, int, int]:
        """The conversation as the model's own chat template writes it, or plain, and where in it the completion starts
        and stops. Raises `ScoringError` for steps of a reply that the template rewrites."""
        if not self._tokenizer.chat_template:
            before: str = self._policy_tokenizer.decode(completion.prompt_ids, skip_special_tokens=True)
            return before + completion.text, len(before), len(before) + len(completion.text)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]

        def written(reply: str) -> str:
            said = [*messages, {"role": "assistant", "content": reply}]
            text: str = self._tokenizer.apply_chat_template(said, tokenize=False)
            return text

        text = written(completion.text)
        if not self._per_token:
            return text, 0, len(text)  # a score of all of it, which is read at its end
        stop = len(text.removesuffix(written(MARK).rpartition(MARK)[2]))
        for reply in (completion.text, completion.text.lstrip(), completion.text.strip()):  # many templates strip it
            if text.endswith(reply, 0, stop):
                return text, stop - len(reply) - completion.text.find(reply), stop
        raise ScoringError(
            "reward model input",
            f"the chat template of scoring.options.path rewrites the reply {completion.text!r:.60}, so its steps can't "
            "be told in it; give the model a template that writes replies as they are",
        )

    def _steps(self, completion: Completion) -> list[tuple[int, int]]:
        """Where the steps of a completion end: the character after each, and its last token."""
        ids = completion.token_ids
        if not self._separator:
            return [(0, end) for end in range(len(ids))]
        text = completion.text

        def characters(tokens: int) -> int:
            return len(self._policy_tokenizer.decode(ids[:tokens], skip_special_tokens=True))

        ends = [at + len(self._separator) for at in _found(text, self._separator)]
        if not ends or text[ends[-1] :].strip():
            ends.append(len(text))
        tokens = [min(bisect.bisect_left(range(len(ids) + 1), at, key=characters), len(ids)) for at in ends]
        return [(at, count - 1) for at, count in zip(ends, tokens, strict=True) if count]

    def _read(self, sequences: list[Reading]) -> list[list[list[Any]]]:
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
        # A classifier finds the last token of a row by its being no padding, so no row may end with what pads.
        padding = next(i for i in range(len(last) + 1) if i not in last)
        self._model.config.pad_token_id = padding
        ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._device)
        logits = self._model(input_ids=ids, attention_mask=mask).logits.float()
        return logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., self._label]


def padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of the sequences of each forward pass: like lengths together, at most `budget` padded tokens each.

    A sequence longer than the budget goes alone.
    """
    passes: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if passes and lengths[index] * (len(passes[-1]) + 1) <= budget:
            passes[-1].append(index)
        else:
            passes.append([index])
    return passes


def _found(text: str, part: str) -> list[int]:
    """Where a part begins in a text, each time."""
    places, at = [], text.find(part)
    while at >= 0:
        places.append(at)
        at = text.find(part, at + len(part))
    return places


def load_classifier(path: str, device: Any, dtype: Any) -> Any:
    """A sequence- or token-classification model, as its configuration says. Raises `ConfigError`."""
    import transformers

    from slipstream.models import check_path, load_pretrained, naming_damage

    option = "scoring.options.path"
    check_path(path, option)
    with naming_damage(path, option):
        config = transformers.AutoConfig.from_pretrained(path)
    named = (config.architectures or [""])[0]
    kind = next((k for k in KINDS if named.endswith(f"For{k}")), None)
    if kind is None:
        raise ConfigError(
            f"{option} = {path!r} is a {named or 'model of no kind'}, no classifier of sequences or tokens"
        )
    loader = getattr(transformers, f"AutoModelFor{kind}")
    return load_pretrained(loader, path, device=device, dtype=dtype, option=option).eval()
