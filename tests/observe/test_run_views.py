"""Views of recorded runs: `slipstream rollouts`, `slipstream compare`, and the card and plots in a notebook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream import cli, load_run
from slipstream.config.algorithm import AlgorithmConfig
from slipstream.observe.figures import count, figures
from slipstream.observe.formatting import shorten
from slipstream.observe.notebook import smooth, sparkline_svg
from slipstream.observe.recorder import SCHEMA

NASTY = "\x1b[31mred\u202e\x07 <script>alert(1)</script>\n[bold]two\ud800"


def row(step: int, visit: int, rollout: int, reward: float, completion: str, turn: int = 0) -> dict[str, Any]:
    return {
        "step": step, "visit_id": visit, "task_id": f"task-{visit}", "rollout": rollout, "role": "", "turn": turn,
        "prompt": "1+1=", "completion": completion, "prompt_ids": [1], "completion_ids": [2, 3], "reward": reward,
        "advantage": reward - 0.5, "spans": [{"version": 3 + i, "start": i, "end": i + 1} for i in (0, 1)],
        "logprobs": [-1.0, -2.0], "finish_reason": "stop", "temperature": 1.0, "metrics": [("correct", reward)],
        "steps": [], "teacher": [],
    }  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run that was killed after step 2, with half a last line, and a damaged file of rollouts of step 2."""
    run = tmp_path / "run_a"
    (run / "rollouts").mkdir(parents=True)
    (run / "config.toml").write_text('[loop]\nsteps = 9\nmax_lag = 2\n[run]\ndir = "a"\n')
    records = [
        {"step": s, "time/wall_s": 60.0 * s, "time/window_s": 50.0 * s, "reward/mean": 0.2 * s, "lag/mean": 1.0,
         "train/total_tokens": 1000 * s, "rollout/failed": s, "rollout/failures": {"timeout": s}}
        for s in (1, 2)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"step": 3, "rew')
    scores = [{"step": 0, "eval/score": 0.25}, {"step": 2, "eval/score": 0.5}]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(s) + "\n" for s in scores))
    rows = [row(1, visit, rollout, visit / 10 + rollout / 100, f"{visit}-{rollout}") for visit in range(4)
            for rollout in range(3)]  # fmt: skip
    rows[0] |= {"completion": NASTY.replace("\ud800", "")}
    rows.insert(1, row(1, 0, 0, 0.0, "second turn", turn=1))
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), run / "rollouts" / "step_000001.parquet")
    (run / "rollouts" / "step_000002.parquet").write_bytes(b"PAR1 damaged")
    return run


def run_cli(*arguments: Any) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_the_best_and_the_worst_rollouts_are_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("rollouts", path, "--step", 1) == 0
    said = capsys.readouterr().out
    assert said.startswith("run_a, step 1, the best and the worst 6 of 12 rollouts")
    rewards = [line.split(",")[0] for line in said.splitlines() if line.startswith("reward")]
    assert rewards == [f"reward {r:g}" for r in (0.32, 0.31, 0.3, 0.02, 0.01, 0)]
    assert "versions 3 to 4, ends by stop, correct 0.32" in said.replace("\n", " ")
    assert "second turn" in said and "<script>" in said and "[bold]two" in said
    assert not set(said) & {"\x1b", "\x07", "\u202e"}


def test_a_group_is_shown_whole_and_as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("rollouts", path, "--step", 1, "--group", 2, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(r["visit_id"], r["completion"]) for r in found] == [(2, "2-2"), (2, "2-1"), (2, "2-0")]
    assert "logprobs" not in found[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "step_000002.parquet can't be read"),
        (("--step", 7), "--step 7: "),
        (("--step", 1, "--group", 9), "--group 9: step 1 has 4 groups, 0 to 3"),
        (("--loop.steps", 3), "--loop.steps"),
    ],
)
def test_what_is_not_there_is_one_line(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[Any, ...], said: str
) -> None:
    assert run_cli("rollouts", path, *arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_run_without_rollouts_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")
    assert run_cli("rollouts", tmp_path) == 2
    assert "has no rollouts yet" in capsys.readouterr().err


def test_counts_are_rounded_before_their_unit_is_chosen() -> None:
    said = {9_999: "9,999", 12_345: "12.3 k", 999_999: "1 M", 999_600_000: "1 G", 2_500_000_000_000: "2.5 T"}
    assert [count(value) for value in said] == list(said.values()) and count(None) == "–"


def test_runs_are_compared(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "run_b"
    other.mkdir()
    options = '[loop]\nsteps = 9\nmax_lag = 0\n[run]\ndir = "b"\n[algorithm]\nloss = {name = "x"}'
    (other / "config.toml").write_text(options)
    assert run_cli("compare", path, other, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    default = AlgorithmConfig().loss
    assert found["options"] == {"loop.max_lag": [2, 0], "algorithm.loss": [default, {"name": "x"}]}
    first, second = found["figures"]
    assert (first["State"], first["Score"], first["Steps"]) == (
        "dead",
        "0.250 → 0.500",
        "2 in 2:00, without stops; 1:40 since the first rollout",
    )
    assert first["Reward"].startswith("0.200 → 0.400") and first["Trained on"].startswith("2,000 tokens, 20 tokens/s")
    assert first["Faults"] == "2 rollouts failed: timeout 2" and first["Warnings"] == "none"
    assert second["Reward"].startswith("– → –") and second["Score"] == "–"
    assert run_cli("compare", path, other) == 0
    said = capsys.readouterr().out
    assert "2:00" in said and "–" in said and "run_b: no step is recorded" in said
    (other / "config.toml").write_text("[loop")
    assert run_cli("compare", path, other, "--json") == 0
    assert json.loads(capsys.readouterr().out)["options"] == {}, "its options are not known"
    assert run_cli("compare", path, other) == 0
    said = capsys.readouterr().out
    assert "config.toml is missing" in said and "max_lag" not in said and "equal" not in said


def test_the_mean_lag_is_that_of_the_trained_tokens(path: Path) -> None:
    lags = {"step": 1, "lag/mean": 1.0, "train/tokens": 300}, {"step": 2, "lag/mean": 2.0, "train/tokens": 100}
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lags))
    assert figures(load_run(path))["Lag"].startswith("1.25 versions, ")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "lag/mean": "NaN", "train/tokens": None}) + "\n")
    assert figures(load_run(path))["Lag"].startswith("1.25 versions, ")


def test_rollouts_that_ended_after_the_last_step_count_once_there_is_a_summary_of_it(path: Path) -> None:
    summary = {"steps": 2, "rollouts": {"generated": 40, "trained": 30, "failed": 3}, "failures": {"KeyError": 3}}
    (path / "summary.json").write_text(json.dumps(summary))
    run = load_run(path)
    assert run.last["rollout/generated"] == 40 and run.last["reward/mean"] == 0.4
    assert "40 ended, 30 trained on, 3 failed" in figures(run)["Rollouts"]
    assert figures(run)["Faults"] == "3 rollouts failed: KeyError 3"
    (path / "summary.json").write_text(json.dumps(summary | {"steps": 1}))
    assert load_run(path).last["rollout/failed"] == 2, "a summary of an earlier stop"


def test_a_notebook_shows_a_card_with_all_texts_escaped(path: Path) -> None:
    nasty = path.rename(path.with_name("<b onclick=x>"))
    card = load_run(nasty)._repr_html_()
    assert "&lt;b onclick=x&gt;" in card and "<b onclick" not in card
    assert "0.250 → 0.500" in card and "<polyline" in card and "killed or failed" in card
    with (nasty / "metrics.jsonl").open("a") as file:
        file.write('ard/mean": 0.9}\n')
    run = load_run(nasty)
    assert len(run.metrics) == 3 and "0.200 → 0.900" in run._repr_html_()
    assert sparkline_svg([1.0]) == "–" and "nan" not in sparkline_svg([2.0] * 500)


def test_metrics_are_plotted(path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = load_run(path)
    figure = run.plot("reward/mean", "lag/mean", by="time/wall_s")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["reward/mean", "lag/mean"]
    assert list(figure.axes[0].lines[0].get_xdata()) == [60.0, 120.0]
    with pytest.raises(Exception, match="no metric 'reward/men'"):
        run.plot("reward/men")
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0]) and 0.4 < smooth([0.0, 1.0])[1] < 0.6


def test_long_and_unprintable_text_is_cut() -> None:
    assert shorten(NASTY) == "·[31mred·· <script>alert(1)</script> ↵ [bold]two·"
    assert shorten("a" * 10**6 + "b" * 10**6, 10) == "aaaaa … bbbbb"
