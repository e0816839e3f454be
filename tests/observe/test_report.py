"""The final report: what changed, what the policy says now, and what to type next."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream import load_run
from slipstream.observe.formatting import SHOWN, shorten
from slipstream.observe.report import report

RECORDS: list[dict[str, Any]] = [
    {"step": step, "version": step, "time/wall_s": 754.2 * step / 800, "time/window_s": 700.0 * step / 800,
     "reward/mean": 0.1 if step < 400 else 0.722, "lag/mean": 0.93, "lag/max": 2, "sync/pause_ms": 0.42,
     "gen/total_tokens": 1_617_000, "train/total_tokens": 1_330_000, "rollout/generated": 51283,
     "rollout/trained": 51200, "rollout/dropped_stale": 3, "rollout/failed": 12, "rollout/filtered": 0,
     "rollout/failures": {"TimeoutError": 3, "ValueError: [red]no number": 9}}
    for step in range(1, 801)
]  # fmt: skip
SUMMARY: dict[str, Any] = {"stopped": None, "directory": "runs/addition", "policy": "runs/addition/policy"}
EVENTS = [
    {"kind": "engine", "track": "engine 0", "start": 0.0, "end": 10.0, "requests": [[0.0, 9.7]], "asleep": [],
     "forward_s": 2.0, "tokens": 9},
    {"kind": "step", "track": "trainer", "start": 1.0, "end": 9.1, "step": 1, "version": 0, "wait_s": 0.1,
     "visit_ids": []},
]  # fmt: skip


def sample(prompt: str = "1+1=", completion: str = "3", reward: float = 0.0) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "reward": reward}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    evaluations = [{"step": 0, "eval/score": 0.04}, {"step": 800, "eval/score": 0.675}]
    for name, records in (("metrics", RECORDS), ("evaluations", evaluations), ("events", EVENTS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def printed(path: Path, before: list[Any], after: list[Any], width: int = 0, **changes: Any) -> str:
    """The report on a terminal of this width, or in a file."""
    file = io.StringIO()
    environment = {"TERM": "xterm"}
    if width:
        console = Console(file=file, width=width, force_terminal=True, color_system=None, _environ=environment)
    else:
        console = Console(file=file, _environ=environment)
    samples = {"before": before, "after": after, "better": 5, "worse": 2}
    (path / "summary.json").write_text(json.dumps({**SUMMARY, "samples": samples, **changes}))
    report(load_run(path), console)
    return file.getvalue()


@pytest.mark.parametrize("width", [0, 80])
def test_changed_metrics_are_shown(path: Path, width: int) -> None:
    text = printed(path, [], [], width)
    flat = " ".join(text.split())
    for piece in (
        "0.040 → 0.675", "0.100 → 0.722 (+0.622)", "800 in 12:34", "1.62 M tokens, 2,310 tokens/s, engines busy 97%",
        "1.33 M tokens, 1,900 tokens/s, trainer busy 81%", "0.93 versions, on average over trained tokens, at most 2;",
        "51,283 ended, 51,200 trained on, 3 stale, 12 failed", "TimeoutError 3",
        "800 publishes paused engines 0.42 ms each", "slipstream eval runs/addition ",
        'slipstream generate runs/addition/policy --prompt "..."',
    ):  # fmt: skip
        assert piece in flat, piece
    assert "filtered" not in text  # none were
    assert "--resume" not in text
    assert max(map(len, text.splitlines())) <= (width or 100)


def test_the_most_frequent_failures_are_listed(path: Path) -> None:
    text = " ".join(printed(path, [], []).split())
    assert "12 rollouts failed: ValueError: [red]no number 9, TimeoutError 3" in text
    many = RECORDS[-1] | {"rollout/failures": {f"reason {i}": i for i in range(1, 50)}}
    (path / "metrics.jsonl").write_text(json.dumps(many) + "\n")
    text = printed(path, [], [])
    assert "reason 49" in text and text.count("reason ") == 5


@pytest.mark.parametrize("width", [0, 80])
def test_completions_are_shown_as_they_are(path: Path, width: int) -> None:
    """Markup, escape sequences and emoji codes in completions are printed as text."""
    wild = "[bold]17[/bold] [/] :smile: \x1b[2J\x1b]0;title\x07 [link=http://x]y\r\rz"
    text = printed(path, [sample("[red]task[/red]", wild)], [sample("[red]task[/red]", "two\n\n\nlines", 1)], width)
    assert "[red]task[/red]" in text
    assert "[bold]17[/bold] [/] :smile:" in text
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text
    assert "\x07" not in text
    assert "\r" not in text
    assert "two ↵ lines" in text
    assert "before, reward 0" in text
    assert "after, reward 1" in text
    assert "before and after: 5 better, 2 worse" in text


def test_unchanged_tasks_are_counted_in_one_line(path: Path) -> None:
    unchanged = {"before": [], "after": [], "better": 0, "worse": 0, "compared": 4}
    text = printed(path, [], [], samples=unchanged)
    assert "\nThe same 4 held-out tasks, before and after: no answer changed\n" in text
    assert "before, " not in text


def test_long_completions_are_shortened_in_the_middle(path: Path) -> None:
    text = printed(path, [sample(completion="start " + "x" * 5000 + " end")], [sample()], 80)
    assert "start" in text
    assert "end" in text
    assert text.count("x") < SHOWN + 20
    assert shorten("abcdefghij", 4) == "ab … ij"
    assert shorten("  abcd\n") == "abcd"


def test_a_failed_episode_is_shown_with_its_reason(path: Path) -> None:
    old = {"id": "1", "prompt": "1+1=", "failed": "time limit"}
    text = printed(path, [old], [sample()])
    assert "before, failed" in text and "time limit" in text and "after, reward 0" in text


def test_a_score_that_is_not_the_reward_is_shown_with_it(path: Path) -> None:
    """Tasks are better or worse by score; the reward is that of the policy whose completion is shown."""
    text = printed(path, [sample() | {"score": 0.5}], [sample("1+1=", "2", 1) | {"score": 1.0}])
    assert "before, score 0.5, reward 0" in text and "after, reward 1" in text


def test_reports_in_files_have_a_hundred_columns(path: Path) -> None:
    text = printed(path, [sample()], [sample()])
    assert max(map(len, text.splitlines())) == 100


def test_a_stopped_run_names_the_resume_command(path: Path) -> None:
    text = printed(path, [sample()], [], stopped="SIGINT", directory="runs/my run")
    assert "stopped by SIGINT" in " ".join(text.split())
    assert "slipstream train --resume 'runs/my run'" in text
    assert "before, reward" not in text


def test_unknown_values_are_left_out_or_dashes(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    text = printed(tmp_path, [], [], samples=None, directory=None)
    assert "Score       –" in text and "Reward      – → –" in text
    assert "None" not in text
    assert "nan" not in text
