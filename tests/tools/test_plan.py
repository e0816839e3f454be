"""The command `slipstream plan`: its table, JSON and configuration, and one line for each wrong argument."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from slipstream import cli
from slipstream.config.loading import validate
from slipstream.config.trainer import TrainerConfig
from slipstream.plan.hardware import find_gpu
from slipstream.plan.ranking import rank
from slipstream.plan.splits import Split, evaluate
from slipstream.plan.workload import Lengths
from slipstream.runtime.placement import place
from slipstream.tools.plan import measure_gpu
from slipstream.tools.plan_report import explain, to_config
from tests.plan.cases import problem, work

SMALL = ["--rollouts", "64", "--completion", "256", "--prompt", "64"]


def test_plan_prints_a_ranking_and_a_configuration_that_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert cli.main(["plan", "--model", "1.7B", "--gpus", "4", *SMALL, "--price", "2", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    written = json.loads(file.read_text())
    first = written["splits"][0]
    assert first["fits"] and first["trainer_ranks"] + first["engines"] * first["tensor_parallel"] <= 4
    rates = [s["trained_tokens_per_s"] for s in written["splits"] if s.get("source") == "simulation"]
    assert rates == sorted(rates, reverse=True)
    assert first["cost"] == pytest.approx(2 * first["gpu_hours"])
    assert f"{first['trained_tokens_per_s']:,.0f}" in shown
    values = tomllib.loads(shown[shown.index("[model]") :])
    config = validate(values | {"environment": {"name": "addition"}})
    assert config.generator.replicas == first["engines"]
    assert config.trainer.ranks == first["trainer_ranks"]


def test_lengths_of_prompts_come_from_a_file_or_a_distribution(tmp_path: Path) -> None:
    lengths, file = tmp_path / "prompts.txt", tmp_path / "plan.json"
    lengths.write_text("100\n300\n2600\n")

    def planned(*flags: str) -> tuple[float, float]:
        shared = "plan --model 1.7B --gpus 2 --rollouts 64 --completion 64 --json"
        assert cli.main([*shared.split(), str(file), *flags]) == 0
        found = json.loads(file.read_text())
        return found["run"]["prompt"], found["splits"][0]["step_s"]

    (fixed, fixed_s), (varied, varied_s) = planned("--prompt=1000"), planned(f"--prompt-lengths={lengths}")
    spread, _ = planned("--prompt=1000", "--prompt-spread=0.5")
    assert fixed == varied == 1000 and spread == pytest.approx(1000, rel=0.02)
    assert varied_s == pytest.approx(fixed_s, rel=0.3) and varied_s != fixed_s


def test_the_page_shows_all_splits_and_is_well_formed(tmp_path: Path) -> None:
    page, file = tmp_path / "plan.html", tmp_path / "plan.json"
    shared = ["plan", "--model", "1.7B", "--gpus", "2", "--max-lag", "0,1", *SMALL]
    assert cli.main([*shared, "--html", str(page), "--json", str(file)]) == 0
    text = page.read_text()
    drawings = [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.S)]
    assert len(drawings) == 4, "throughput, a timeline, and the memory of trainer and engine"
    splits = {(s["placement"], s["trainer_ranks"], s["engines"], s["tensor_parallel"], s["max_lag"])
              for s in json.loads(file.read_text())["splits"] if s["fits"]}  # fmt: skip
    assert len(drawings[0].findall("circle")) == len(splits) + 1, "the first has a ring, too"
    assert "weights" in text and re.search(r"activations [\d.]+ GiB", text) and "max_lag 1" in text
    assert "<script" not in text and "http:" not in text and "https:" not in text


@pytest.mark.parametrize(("model", "gpus"), [("0.6B", 1), ("1.7B", 2), ("30B-A3B", 8)])
@pytest.mark.parametrize("lora_rank", [0, 16])
def test_each_split_that_fits_has_a_valid_configuration(model: str, gpus: int, lora_rank: int) -> None:
    plans = [plan for every in (1, 2) for plan in rank(problem(model, "h200", gpus, work=work(
        Lengths(512, 0.5, 2048), lora_rank=lora_rank, every=every)), (0, 1, 4)) if not plan.missing]  # fmt: skip
    assert plans
    for plan in plans:
        values = tomllib.loads(to_config(plan))
        config = validate(values | {"environment": {"name": "addition"}})
        assert place(config, gpus).trainer


def test_plan_reads_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, file = tmp_path / "run.toml", tmp_path / "plan.json"
    config.write_text(
        '[model]\npath = "0.6B"\n[environment]\nname = "addition"\n'
        "[loop]\nsteps = 7\ngroups_per_step = 4\ngroup_size = 2\nmax_lag = 3\n[sampling]\nmax_tokens = 100\n"
    )
    assert cli.main(["plan", str(config), "--gpus", "2", "--loop.steps", "9", "--json", str(file)]) == 0
    run = json.loads(file.read_text())["run"]
    assert (run["rollouts"], run["completion"], run["steps"]) == (8, 100, 9)
    assert "max_lag = 3" in capsys.readouterr().out


def test_a_sweep_shows_each_number_of_gpus_and_each_lag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", "0.6B", "--gpus", "2,4", "--max-lag", "0,2", *SMALL]) == 0
    shown = capsys.readouterr().out
    table = shown[: shown.index("steps of")]
    rows = [tuple(line.split("│")[2:4]) for line in table.splitlines() if "│" in line]
    assert [(int(gpus), int(lag)) for gpus, lag in rows] == [(2, 0), (2, 2), (4, 0), (4, 2)]


@pytest.mark.parametrize("many", ["--rollouts 1000000000", "--turns 2048 --tool-seconds 1"])
def test_work_that_is_too_much_to_simulate_keeps_the_formula(
    many: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    assert cli.main(["plan", "--model", "0.6B", "--gpus", "2", *many.split(), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "~ by formula: a simulation" in shown and "│ <= 1 │" in shown
    assert page.stat().st_size


def test_a_number_of_gpus_that_fits_nothing_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", "14B", "--gpus", "1,8", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"│ 1 +│ +│ does not fit", shown) and "14B (14.8 B) on 8 x h100" in shown


def test_the_configuration_has_no_limit_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    for limit, expected in (([], None), (["--max-tokens", "900"], {"max_tokens": 900})):
        assert cli.main(["plan", "--model", "0.6B", "--gpus", "2", *SMALL, *limit]) == 0
        shown = capsys.readouterr().out
        values = tomllib.loads(shown[shown.index("[model]") :])
        assert values.get("sampling") == expected and "max_model_len" not in values["generator"]


def test_the_reason_compares_with_the_next_in_a_sentence() -> None:
    best, other, lag = (
        evaluate(problem("0.6B"), Split("disaggregated", ranks, "fsdp", 1, 8 - ranks, 1, max_lag))
        for ranks, max_lag in ((2, 1), (3, 1), (2, 2))
    )
    assert explain([best, lag]).endswith("No other division of the GPUs fits.")
    for factor, expected in (
        (1.0, "That is as many as the next"),
        (2.0, "100% more than the"),
        (0.98, "2% fewer than the"),
    ):
        other.tokens_per_s = best.tokens_per_s / factor
        assert expected in explain([best, other])


def test_errors_of_a_model_name_the_option_that_gave_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[model]\npath = "7C"\n[environment]\nname = "addition"\n')
    assert cli.main(["plan", str(config)]) == 2
    assert "model.path 7C: no directory" in capsys.readouterr().err


def test_a_run_that_is_too_short_or_damaged_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text('[model]\npath = "0.6B"\n[environment]\nname = "addition"\n')
    for line, expected in (("", "it has 0 steps, and a fit needs 6"), ('{"time/step_s": 1}\n' * 9, "records lack")):
        (tmp_path / "metrics.jsonl").write_text(line)
        assert cli.main(["plan", "--from", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_gpu_is_measured() -> None:
    found = measure_gpu(find_gpu("h100"))
    assert 1e11 < found.bandwidth < 2e13
    assert 1e13 < found.operations < 1e16


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "plan needs a CONFIG.toml"),
        ("--model 7C", "--model 7C: no directory"),
        ("--model 7B --measure", "--measure: this machine has no GPU"),
        ("--model 7B --gpu h1000", "did you mean h100?"),
        ("--model 7B --gpus 0", "--gpus 0 must be whole numbers from 1 to 1024"),
        ("--model 7B --max-lag=-1", "--max-lag -1 must be whole numbers from 0 to 1000"),
        (f"--model 7B --max-lag {10**30}", "must be whole numbers from 0 to 1000"),
        ("--model 7B --link 0", "--link 0.0 must be a number from 0.001 to 1,000,000"),
        ("--model 7B --network 0", "--network 0.0 must be a number from 0.001 to 1,000,000,000"),
        ("--model 7B --network=-5", "--network -5.0 must be"),
        ("--model 7B --network nan", "--network nan must be"),
        ("--model 7B --group-size 1", "--group-size 1 must be a number from 2 to"),
        ("--model 7B --seed=-1", "--seed -1 must be a number from 0 to"),
        (f"--model 7B --rollouts {10**30}", "must be a number from 1 to 1,000,000,000"),
        ("--model 7B --lora-rank 5000", "--lora-rank 5000 must be a number from 0 to 4,096"),
        ("--model 7B --spread 4", "--spread 4.0 must be a number from 0 to 3"),
        ("--model 7B --scoring-seconds 1e6", "--scoring-seconds 1000000.0 must be a number from 0 to 86,400"),
        ("--model 7B --tool-seconds inf", "--tool-seconds inf must be a number from 0 to 86,400"),
        ("--model 7B --tool-seconds 5", "--tool-seconds and --tool-tokens are those between turns; give --turns 2"),
        ("--model 7B --lengths words.txt --completion 10", "--lengths has all lengths; leave --completion"),
        ("--model 7B --prompt-lengths words.txt --prompt 10", "--prompt-lengths has all lengths; leave --prompt"),
        ("--model 7B --prompt-lengths words.txt", "--prompt-lengths words.txt, entry 2: 'two' is no whole number"),
        ("--model 7B --turns 100 --completion 10", "--turns 100 exceeds the 10 tokens that the turns share"),
        ("--model 7B --lengths huge.json", "--lengths huge.json, entry 2: inf is no whole number from 1 to"),
        ("--model 7B --lengths object.json", "--lengths object.json: it has a JSON object; give a list"),
        ("--model 7B --lengths words.txt", "--lengths words.txt, entry 2: 'two' is no whole number from 1 to"),
        ("--model 7B --engine-rate 0", "--engine-rate 0.0 must be a number from 0.001 to"),
        ("--model 7B --html gone/p.html", "--html gone/p.html: there is no directory gone"),
        ("--model 7B --json .", "--json . is a directory; give a file"),
        ("--model 7B --lengths bytes.bin", "--lengths bytes.bin: no text; give a file with one number"),
        ("--model 7B --completion 200000", "has a context of 131,072"),
        ("--model 7B --rollouts 7", "--rollouts 7 is no multiple of the group size 8"),
        ("--model 405B", "405B fits on no split of 8 x h100"),
        ("--model 7B --spread nan", "--spread nan must be a number from 0 to 3"),
        ("--model 7B --lengths missing.txt", "--lengths missing.txt"),
        ("--model 7B --loop.steps 3", "--loop.steps=3 is an option of a configuration"),
        ("--model 7B --completion 100 --max-tokens 50", "--completion 100 exceeds the limit of 50 tokens"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("huge.json").write_text("[1, 1e400]")
    Path("words.txt").write_text("1 two")
    Path("object.json").write_text('{"lengths": [1, 2]}')
    Path("bytes.bin").write_bytes(b"\xa0\x01")
    assert cli.main(["plan", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_every_split_of_an_fp8_trainer_is_a_valid_configuration() -> None:
    for found in rank(problem(gpus=4, trainer=TrainerConfig(fp8=True)), (0, 1)):
        assert found.missing or "fp8 = true" in to_config(found)
