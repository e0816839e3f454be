"""What the terminal shows: enough, not too much, and nothing when quiet."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from slipstream.observe.formatting import duration, number, sparkline
from slipstream.observe.progress import FIELDS, EngineState, PoolState, Progress
from slipstream.rollout import Completion, Group, Rollout, VersionSpan, float32_array, int32_array
from slipstream.tools.lag_study.results import SERIES
from tests.test_records import ROOT

RECORD: dict[str, Any] = {
    "step": 120, "version": 119, "reward/mean": 0.61, "lag/mean": 1.0, "lag/max": 2, "buffer/groups_ready": 12,
    "buffer/groups_in_flight": 30, "buffer/capacity": 64, "gen/tokens_per_s": 2310.4, "train/tokens_per_s": 1900.0,
    "sync/pause_ms": 0.42, "rollout/dropped_stale": 3, "rollout/failed": 7, "train/loss": float("nan"),
}  # fmt: skip
EVALUATION: dict[str, Any] = {"step": 50, "versions": [49, 50], "eval/score": 0.48, "eval/tasks": 200, "eval/failed": 1}


class Clock:
    """The clock of the progress display."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("slipstream.observe.progress.time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def pipe() -> Console:
    return Console(file=io.StringIO(), width=80)


def terminal(width: int = 80) -> Console:
    return Console(
        file=io.StringIO(), width=width, height=24, force_terminal=True, color_system=None, _environ={"TERM": "xterm"}
    )


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def steps_said(console: Console) -> list[int]:
    return [int(n) for n in re.findall(r"^step (\d+)/", output(console), re.MULTILINE)]


def test_plain_lines_are_printed_every_two_seconds_and_for_first_and_last_step(clock: Clock) -> None:
    console = pipe()
    with Progress(100, console=console) as progress:
        for step in range(1, 101):
            progress.step(RECORD | {"step": step})
            clock.now += 0.1
        assert steps_said(console)[-1] == 100  # at once, before what comes after the last step
    said = steps_said(console)
    assert said[0] == 1
    assert said[-1] == 100
    assert said.count(100) == 1
    assert 5 <= len(said) <= 7


def test_contents_of_a_plain_line(clock: Clock) -> None:
    console = pipe()
    with Progress(800, console=console) as progress:
        progress.step(RECORD | {"step": 110, "reward/mean": 0.21})
        clock.now += 5
        progress.step(RECORD)
    assert output(console).splitlines()[-1] == (
        "step 120/800  reward 0.610 (mean 0.410)  lag 1.00 (max 2)  gen 2,310 tok/s  train 1,900 tok/s  "
        "buffer 12/64 (+30)  eta 5:40"
    )


def test_the_last_step_of_a_stopped_run_is_printed(clock: Clock) -> None:
    console = pipe()
    with pytest.raises(RuntimeError), Progress(100, console=console) as progress:
        for step in (1, 2, 3):
            progress.step(RECORD | {"step": step})
        raise RuntimeError
    assert steps_said(console) == [1, 3]


def test_notes_evaluations_and_warnings_are_always_printed(clock: Clock) -> None:
    console = pipe()
    with Progress(100, console=console) as progress:
        progress.note("probe: agree within 2e-06 [bound]")
        progress.evaluation(EVALUATION)
        progress.evaluation(EVALUATION | {"versions": [7, 7], "eval/failed": 0, "eval/samples_per_task": 4})
        progress.warn("disk almost full")
    assert output(console).splitlines() == [
        "probe: agree within 2e-06 [bound]",
        "evaluation after step 50: 0.480 on 200 tasks, 1 failed (versions 49 to 50)",
        "evaluation after step 50: 0.480 on 200 tasks, 4 samples each (version 7)",
        "warning: disk almost full",
    ]


@pytest.mark.parametrize("make", [pipe, terminal])
def test_quiet_prints_only_warnings(clock: Clock, make: Any) -> None:
    console = make()
    with Progress(2, quiet=True, console=console) as progress:
        progress.note("starting")
        progress.step(RECORD | {"step": 1})
        progress.evaluation(EVALUATION)
        progress.step(RECORD | {"step": 2})
        assert output(console) == ""
        progress.warn("disk almost full")
    assert output(console) == "warning: disk almost full\n"


def test_progress_is_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1) as progress:
        progress.step({"step": 1})
        progress.warn("w")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step 1/1" in captured.err


@pytest.mark.parametrize("make", [pipe, terminal])
@pytest.mark.parametrize("record", [{}, {"step": 3}, dict.fromkeys(RECORD), RECORD | {"reward/mean": float("nan")}])
def test_unknown_values_are_dashes(clock: Clock, make: Any, record: dict[str, Any]) -> None:
    console = make()
    with Progress(10, console=console) as progress:
        progress.step(record)
        progress.evaluation({})
    assert "reward –" in re.sub(" +", " ", output(console))
    assert "None" not in output(console)
    assert "nan" not in output(console)


def test_the_mean_excludes_unknown_rewards(clock: Clock) -> None:
    console = pipe()
    with Progress(5, console=console) as progress:
        for step, reward in enumerate((0.2, None, float("nan"), 0.0, 0.4), start=1):
            progress.step({"step": step, "reward/mean": reward})
    assert "reward 0.400 (mean 0.200)" in output(console)


def test_the_mean_is_of_twenty_steps(clock: Clock) -> None:
    console = pipe()
    with Progress(25, console=console) as progress:
        for step in range(1, 26):
            progress.step({"step": step, "reward/mean": 1.0 if step > 5 else 0.0})
    assert "(mean 1.000)" in output(console)


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_block_fits_and_shows_all(clock: Clock, width: int) -> None:
    console = terminal(width)
    with Progress(800, console=console) as progress:
        for step in range(1, 121):
            progress.step(RECORD | {"step": step, "reward/mean": step / 120})
            clock.now += 0.5
        progress.evaluation(EVALUATION)
    frame = output(console)
    for piece in (
        "120/800", "1:00", "eta 5:40", "1.000 (mean 0.921)", "▁", "█", "0.480 on 200 tasks, 1 failed",
        "2,310 tok/s", "1,900 tok/s", "12/64 (+30)", "1.00 (max 2)", "version 119, paused 0.42 ms",
        "7 failed, 3 stale",
    ):  # fmt: skip
        assert piece in frame, piece
    visible = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame)
    block = [line for line in visible.splitlines() if line.startswith(("gen", "buffer", "publish", "score"))]
    assert block and max(map(len, block)) <= width
    assert "…" not in visible
    assert visible.rindex("step 120/800  reward 1.000") > visible.rindex("publish")  # stays when the block is gone


def test_number_formats() -> None:
    assert [number(v) for v in (None, float("inf"), "x", 0, 1234567.8)] == ["–", "–", "–", "0", "1,234,568"]
    assert [duration(s) for s in (0, 59.6, 3599, 3661, None)] == ["0:00", "1:00", "59:59", "1:01:01", "–"]
    assert sparkline([0.0], 8) == ""
    assert sparkline([1.0, 1.0], 8) == "▁▁"
    assert sparkline([i / 100 for i in range(101)], 8) == "▁▂▃▄▅▆▇█"


def test_the_live_block_shows_scoring_if_configured(clock: Clock) -> None:
    console = terminal(80)
    with Progress(800, console=console) as progress:
        progress.step(
            RECORD | {"scoring/scored": 3, "scoring/in_flight": 4, "scoring/queued": 12, "scoring/mean_s": 0.256}
        )
        clock.now += 0.5
    assert "4 now, 12 queued, 0.26 s each" in output(console)


def test_displayed_and_studied_metrics_are_documented() -> None:
    documented = re.findall(r"^\| `([a-z_/]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    displayed = re.findall(r"{(\w+/\w+)}", " ".join(FIELDS.values()))
    assert len(displayed) > 10 and {*displayed, *SERIES.values()} <= set(documented)


def group_of(*texts: str) -> Group:
    def completion(text: str) -> Completion:
        span = (VersionSpan(0, 0, 1),)
        return Completion(int32_array([7] * 300), int32_array([5]), float32_array([-1.0]), span, "stop", text=text)

    return Group(0, "a", tuple(Rollout((completion(text),), reward / 10) for reward, text in enumerate(texts)))


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_block_shows_both_pools_and_newest_rollouts(clock: Clock, width: int) -> None:
    console = terminal(width)
    engines = [EngineState(f"generator {i}", "serving" if i else "dead", 118 + i, 10 * i) for i in range(6)]
    decoded: list[int] = []

    def decode(ids: Any) -> str:
        decoded.append(len(ids))
        return "3+4="

    with Progress(800, console=console) as progress:
        progress.watch(lambda: PoolState(engines, "stepping and publishing"))
        for step in (1, 2, 3):
            totals = {"engines/tokens/0": 500 * step, "engines/tokens/1": 900 * step, "time/wall_s": 10.0 * step}
            progress.step(RECORD | {"step": step} | totals)
        progress.rollouts(group_of("worst", "x", "middle\x1b[2J\nend", "y", "best" * 900), decode)
        progress.warn("entropy fell\nand a log")
        clock.now += 0.5
    visible = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output(console))
    for line in (
        r"trainer +stepping and publishing", r"engine 0 +dead +version 118 +0 request.* 50 tok/s",
        r"engine 3 +serving +version 121 +30 req", r"2 more +2 serving",
        r"r = 0\.4 +3\+4= +bestbest", r"r = 0\.2 +3\+4= +middle·",
        r"r = 0 +3\+4= +worst", r"warning +entropy fell *\n",
    ):  # fmt: skip
        assert re.search(line, visible), line
    assert max(decoded) <= 100 and "engine 4" not in visible
    assert max(len(line) for line in visible.splitlines() if line.startswith(("0", "eng", "train"))) <= width


def test_plain_lines_show_no_rollouts(clock: Clock) -> None:
    console = pipe()
    with Progress(8, console=console) as progress:
        progress.rollouts(group_of("secret"), lambda ids: pytest.fail("nothing is decoded"))
        progress.watch(lambda: pytest.fail("nothing is asked"))
        progress.step(RECORD | {"step": 8})
    assert "secret" not in output(console) and output(console).count("\n") == 1
