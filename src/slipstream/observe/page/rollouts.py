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

MAX_ROLLOUTS = 200_000  # of a run; of more, evenly spaced steps
MAX_TOKENS, MAX_CHARACTERS = 8_000, 60_000  # shown of a completion
MAX_PROMPT = 20_000  # characters
DESCRIBED = [
    "visit_id",
    "task_id",
    "rollout",
    "role",
    "turn",
    "reward",
    "advantage",
    "spans",
    "finish_reason",
    "metrics",
]
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


def describe_rollouts(run: Run) -> dict[str, Any]:
    """Columns with a value for each rollout. `tasks`, `roles`, `reasons` hold the texts that columns index."""
    steps = run.rollout_steps
    first = run.table(steps[0], ["turn"]) if steps else None
    every = max(1, -(-len(steps) * (first.num_rows if first is not None else 1) // MAX_ROLLOUTS))
    found = RolloutColumns()
    for step in steps[::every]:
        found.add(run, step)
    return found.data() | {"steps": len(steps), "every": every}


class RolloutColumns:
    """Columns with a value for each rollout of the steps added so far, and the texts that columns index."""

    def __init__(self) -> None:
        self.texts: dict[str, dict[str, int]] = {"tasks": {}, "roles": {}, "reasons": {}}
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float | None]] = {}

    def add(self, run: Run, step: int) -> None:
        table = run.table(step, DESCRIBED)
        if table is None or not table.num_rows:
            return
        known = len(self.columns.get("step", ()))
        for name, values in _describe(step, table, self.texts).items():
            self.columns.setdefault(name, []).extend(values)
        _add_metrics(table, self.metrics, known, len(self.columns["step"]))

    def data(self) -> dict[str, Any]:
        texts = {name: list(found) for name, found in self.texts.items()}
        return {"columns": self.columns, "metrics": self.metrics, **texts}


def _describe(step: int, table: pa.Table, texts: dict[str, dict[str, int]]) -> dict[str, list[Any]]:
    """The columns of one step. A rollout begins with each row of turn 0."""
    first = np.flatnonzero(table["turn"].to_numpy() == 0)
    last = np.append(first[1:], table.num_rows) - 1
    spans = table["spans"].combine_chunks()
    bounds, ends, versions = (
        np.asarray(a) for a in (spans.offsets, spans.values.field("end"), spans.values.field("version"))
    )
    empty = bounds[1:] == bounds[:-1]
    lengths = np.where(empty, 0, ends[np.minimum(bounds[1:] - 1, len(ends) - 1)] if len(ends) else 0)
    oldest, newest = (
        versions[np.clip(at, 0, len(versions) - 1)] if len(versions) else 0 * at for at in (bounds[:-1], bounds[1:] - 1)
    )
    return {
        "step": [step] * len(first),
        "visit": table["visit_id"].to_numpy()[first].tolist(),
        "rollout": table["rollout"].to_numpy()[first].tolist(),
        "task": _indices(table["task_id"], first, texts["tasks"]),
        "role": _indices(table["role"], first, texts["roles"]),
        "reward": _rounded(table["reward"].to_numpy()[first]),
        "advantage": _rounded(table["advantage"].to_numpy()[first]),
        "tokens": np.add.reduceat(lengths, first).tolist(),
        "turns": (last - first + 1).tolist(),
        "reason": _indices(table["finish_reason"], last, texts["reasons"]),
        "oldest": oldest[first].tolist(),
        "newest": newest[last].tolist(),
    }


def _indices(column: pa.ChunkedArray, rows: np.ndarray[Any, Any], texts: dict[str, int]) -> list[int]:
    return [texts.setdefault(str(text), len(texts)) for text in column.take(pa.array(rows)).to_pylist()]


def _rounded(values: np.ndarray[Any, Any]) -> list[float | None]:
    return [round(v, 5) if math.isfinite(v) else None for v in values.tolist()]


def _add_metrics(table: pa.Table, metrics: dict[str, list[float | None]], known: int, total: int) -> None:
    """Add the values of this step to columns of `known` values, so that they have `total`."""
    column = table["metrics"].combine_chunks()
    if len(column.keys):
        rows = np.flatnonzero(table["turn"].to_numpy() == 0)
        for at, row in enumerate(column.take(pa.array(rows)).to_pylist(), known):
            for name, value in row:
                values = metrics.setdefault(name, [])
                values += [None] * (at - len(values))
                values.append(round(value, 5) if value is not None and math.isfinite(value) else None)
    for values in metrics.values():
        values.extend([None] * (total - len(values)))


def find_text(run: Run, words: str) -> list[str]:
    """The rollouts whose prompts or completions contain `words` in any case, each as "STEP VISIT ROLLOUT"."""
    found: dict[str, None] = {}
    for step in run.rollout_steps:
        if (table := run.table(step, ["visit_id", "rollout", "prompt", "completion"])) is not None:
            hits = [pc.match_substring(table[name], words, ignore_case=True) for name in ("prompt", "completion")]
            rows = table.filter(pc.or_kleene(*hits))
            found |= {f"{step} {row['visit_id']} {row['rollout']}": None for row in rows.to_pylist()}
    return list(found)


def step_texts(
    run: Run, step: int, texts: TokenTexts, budget: int = 10**9, visit: int | None = None
) -> tuple[dict[str, Any], int] | None:
    """Groups of a step with prompts, tokens and log-probabilities, as many as fit `budget` tokens, and their tokens.

    With `visit`, only that group.

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
    used, left_out = 0, 0
    for rows in _groups(table, budget):
        size = sum(min(len(row["completion_ids"] or ()), MAX_TOKENS) for row in rows)
        if groups and used + size > budget:
            left_out += 1
            continue
        used += size
        groups.append(_group(rows, texts, pieces))
    visits = len(set(table["visit_id"].to_pylist()))
    return {"step": step, "pieces": list(pieces), "groups": groups, "left_out": visits - len(groups)}, used


def _groups(table: pa.Table, budget: int) -> Iterator[list[Record]]:
    """Rows by group: those with the lowest and the highest reward first, then in order."""
    visits, rewards = np.asarray(table["visit_id"]), np.nan_to_num(table["reward"].to_numpy())
    order = dict.fromkeys([int(visits[rewards.argmin()]), int(visits[rewards.argmax()]), *map(int, visits)])
    for visit in order:
        rows = table.filter(pa.array(visits == visit)).to_pylist()
        yield rows
        budget -= sum(len(row["completion_ids"] or ()) for row in rows)
        if budget < 0:
            return


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


def _environment_text(row: Record, before: Record, texts: TokenTexts) -> str:
    """What the environment added after the last turn; the whole prompt if it does not continue that turn."""
    context, ids = [*before["prompt_ids"], *before["completion_ids"]], row["prompt_ids"] or []
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
