"""The final report: what changed, what the policy says now, and what to type next."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from slipstream.observe.report import SHOWN, report, shorten

SUMMARY: dict[str, Any] = {
    "steps": 800, "wall_s": 754.2, "window_s": 700.0, "tokens_generated": 1_617_000,
    "tokens_trained": 1_330_000, "version": 800, "seed": 0, "stopped": None,
    "rollouts": {"generated": 51283, "trained": 51200, "dropped_stale": 3, "failed": 12, "filtered": 0, "ready": 68},
    "lag": {"mean": 0.93, "max": 2, "histogram": {"0": 1, "1": 2}},
    "eval": {"initial": 0.04, "final": 0.675}, "reward": {"first": 0.1, "last": 0.722},
    "busy": {"generator": 0.974, "trainer": 0.81}, "sync": {"publishes": 800, "pause_ms": {"median": 0.42, "max": 3.1}},
    "failures": {"TimeoutError": 3, "ValueError: [red]no number": 9},
    "directory": "runs/addition", "policy": "runs/addition/policy",
}  # fmt: skip


def sample(prompt: str = "1+1=", completion: str = "3", reward: float = 0.0) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "reward": reward}


def printed(summary: dict[str, Any], before: list[Any], after: list[Any], width: int = 0) -> str:
    """The report on a terminal of this width, or in a file."""
    file = io.StringIO()
    environment = {"TERM": "xterm"}
    if width:
        console = Console(file=file, width=width, force_terminal=True, color_system=None, _environ=environment)
    else:
        console = Console(file=file, _environ=environment)
    report(summary | {"samples": {"before": before, "after": after, "better": 5, "worse": 2}}, console)
    return file.getvalue()


@pytest.mark.parametrize("width", [0, 80])
def test_changed_metrics_are_shown(width: int) -> None:
    text = printed(SUMMARY, [], [], width)
    for piece in (
        "0.040 → 0.675 (+0.635)", "0.100 → 0.722 (+0.622)", "800 in 12:34", "1,617,000 tokens, 2,310 tokens/s",
        "1,330,000 tokens, 1,900 tokens/s", "generator busy 97%", "trainer busy 81%", "mean 0.93, max 2",
        "51,200 trained on, 3 stale, 12 failed, 68 left over", "3 failed with TimeoutError",
        "800, engines paused 0.42 ms each, 3.10 ms at most", "slipstream eval runs/addition\n",
        'slipstream generate runs/addition/policy --prompt "..."',
    ):  # fmt: skip
        assert piece in text, piece
    assert "filtered" not in text  # none were
    assert "--resume" not in text
    assert max(map(len, text.splitlines())) <= (width or 100)


def test_the_most_frequent_failures_are_listed() -> None:
    text = printed(SUMMARY, [], [])
    assert text.index("9 failed with ValueError: [red]no number") < text.index("3 failed with TimeoutError")
    many = printed(SUMMARY | {"failures": {f"reason {i}": i for i in range(1, 50)}}, [], [])
    assert "reason 49" in many
    assert many.count("failed with") == 5


@pytest.mark.parametrize("width", [0, 80])
def test_completions_are_shown_as_they_are(width: int) -> None:
    """Markup, escape sequences and emoji codes in completions are printed as text."""
    wild = "[bold]17[/bold] [/] :smile: \x1b[2J\x1b]0;title\x07 [link=http://x]y\r\rz"
    text = printed(SUMMARY, [sample("[red]task[/red]", wild)], [sample("[red]task[/red]", "two\n\n\nlines", 1)], width)
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


def test_unchanged_tasks_are_counted_in_one_line() -> None:
    unchanged = {"before": [], "after": [], "better": 0, "worse": 0, "compared": 4}
    file = io.StringIO()
    report(SUMMARY | {"samples": unchanged}, Console(file=file))
    assert "\nThe same 4 held-out tasks, before and after: no answer changed\n" in file.getvalue()
    assert "before, " not in file.getvalue()


def test_long_completions_are_shortened_in_the_middle() -> None:
    text = printed(SUMMARY, [sample(completion="start " + "x" * 5000 + " end")], [sample()], 80)
    assert "start" in text
    assert "end" in text
    assert text.count("x") < SHOWN + 20
    assert shorten("abcdefghij", 4) == "ab … ij"
    assert shorten("  abcd\n") == "abcd"


def test_a_failed_episode_is_shown_with_its_reason() -> None:
    old = {"id": "1", "prompt": "1+1=", "failed": "time limit"}
    text = printed(SUMMARY, [old], [sample()])
    assert "before, failed" in text and "time limit" in text and "after, reward 0" in text


def test_reports_in_files_have_a_hundred_columns() -> None:
    text = printed(SUMMARY, [sample()], [sample()])
    assert max(map(len, text.splitlines())) == 100


def test_a_stopped_run_names_the_resume_command() -> None:
    changes = {"stopped": "SIGINT", "steps": 37, "directory": "runs/my run", "eval": {"initial": 0.04, "final": None}}
    text = printed(SUMMARY | changes, [sample()], [])
    assert "37 in 12:34, stopped by SIGINT" in text
    assert "slipstream train --resume 'runs/my run'" in text
    assert "0.040 → –" in text
    assert "before, reward" not in text


@pytest.mark.parametrize("summary", [{}, dict.fromkeys(SUMMARY), SUMMARY | {"eval": {"initial": None, "final": None}}])
def test_unknown_values_are_left_out_or_dashes(summary: dict[str, Any]) -> None:
    text = printed(summary, [], [])
    assert "held-out score" not in text
    assert "training reward" in text
    assert "None" not in text
    assert "nan" not in text
