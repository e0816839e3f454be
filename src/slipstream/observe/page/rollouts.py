"""Rollouts for the page: columns that describe all of them, and prompts and tokens of a step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.observe.run_data import Record, Run, group_turns_by_rollout

MAX_TOKENS, MAX_CHARACTERS = 8_000, 60_000  # shown of a completion
MAX_PROMPT = 20_000  # characters
DESCRIBED = [
    "visit_id", "task_id", "rollout", "role", "turn", "reward", "advantage", "spans", "finish_reason", "metrics",
]  # fmt: skip
TEXTS = ["prompt", "completion", "prompt_ids", "completion_ids", "logprobs", "steps"]


class TokenTexts:
    """The text of each token by a tokenizer of the library tokenizers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._texts = tokenizer, dict[int, str]()
        # Decoders of sentencepiece drop a leading space, so each token is decoded behind another one.
        self._before = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._prefix = self.decode(self._before) if self._before else ""

    @classmethod
    def of(cls, run: Run) -> TokenTexts | None:
        """With the tokenizer that the run saved or started with; None if it is not on this disk."""
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
        from tokenizers import Tokenizer

        model, name = str(run.options.get("model.path", "")), "tokenizer.json"
        files = [run.path / "policy" / name, Path(model) / name]
        with contextlib.suppress(HFValidationError):  # a path instead of a name on the Hub
            files.append(Path(str(try_to_load_from_cache(model, name))))
        found = next((file for file in files if file.is_file()), None)
        with contextlib.suppress(Exception):  # tokenizers raises nothing more specific for a damaged file
            return cls(Tokenizer.from_file(str(found))) if found else None
        return None

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def split(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. A character that spans tokens is given to the first, and "" to the others."""
        found = [self._text(i) for i in ids]
        at = 0
        while at < len(ids):
            end = at + 1
            if "\ufffd" in found[at]:
                while end < len(ids) and "\ufffd" in found[end]:
                    end += 1
                found[at:end] = [self.decode(ids[at:end]), *[""] * (end - at - 1)]
            at = end
        return found

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self.decode([*self._before, token]).removeprefix(self._prefix)
        return self._texts[token]


def describe_rollouts(run: Run, step: int) -> dict[str, list[Any]]:
    """Columns with a value for each rollout of a step; {} if the step can't be read.

    A column "env/NAME" has the values of a metric of the environment.
    """
    table = run.table(step, DESCRIBED)
    rows = [_describe(step, turns) for turns in group_turns_by_rollout(table.to_pylist())] if table is not None else []
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _describe(step: int, turns: Sequence[Record]) -> Record:
    """What the page lists of a rollout; versions are 0 without a sampled token."""
    first, last = turns[0], turns[-1]
    lengths = [turn["spans"][-1]["end"] if turn["spans"] else 0 for turn in turns]
    return {
        "step": step,
        "visit": first["visit_id"],
        "rollout": first["rollout"],
        "task": first["task_id"],
        "reward": _rounded(first["reward"]),
        "advantage": _rounded(first["advantage"]),
        "tokens": sum(lengths),
        "turns": len(turns),
        "reason": last["finish_reason"],
        "oldest": first["spans"][0]["version"] if first["spans"] else 0,
        "newest": last["spans"][-1]["version"] if last["spans"] else 0,
    } | {f"env/{name}": _rounded(value) for name, value in first["metrics"] or ()}


def _rounded(value: float | None) -> float | None:
    return round(value, 5) if value is not None and math.isfinite(value) else None


def find_text(run: Run, words: str) -> list[str]:
    """The rollouts whose prompt or completion contains this text in any case, each as "STEP VISIT_ID ROLLOUT"."""
    found: dict[str, None] = {}
    for step in run.rollout_steps:
        if (table := run.table(step, ["visit_id", "rollout", "prompt", "completion"])) is not None:
            hits = [pc.match_substring(table[name], words, ignore_case=True) for name in ("prompt", "completion")]
            rows = table.filter(pc.or_kleene(*hits))
            found |= {f"{step} {row['visit_id']} {row['rollout']}": None for row in rows.to_pylist()}
    return list(found)


def step_texts(
    run: Run, step: int, texts: TokenTexts | None, budget: int = 10**9, visit: int | None = None
) -> dict[str, Any] | None:
    """Groups of a step with prompts, tokens and log-probabilities, as many as fit `budget` tokens; or only `visit`.

    `pieces` holds the text of tokens, which `tokens` index; without a tokenizer a turn has its whole `text` instead.
    `logprobs` are hundredths below 0. None if the step can't be read.
    """
    table = run.table(step, [*DESCRIBED, *TEXTS])
    if table is not None and visit is not None:
        table = table.filter(pc.equal(table["visit_id"], visit))
    if table is None or not table.num_rows:
        return None
    pieces: dict[str, int] = {}
    groups: list[dict[str, Any]] = []
    for rows in _groups(table):
        size = sum(min(len(row["completion_ids"] or ()), MAX_TOKENS) for row in rows)
        if not groups or size <= budget:
            groups.append(_group(rows, texts, pieces))
            budget -= size
        if budget <= 0:
            break
    return {"step": step, "pieces": list(pieces), "groups": groups}


def _groups(table: pa.Table) -> Iterator[list[Record]]:
    """The rows of each group: first the groups with the lowest and the highest reward, then the others in order."""
    visits, rewards = np.asarray(table["visit_id"]), np.nan_to_num(table["reward"].to_numpy())
    order = dict.fromkeys([int(visits[rewards.argmin()]), int(visits[rewards.argmax()]), *map(int, visits)])
    for visit in order:
        yield table.filter(pa.array(visits == visit)).to_pylist()


def _group(rows: list[Record], texts: TokenTexts | None, pieces: dict[str, int]) -> dict[str, Any]:
    rollouts = []
    for turns in group_turns_by_rollout(rows):
        common = {key: turns[0][key] for key in ("rollout", "role", "reward", "advantage")}
        told = [_turn(row, turns[i - 1] if i else None, texts, pieces) for i, row in enumerate(turns)]
        rollouts.append(common | {"metrics": dict(turns[0]["metrics"] or ()), "turns": told})
    first, (prompt, cut) = rows[0], _cut(rows[0]["prompt"] or "", MAX_PROMPT)
    return {"visit": first["visit_id"], "task": first["task_id"], "prompt": prompt, "cut": cut, "rollouts": rollouts}


def _turn(row: Record, before: Record | None, texts: TokenTexts | None, pieces: dict[str, int]) -> dict[str, Any]:
    ids, logprobs = row["completion_ids"] or [], row["logprobs"] or []
    found: dict[str, Any] = {"finish": row["finish_reason"], "length": len(ids), "steps": row["steps"]}
    if before:
        found["environment"], found["environment_cut"] = _cut(_environment_text(row, before, texts), MAX_PROMPT)
    if not texts:
        found["text"], found["cut"] = _cut(row["completion"] or "", MAX_CHARACTERS)
        return found
    tokens = [pieces.setdefault(text, len(pieces)) for text in texts.split(ids[:MAX_TOKENS])]
    scores = [None if p is None or not math.isfinite(p) else round(-100 * p) for p in logprobs[:MAX_TOKENS]]
    spans = [[s["version"], s["start"], s["end"]] for s in row["spans"] or ()]
    return found | {"tokens": tokens, "logprobs": scores, "spans": spans, "cut": max(0, len(ids) - MAX_TOKENS)}


def _environment_text(row: Record, previous: Record, texts: TokenTexts | None) -> str:
    """Text that the environment added between the previous turn and this one.

    The whole prompt if it does not continue the previous turn, or without a tokenizer.
    """
    context, ids = [*previous["prompt_ids"], *previous["completion_ids"]], row["prompt_ids"] or []
    if texts and ids[: len(context)] == context:
        return texts.decode(ids[len(context) :])
    return row["prompt"] or ""


def _cut(text: str, longest: int) -> tuple[str, int]:
    """The beginning of the text, and the number of characters that were cut."""
    return text[:longest], max(0, len(text) - longest)


def spread(steps: Sequence[int]) -> list[int]:
    """The steps so that every beginning of the list is spread evenly: first, last, middle, quarters, ..."""
    order, gaps = [*steps[:1], *steps[1:][-1:]], [(0, len(steps) - 1)]
    while gaps:
        middles = [(low, (low + high) // 2, high) for low, high in gaps if high - low > 1]
        order += [steps[middle] for _, middle, _ in middles]
        gaps = [pair for low, middle, high in middles for pair in ((low, middle), (middle, high))]
    return order
