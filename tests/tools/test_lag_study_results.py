"""Results of a lag study from runs with given records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.tools.lag_study.plan import Run
from slipstream.tools.lag_study.plots import AXES, draw
from slipstream.tools.lag_study.results import RunResult, Study, default_target, markdown, read_result

STEPS = 8


def write_run(path: Path, lag: int, seed: int = 0) -> Run:
    """A run of 8 steps of 100 tokens and 2 s each, published every second step, evaluated after step 4 and at the end.

    The evaluation after step 4 took 3 s; a synchronous run waits for it.
    """
    path.mkdir()
    late = 3.0 if lag == 0 else 0.0
    metrics: list[dict[str, Any]] = [
        {
            "step": step, "version": step // 2, "train/total_tokens": 100 * step, "reward/mean": 0.1 * step,
            "time/window_s": 2.0 * step + (late if step > 4 else 0.0), "policy/effective_sample_size": 1 - 0.1 * lag,
            "policy/mismatch_kl": None if step == 1 else 0.01 * lag, "policy/clip_fraction": 0.02 * lag,
            "reward/frac_groups_with_signal": 0.5,
        }
        for step in range(1, STEPS + 1)
    ]  # fmt: skip
    evaluations = [
        {"step": 0, "versions": [0, 0], "eval/score": 0.2, "eval/duration_s": 9.0},
        {"step": 4, "versions": [2, 2 + (lag > 0)], "eval/score": 0.4, "eval/duration_s": 3.0},
        {"step": 8, "versions": [4, 4], "eval/score": 0.8 - 0.1 * lag + 0.01 * seed, "eval/duration_s": 3.0},
    ]
    for name, lines in (("metrics", metrics), ("evaluations", evaluations)):
        (path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    summary = {"steps": STEPS, "tokens_trained": 100 * STEPS, "lag": {"mean": 0.9 * lag}, "stopped": None}
    (path / "summary.json").write_text(json.dumps(summary))
    return Run(lag, "default", seed, path, ())


def course(path: Path, lag: int, seed: int = 0) -> RunResult:
    return read_result(write_run(path / f"{lag}-{seed}", lag, seed))


def study(path: Path) -> Study:
    results = tuple(course(path, lag, seed) for lag in (0, 2) for seed in (0, 1))
    return Study(results, {"default": []}, 800, default_target(results), "slipstream study lag x.toml")


def test_an_evaluation_is_placed_at_the_versions_that_it_sampled(tmp_path: Path) -> None:
    """Versions 2 and 3 were published after steps 4 and 6, so an evaluation by both is placed at 500 tokens."""
    assert course(tmp_path, 0).evaluations["tokens"] == [0, 400, 800]
    assert course(tmp_path, 2).evaluations["tokens"] == [0, 500, 800]


def test_time_excludes_evaluations_for_which_a_synchronous_run_waits(tmp_path: Path) -> None:
    synchronous, other = course(tmp_path, 0), course(tmp_path, 2)
    assert synchronous.seconds == other.seconds == 16
    assert synchronous.series["seconds"] == other.series["seconds"] == [2.0 * step for step in range(1, STEPS + 1)]
    assert synchronous.evaluations["seconds"] == [0, 8, 16] and other.evaluations["seconds"] == [0, 10, 16]


def test_the_time_to_target_is_interpolated_between_two_evaluations(tmp_path: Path) -> None:
    found = course(tmp_path, 0)
    assert found.reached_at(0.6) == pytest.approx((600, 12))
    assert found.reached_at(0.1) == (0, 0) and found.reached_at(0.81) is None


def test_means_exclude_missing_values(tmp_path: Path) -> None:
    assert course(tmp_path, 2).mismatch_kl == pytest.approx(0.02)


def test_steps_are_weighted_by_their_share_of_groups_with_signal(tmp_path: Path) -> None:
    """A collapsed policy has no group with signal and an effective sample size of 1, which would raise the mean."""
    run = write_run(tmp_path / "run", 2)
    path = run.path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, (signal, size) in zip(lines, [(1.0, 0.4), (0.5, 0.7), *[(0.0, 1.0)] * 6], strict=True):
        line |= {"reward/frac_groups_with_signal": signal, "policy/effective_sample_size": size}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = read_result(run)
    assert found.effective_sample_size == pytest.approx(0.5)
    assert found.series["effective_sample_size"] == [pytest.approx(0.4), pytest.approx(0.7), *[None] * 6]
    assert None not in found.series["reward"]


def test_the_table_compares_with_the_smallest_lag(tmp_path: Path) -> None:
    text = markdown(study(tmp_path))
    synchronous, lagged = (line.split(" | ") for line in text.splitlines() if line.startswith(("| 0", "| 2")))
    assert synchronous[:5] == ["| 0", "default", "2", "80.5 % (80.0 – 81.0)", "–"]
    assert lagged[:6] == ["| 2", "default", "2", "60.5 % (60.0 – 61.0)", "-20.0 points", "never"]
    assert lagged[8:] == ["800", "16 (16 – 16)", "1.80", "0.800", "0.02", "4.0% |"]
    assert "held-out accuracy of 74.4%" in text
    reached = markdown(study_at(tmp_path, 0.5))
    assert "| 0 | default | 2 | 80.5 % (80.0 – 81.0) | – | 499 | 10.0 | – |" in reached
    assert "| 646 | 12.9 | 0.77x |" in reached


def study_at(path: Path, target: float) -> Study:
    (path / "again").mkdir()
    return replace(study(path / "again"), target=target)


def test_the_speed_up_uses_seeds_that_reach_the_target_at_both_lags(tmp_path: Path) -> None:
    """A lag at which only the fastest seed reaches the target would otherwise appear fast."""
    whole = study_at(tmp_path, 0.605)
    assert [len(whole.reached(whole.results_of(*cell))) for cell in whole.cells()] == [2, 1]
    row = next(line for line in markdown(whole).splitlines() if line.startswith("| 2"))
    slow, fast = whole.results[3].reached_at(0.605), whole.results[1].reached_at(0.605)
    assert slow and fast and f"| {fast[1] / slow[1]:.2f}x (1/2) |" in row and " (1/2) | " in row


def test_without_a_gain_there_is_no_target(tmp_path: Path) -> None:
    found = course(tmp_path, 2)
    worse = replace(found, evaluations=found.evaluations | {"score": [0.3, 0.2, 0.1]})
    assert default_target([worse]) is None
    text = markdown(Study((worse,), {"default": []}, 800, None, "x"))
    assert "There is no target, since lag 2 gained nothing" in text and "never" not in text


@pytest.mark.parametrize("by", AXES)
def test_plots_of_finished_runs_are_drawn(tmp_path: Path, by: str) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import image

    whole = study(tmp_path)
    for kept in (whole, replace(whole, results=whole.results[:1], target=None)):
        draw(kept, tmp_path / "x.png", by)
        picture = image.imread(tmp_path / "x.png")
        assert picture.shape[0] > 1000 and picture[..., :3].std() > 0.05
