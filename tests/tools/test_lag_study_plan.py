"""The plan of a lag study: parsing of lags and corrections, and runs that differ only in lag, correction and seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.config.loading import dump
from slipstream.config.schema import Config, ConfigError
from slipstream.tools.lag_study.plan import CORRECTIONS, Plan, parse_corrections, parse_lags

FLAGS = ("--loop.max_tokens=4000", "--loop.groups_per_step=4", "--loop.group_size=4")


def plan(directory: Path, *flags: str, corrections: str = "none,default") -> Plan:
    file = directory / "task.toml"
    file.write_text('model = { path = "m" }\nenvironment = { name = "addition" }\n')
    return Plan(file, directory / "study", (0, 4), parse_corrections(corrections), 2, (*FLAGS, *flags))


def test_corrections_are_names_or_sets_of_options() -> None:
    assert parse_corrections("none, default") == {"none": CORRECTIONS["none"], "default": ()}
    tight = "tight:algorithm.loss.clip_high=0.1,algorithm.loss.clip_low=0.1"
    assert parse_corrections(f"{tight},default")["tight"] == (
        "algorithm.loss.clip_high=0.1",
        "algorithm.loss.clip_low=0.1",
    )
    for text, said in (("nine", "nine is unknown"), ("none,none", "twice"), ("a b:x.y=1", "'a b' is no name")):
        with pytest.raises(ConfigError, match=said):
            parse_corrections(text)


@pytest.mark.parametrize("text", ["0,", "1,x", "1,1", "-1", "1.5"])
def test_lags_are_whole_numbers(text: str) -> None:
    assert parse_lags("4, 0,16") == (0, 4, 16)
    with pytest.raises(ConfigError, match="--lags"):
        parse_lags(text)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_built_in_corrections_set_options_that_exist(tmp_path: Path, name: str) -> None:
    plan(tmp_path, corrections=name).check()


def test_runs_differ_only_in_lag_correction_and_seed(tmp_path: Path) -> None:
    wanted = plan(tmp_path)
    runs = wanted.runs()
    assert len({run.path for run in runs}) == len(runs) == 8
    configs: list[Config] = [wanted.configuration(run) for run in runs]
    for run, config in zip(runs, configs, strict=True):
        assert (config.loop.max_lag, config.loop.seed) == (run.lag, run.seed)
        assert (
            config.loop.force_max_lag == bool(run.lag)
            and config.loop.max_tokens == 4000
            and config.evaluation.every_tokens == 200
        )
        assert config.loop.steps * 4 * 4 > 4000, "the limit on steps could end a run before the limit on tokens"
        studied = {
            "loop": config.loop.model_copy(update={"max_lag": 0, "seed": 0, "force_max_lag": False}),
            "run": configs[0].run,
        }
        assert config.model_copy(update=studied | {"algorithm": configs[0].algorithm}) == configs[0]
    assert configs[0].algorithm.loss == {"name": "reinforce"} and configs[2].algorithm.loss == {"name": "grpo"}


def test_a_directory_with_a_run_of_another_configuration_is_refused(tmp_path: Path) -> None:
    first = plan(tmp_path)
    first.check()
    run = first.runs()[0]
    run.path.mkdir(parents=True)
    (run.path / "config.toml").write_text(dump(first.configuration(run)))
    first.check()
    with pytest.raises(ConfigError, match=r"loop\.retries = 3, now 7.*name another --dir"):
        plan(tmp_path, "--loop.retries=7").check()


def test_a_study_needs_max_tokens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokens is not set; add --loop"):
        plan(tmp_path, "--loop.max_tokens=0").check()


@pytest.mark.parametrize("flag", ["--loop.max_lag=3", "--loop.seed=3", "--loop.steps=3", "--run.dir=x"])
def test_options_that_the_study_sets_are_refused_as_flags(tmp_path: Path, flag: str) -> None:
    with pytest.raises(ConfigError, match="is set by the study; "):
        plan(tmp_path, flag).check()
