"""Make tasks of the rows of a dataset: columns or templates give prompt and answer.

Held-out tasks are the split `test` or `validation`, else a tenth of the training tasks.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config.schema import ConfigError
from slipstream.config.suggestions import suggest
from slipstream.environments.base import Task
from slipstream.environments.image_placeholders import count_placeholders, place_images
from slipstream.environments.images import image_part, is_text_part, normal_parts, require_pillow
from slipstream.environments.rewards import Reward, as_choices
from slipstream.environments.rows import Part, column_value, find_splits

FIELD = re.compile(r"(\{\{|\}\})|\{([^{}\n]+)\}")  # a brace, or the value of a column
ROLES = {"human": "user", "gpt": "assistant"}  # of messages with "from" and "value"
HELD_OUT = 0.1
MAX_NAMED = 10  # malformed rows in a message


@dataclass(frozen=True)
class Columns:
    """How a row becomes a task: names of columns ("a.b" is nested), and texts."""

    prompt: str = "prompt"  # a column or a template: "Question: {a.b}"
    answer: str = ""  # likewise
    id: str = ""  # a column; by default the number of the row, as with "id?" for rows without a column "id"
    system: str = ""  # text, no column
    filter: Mapping[str, Any] = field(default_factory=dict)  # the values, or lists of values, that rows must have
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    category: str = ""  # a column
    images: str = ""  # a column, with an image or a list of images

    def __post_init__(self) -> None:
        if self.images:
            require_pillow()
        for name, text in ("prompt", self.prompt), ("answer", self.answer):
            if "{" in text and re.search("[{}]", FIELD.sub("", text)):
                raise ConfigError(f"environment.{name} = {text!r}: unbalanced braces; write {{{{ and }}}} for braces")

    def keeps(self, row: Any) -> bool:
        """Whether the row passes the filter. Raises `ValueError`."""
        wanted = {name: value if isinstance(value, list) else [value] for name, value in self.filter.items()}
        return all(str(column_value(row, name)) in map(str, values) for name, values in wanted.items())

    def task(self, row: Any, name: str, source: str, folder: Path) -> Task:
        """The task of a row; paths of images are relative to the folder.

        Raises `ValueError` with the fault of the row.
        """
        images = self._images(row, folder)
        prompt_name = "prompt" if "{" in self.prompt else repr(self.prompt)
        prompt = as_prompt(_text(row, self.prompt), prompt_name, self.system, images, folder)
        answer = as_messages(_text(row, self.answer)) if self.answer else None
        if isinstance(answer, list) and answer and isinstance(answer[-1], dict) and "role" in answer[-1]:
            answer = answer[-1].get("content")  # the last reply of a chat
        if self.answer and (answer is None or not str(answer).strip()):
            raise ValueError(f"its {self.answer!r} is empty")
        id_column = self.id.removesuffix("?")
        kept = _without_column(row, self.images)
        data = {name: value for name, value in kept.items() if name not in (self.prompt, id_column)}
        if self.rewards:  # they need no other columns
            data = {"wanted": {kind: reward.prepare(answer, row) for kind, reward in self.rewards.items()}}
        data |= {"answer": answer} if self.answer else {}
        category = str(column_value(row, self.category)) if self.category else ""
        named = id_column and (id_column == self.id or id_column in row)
        return Task(str(column_value(row, id_column)) if named else name, prompt, data, source, category)

    def _images(self, row: Any, folder: Path) -> list[dict[str, Any]] | None:
        """The content parts of the row's images; None without the option. Raises `ValueError`."""
        if not self.images:
            return None
        found = column_value(row, self.images)
        values = found if isinstance(found, list) else [] if found in (None, "") else [found]
        parts = []
        for number, value in enumerate(values, 1):
            try:
                parts.append(image_part(value, folder))
            except ValueError as error:
                where = f"image {number} of " if isinstance(found, list) else ""
                raise ValueError(f"{where}its {self.images!r}: {error}") from None
        return parts


def load_tasks(
    dataset: str,
    columns: Columns,
    subset: str = "",
    split: str = "",
    test: str | float = "",
    skip_malformed: bool = False,
) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks. Raises `ConfigError` with file, line or row, and column.

    `split` is by default "train" or the only one. `test` is a split, a file, or a share of the training tasks; by
    default the split "test" or "validation", else a tenth.
    """
    if not isinstance(skip_malformed, bool):
        raise ConfigError(f"environment.skip_malformed = {skip_malformed!r}: it must be true or false")
    splits = find_splits(dataset, subset)
    split = split or ("train" if "train" in splits or len(splits) > 1 else next(iter(splits)))
    if test == "":
        test = next((name for name in ("test", "validation") if name in splits and name != split), HELD_OUT)
    if isinstance(test, str) and test not in splits and (Path(test).suffix or Path(test).exists()):
        [splits[test], *_] = find_splits(test).values()

    def load(option: str, name: str) -> list[Task]:
        if name not in splits:
            found = f"dataset {dataset!r} has no split {name!r}{suggest(name, [*splits])}: {', '.join(splits)}"
            raise ConfigError(f"environment.{option} = {name!r}: {found}")
        return _tasks(splits[name](columns.images), name, columns, skip_malformed)

    tasks = load("split", split)
    if not tasks:
        reason = f"environment.filter = {dict(columns.filter)} leaves none" if columns.filter else "add rows"
        raise ConfigError(f"dataset {dataset!r}, split {split}, holds no tasks; {reason}")
    return (tasks, load("test", test)) if isinstance(test, str) else _hold_out(tasks, test)


def _hold_out(tasks: list[Task], share: float) -> tuple[list[Task], list[Task]]:
    """A training part and a held-out share of the tasks, chosen with a fixed seed.

    A share above 0 of several tasks is at least one. Raises `ConfigError` for a share out of range.
    """
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"environment.test = {share!r}: it must be a split, a file, or a share from 0 to below 1")
    count = max(1, round(len(tasks) * share)) if share and len(tasks) > 1 else 0
    chosen = {*random.Random(0).sample(range(len(tasks)), count)}
    return [task for i, task in enumerate(tasks) if i not in chosen], [tasks[i] for i in sorted(chosen)]


def _tasks(parts: Sequence[Part], split: str, columns: Columns, skip_malformed: bool) -> list[Task]:
    """The tasks of all rows that pass the filter. Malformed rows raise `ConfigError`, or are skipped with a warning."""
    tasks: dict[str, Task] = {}
    for part in parts:
        faults: dict[int, str] = {}
        name = split if len(parts) == 1 else f"{split}/{Path(part.where).stem}"
        for number, row in part.rows:
            source = f"{part.where}, {part.unit} {number}"
            try:
                if isinstance(row, ValueError):
                    raise row
                if not isinstance(row, dict):
                    raise ValueError(f"it is {row!r:.80}, no table of columns")
                if columns.keeps(row):
                    task = columns.task(row, f"{name}/{number}", source, part.folder)
                    if task.id in tasks:
                        raise ValueError(f'its id "{task.id}" is that of {tasks[task.id].source}, too')
                    tasks[task.id] = task
            except ValueError as error:
                faults[number] = str(error)
        if faults:
            _report(part, faults, skip_malformed)
    return [*tasks.values()]


def _report(part: Part, faults: Mapping[int, str], skip_malformed: bool) -> None:
    first, why = next(iter(faults.items()))
    numbers = ", ".join(map(str, [*faults][:MAX_NAMED])) + " and more" * (len(faults) > MAX_NAMED)
    count = f"{len(faults)} of {len(part.rows)} {part.unit}s: {numbers}"
    found = f"{part.where}, {part.unit} {first}: not a task: {why} ({count})"
    if not skip_malformed:
        raise ConfigError(f"{found}; correct the data or the options, or set the option skip_malformed = true")
    print(f"slipstream: {found}; left out", file=sys.stderr)


def as_prompt(
    value: Any,
    name: str,
    system: str = "",
    images: Sequence[dict[str, Any]] | None = None,
    folder: Path | None = None,
) -> str | tuple[dict[str, Any], ...]:
    """Text, or chat messages without a last reply of the assistant, as a task's prompt. Raises `ValueError`.

    `images` are content parts for the placeholders, None if the dataset has no column of images.
    """
    value = as_messages(value)
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        value = _without_reply(value, name)
    elif not isinstance(value, str):
        raise ValueError(f"its {name} is {value!r:.80}, neither text nor a list of messages")
    if not value or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"its {name} is empty")
    try:
        value = _with_images(value, images, folder)
    except ValueError as error:
        raise ValueError(f"its {name}: {error}") from None
    if system:
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        value = [{"role": "system", "content": system}, *messages]
    return value if isinstance(value, str) else tuple(value)


def _without_reply(messages: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The messages without a last reply of the assistant. Raises `ValueError` for messages of another form."""
    for message in messages:
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'a message of its {name} has no "role" or no "content"')
        if not isinstance(message["content"], str | list | None):
            raise ValueError(f'the "content" of a message of its {name} is no text and no list of parts')
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def _with_images(value: Any, images: Sequence[dict[str, Any]] | None, folder: Path | None) -> Any:
    """Text or messages, with content parts in the normal form and the images in them. Raises `ValueError`."""
    text = isinstance(value, str)
    messages = [{"role": "user", "content": value}] if text else value
    messages = [message | {"content": normal_parts(message["content"], folder)} for message in messages]
    if images is None:
        if count := count_placeholders(messages):
            raise ValueError(f"{count} placeholders for images; set environment.images to the column of the images")
        return value if text else messages
    placed = place_images(messages, images)
    return value if text and placed == messages else placed


def as_messages(value: Any) -> Any:
    """Messages with "role" and "content" (text). Messages with "from" and "value" are converted to such ones.

    A value that is no list of messages is returned unchanged.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return value
    if all({"from", "value"} <= message.keys() for message in value):
        value = [{"role": ROLES.get(m["from"], m["from"]), "content": m["value"]} for m in value]
    return [m | {"content": _joined(m["content"])} if isinstance(m.get("content"), list) else m for m in value]


def _joined(parts: list[Any]) -> Any:
    """The text of content in parts; unchanged if one is not a text, such as an image."""
    texts = [part["text"] for part in parts if is_text_part(part)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _without_column(row: dict[str, Any], name: str) -> dict[str, Any]:
    """The row without the column, or without "b" in column "a" for the name "a.b"."""
    if name in row:
        return {key: value for key, value in row.items() if key != name}
    first, _, rest = name.partition(".")
    return row | {first: _without_column(row[first], rest)} if rest and isinstance(row.get(first), dict) else row


def _text(row: dict[str, Any], column: str) -> Any:
    """The value of a column, or the text of a template. Raises `ValueError`."""
    if "{" not in column:
        return column_value(row, column)
    return FIELD.sub(lambda found: found[1][0] if found[1] else _template_value(row, found[2]), column)


def _template_value(row: dict[str, Any], name: str) -> str:
    """The value of a column in a template; choices as lines "A. text"."""
    value = column_value(row, name)
    if value is None or value == "":
        raise ValueError(f"its {name!r} is empty")
    if choices := as_choices(value):
        return "\n".join(f"{label}. {text}" for label, text in choices.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
