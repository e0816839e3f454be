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

from slipstream.observe.run_data import Record, Run

MAX_TOKENS, MAX_CHARACTERS = 8_000, 60_000  # shown of a completion
MAX_PROMPT = 20_000  # characters
DESCRIBED = [
    "visit_id", "task_id", "rollout", "role", "turn", "reward", "advantage", "spans", "finish_reason", "metrics",
]  # fmt: skip
TEXTS = ["prompt", "completion", "prompt_ids", "completion_ids", "logprobs", "steps"]


class TokenTexts:
    """The text of each token by a tokenizer of the library tokenizers, or None if it is not on this machine."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._texts = tokenizer, dict[int, str]()
        # Decoders of sentencepiece drop a leading space, so each token is decoded behind another one.
        self._before = tokenizer.encode("a", add_special_tokens=False).ids[-1:] if tokenizer else []
        self._prefix = self.decode(self._before) if self._before else ""

    @classmethod
    def of(cls, run: Run) -> TokenTexts:
        """With the tokenizer that the run saved or started with, if it is on this disk."""
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
        from tokenizers import Tokenizer

        model, name = str(run.config.get("model", {}).get("path", "")), "tokenizer.json"
        files = [run.path / "policy" / name, Path(model) / name]
        with contextlib.suppress(HFValidationError):  # a path instead of a name on the Hub
            files.append(Path(str(try_to_load_from_cache(model, name))))
        found = next((file for file in files if file.is_file()), None)
        with contextlib.suppress(Exception):  # tokenizers raises nothing more specific for a damaged file
            return cls(Tokenizer.from_file(str(found)) if found else None)
        return cls(None)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, special tokens included."""
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
    """Columns with a value for each rollout of a step, which begins with a row of turn 0; {} if it can't be read.

    A column "env/NAME" has the values of a metric of the environment.
    """
    table = run.table(step, DESCRIBED)
    if table is None or not table.num_rows:
        return {}
    first = np.flatnonzero(table["turn"].to_numpy() == 0)
    last = np.append(first[1:], table.num_rows) - 1
    lengths, oldest, newest = _spans(table["spans"].combine_chunks())
    found = {
        "step": [step] * len(first),
        "visit": table["visit_id"].to_numpy()[first].tolist(),
        "rollout": table["rollout"].to_numpy()[first].tolist(),
        "task": table["task_id"].take(first).to_pylist(),
        "reward": _rounded(table["reward"].to_numpy()[first].tolist()),
        "advantage": _rounded(table["advantage"].to_numpy()[first].tolist()),
        "tokens": np.add.reduceat(lengths, first).tolist(),
        "turns": (last - first + 1).tolist(),
        "reason": table["finish_reason"].take(last).to_pylist(),
        "oldest": oldest[first].tolist(),
        "newest": newest[last].tolist(),
    }
    metrics = [dict(values or ()) for values in table["metrics"].take(first).to_pylist()]
    names = dict.fromkeys(name for values in metrics for name in values)
    return found | {f"env/{name}": _rounded([values.get(name) for values in metrics]) for name in names}


def _spans(spans: pa.ListArray) -> tuple[np.ndarray[Any, Any], ...]:
    """Tokens, oldest and newest version of each row; 0 without spans."""
    ends, versions = (np.append(spans.values.field(name), 0) for name in ("end", "version"))  # 0 for rows without spans
    begin, end = np.asarray(spans.offsets)[:-1], np.asarray(spans.offsets)[1:]
    first, last = (np.where(begin == end, len(ends) - 1, at) for at in (begin, end - 1))
    return ends[last], versions[first], versions[last]


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [round(v, 5) if v is not None and math.isfinite(v) else None for v in values]


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
    run: Run, step: int, texts: TokenTexts, budget: int = 10**9, visit: int | None = None
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


def _group(rows: list[Record], texts: TokenTexts, pieces: dict[str, int]) -> dict[str, Any]:
    first = rows[0]
    rollouts: list[dict[str, Any]] = []
    for at, row in enumerate(rows):
        if not row["turn"] or not rollouts:
            common = {key: row[key] for key in ("rollout", "role", "reward", "advantage")}
            rollouts.append(common | {"metrics": dict(row["metrics"] or ()), "turns": []})
        rollouts[-1]["turns"].append(_turn(row, rows[at - 1] if row["turn"] else None, texts, pieces))
    prompt, cut = _cut(first["prompt"] or "", MAX_PROMPT)
    return {"visit": first["visit_id"], "task": first["task_id"], "prompt": prompt, "cut": cut, "rollouts": rollouts}


def _turn(row: Record, before: Record | None, texts: TokenTexts, pieces: dict[str, int]) -> dict[str, Any]:
    ids, logprobs = row["completion_ids"] or [], row["logprobs"] or []
    found: dict[str, Any] = {"finish": row["finish_reason"], "length": len(ids), "steps": row["steps"]}
    if before:
        found["environment"], found["environment_cut"] = _cut(_environment_text(row, before, texts), MAX_PROMPT)
    if not texts.tokenizer:
        found["text"], found["cut"] = _cut(row["completion"] or "", MAX_CHARACTERS)
        return found
    tokens = [pieces.setdefault(text, len(pieces)) for text in texts.split(ids[:MAX_TOKENS])]
    scores = [None if p is None or not math.isfinite(p) else round(-100 * p) for p in logprobs[:MAX_TOKENS]]
    spans = [[s["version"], s["start"], s["end"]] for s in row["spans"] or ()]
    return found | {"tokens": tokens, "logprobs": scores, "spans": spans, "cut": max(0, len(ids) - MAX_TOKENS)}


def _environment_text(row: Record, previous: Record, texts: TokenTexts) -> str:
    """Text that the environment added between the previous turn and this one.

    The whole prompt if it does not continue the previous turn, or without a tokenizer.
    """
    context, ids = [*previous["prompt_ids"], *previous["completion_ids"]], row["prompt_ids"] or []
    if texts.tokenizer and ids[: len(context)] == context:
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
