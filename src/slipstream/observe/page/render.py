"""The page as one HTML file: compressed data, inline scripts and styles; its Content-Security-Policy forbids others."""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from slipstream.observe.events import strict_json
from slipstream.observe.page.data import page_data
from slipstream.observe.page.rollouts import TokenTexts, spread, step_texts
from slipstream.observe.run_data import Run
from slipstream.runtime.run_directory import write_atomically

SCRIPTS = ("dom.js", "data.js", "charts.js", "tracks.js", "timeline.js", "rollouts.js", "page.js")
MAX_TEXT_BYTES = 14_000_000  # compressed texts of all runs
MAX_STEP_TOKENS = 120_000  # of the texts of one step


@cache
def asset(name: str) -> str:
    """The text of a file of this package."""
    return (files(__package__) / name).read_text("utf-8")


def render(data: dict[str, Any], texts: Sequence[tuple[str, str]] = (), *, live: bool = False) -> str:
    """The page for `data` as of `page_data`; `texts` are ids and packed texts of steps.

    A live page asks its server for both (`observe.watch`).
    """
    from jinja2 import Environment

    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(asset("template.html.j2"))
    names = [*SCRIPTS[:-1], "live.js", SCRIPTS[-1]] if live else SCRIPTS
    scripts = [asset("uPlot.min.js"), "\n".join(['"use strict";', *map(asset, names)])]
    styles = [asset("uPlot.min.css"), asset("style.css")]
    policy = {"default-src": "'none'", "script-src": _hashes(scripts), "style-src": _hashes(styles), "img-src": "data:"}
    policy |= {"connect-src": "'self'"} if live else {}
    title = ", ".join(run["name"] for run in data["runs"])
    return page.render(
        policy="; ".join(f"{name} {value}" for name, value in policy.items()) + "; base-uri 'none'; form-action 'none'",
        title=title.encode("utf-8", "replace").decode(), scripts=scripts, styles=styles, live=live,
        data="" if live else pack(data), texts=texts, uplot_license=asset("uPlot.LICENSE"),
    )  # fmt: skip


def pack(data: Any) -> str:
    """JSON, compressed, in base64, which holds no character that HTML interprets."""
    text = "".join(json_pieces(data))
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def json_pieces(data: Any) -> Iterator[str]:
    """Compact JSON in pieces: one call of the encoder holds the interpreter lock until it returns."""
    if isinstance(data, dict) and data:
        for start, (key, value) in zip(chain("{", repeat(",")), data.items(), strict=False):
            yield f"{start}{strict_json(str(key))}:"
            yield from json_pieces(value)
        yield "}"
    elif isinstance(data, list) and data and isinstance(data[0], dict | list):
        for start, value in zip(chain("[", repeat(",")), data, strict=False):
            yield start
            yield from json_pieces(value)
        yield "]"
    else:
        yield strict_json(data, separators=(",", ":"))


def _hashes(parts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def write_report(runs: Sequence[Run], path: Path, state: str = "") -> None:
    """Write the page of these runs to `path`. `state` replaces that of a run that writes its own."""
    data = page_data(runs)
    texts: list[tuple[str, str]] = []
    for index, (run, described) in enumerate(zip(runs, data["runs"], strict=True)):
        described["state"] = state or described["state"]
        tokens = TokenTexts.of(run)
        packed = dict(packed_texts(run, tokens, MAX_TEXT_BYTES // len(runs), described["rollouts"]))
        texts += [(f"texts-{index}-{step}", text) for step, text in packed.items()]
        described["texts"], described["problems"] = sorted(packed), run.problems
        described["tokens_known"] = tokens is not None
    write_atomically(path, render(data, texts))


def packed_texts(
    run: Run, texts: TokenTexts | None, budget: int, rollouts: Sequence[dict[str, list[Any]]]
) -> Iterator[tuple[int, str]]:
    """Steps with packed texts, within `budget` bytes: first, last, of extreme rewards, then evenly spaced ones."""
    order = spread([step["step"][0] for step in rollouts])
    rewards = [(r, step["step"][0]) for step in rollouts for r in step["reward"] if r is not None]
    extremes = [min(rewards)[1], max(rewards)[1]] if rewards else []
    for step in dict.fromkeys([*order[:2], *extremes, *order[2:]]):
        found = step_texts(run, step, texts, MAX_STEP_TOKENS)
        if not found:
            continue
        packed = pack(found)
        budget -= len(packed)
        if budget < 0:
            return
        yield step, packed
