"""[[policies]]: each has the options of the run but its own, and bad ones are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slipstream.config.loading import dump, load_config, load_policy_config, with_policy
from slipstream.config.schema import ConfigError
from slipstream.model.paths import check_policy_paths

GOOD = """
[model]
path = "m"
[lora]
rank = 4
[environment]
name = "addition"
[algorithm]
kl_coef = 0.1
[[policies]]
name = "a"
[[policies]]
name = "b"
learning_rate = 0.5
algorithm = { loss = "ppo" }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(GOOD)
    return path


def test_a_policy_has_the_options_of_the_run_but_its_own(path: Path, tmp_path: Path) -> None:
    for config in (load_config(path), load_config(_saved(path, tmp_path))):
        a, b = config.each_policy["a"], config.each_policy["b"]
        assert (a.algorithm, a.trainer) == (config.algorithm, config.trainer)
        assert b.algorithm.loss == {"name": "ppo"} and b.algorithm.kl_coef == 0.1 and b.trainer.learning_rate == 0.5
    changed = load_config(path, ["--policies.0.learning_rate=0.25", "--policies.1.algorithm.loss.clip_high=0.3"])
    assert changed.each_policy["a"].trainer.learning_rate == 0.25


def _saved(path: Path, tmp_path: Path) -> Path:
    saved = tmp_path / "config.toml"
    saved.write_text(dump(load_config(path)))
    return saved


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--policies.1.name=a", 'policies.1 and policies.0 are both "a"; give one another name'),
        ("--policies.0.name=a b", 'policies.0.name = "a b": use letters, digits, "_" and "-" only'),
        ("--policies.0.nam=x", "unknown option policies.0.nam (did you mean policies.0.name?)"),
        ("--policies.0.algorithm={los = 'ppo'}", "policies.0.algorithm.los (did you mean policies.0.algorithm.loss?)"),
        ("--policies.2.name=c", "there is no entry 2 of [[policies]]"),
        ("--policies.0.algorithm={reference = 'average', kl_coef = 0}", "policies.0: algorithm.reference = \"average\" "
         "does nothing without algorithm.kl_coef"),
        ("--policies.0.algorithm={filter_zero_advantage = true}",
         "policies.0.algorithm.filter_zero_advantage is for all policies; set algorithm.filter_zero_advantage"),
        ("--trainer.ranks=2", "[[policies]] need trainer.ranks = 1"),
        ("--generator.engine=own:Engine", '[[policies]] need generator.engine = "torch" or "vllm"'),
        ("--sync.link=delta", '[[policies]] need sync.link = "shared" or "checkpoint"'),
        ("--teacher.lag=1", "[[policies]] do not go with teacher.lag"),
        ("--loop.max_tokens=9", "[[policies]] do not go with loop.max_tokens; set loop.steps"),
    ],
)  # fmt: skip
def test_bad_policies_are_refused_by_name(path: Path, flag: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(path, [flag])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_memory_of_several_models_is_not_estimated(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[\[policies\]\] of several models .* estimates one; set the options"):
        load_config(path, ["--policies.1.model=other", "--trainer.memory=auto"])


def test_a_trained_adapter_sets_the_options_of_adapters_or_is_refused(path: Path, tmp_path: Path) -> None:
    assert load_policy_config(str(path), None, []).policies == load_config(path).policies
    for name, rank in (("own", 4), ("other", 8)):
        (tmp_path / name).mkdir()
        adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(adapter))
        (tmp_path / name / "adapter_model.safetensors").touch()
    config = load_config(path, [f"--policies.1.adapter={tmp_path}/own"])
    assert config.lora.targets == ["q_proj"] and config.lora.alpha == 8
    assert [own.lora.path for own in config.each_policy.values()] == ["", f"{tmp_path}/own"]
    with pytest.raises(ConfigError, match=r"lora.rank = 4, but the adapter at policies.0.adapter = '.*/other' has 8"):
        load_config(path, [f"--policies.0.adapter={tmp_path}/other"])
    with pytest.raises(ConfigError, match=r"policies.1.adapter = 'none': no such directory; give that of a PEFT"):
        check_policy_paths(load_config(path, ["--policies.1.adapter=none"]))


def test_a_run_of_one_policy_is_no_opponent_of_several(path: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text(
        dump(load_config(None, ["--model.path=m", "--environment.name=addition"]))
    )
    with pytest.raises(ConfigError, match=r"/run has trained one policy without a name; give a run of policies a, b$"):
        with_policy(load_config(path), str(tmp_path / "run"))


def test_policies_of_one_model_share_it_and_others_have_their_own(path: Path) -> None:
    own = ["--policies.1.model=other"]

    def models(*flags: str) -> list[tuple[str, list[str]]]:
        each = load_config(path, flags).each_model
        return [(one.model.path, [policy.name for policy in one.policies]) for one in each]

    assert models() == [("m", ["a", "b"])]
    assert models(*own) == models(*own, "--lora.rank=0") == [("m", ["a"]), ("other", ["b"])]
    assert models("--lora.rank=0") == [("m", ["a"]), ("m", ["b"])], "each trains all weights of a copy"
    assert [one.model.path for one in load_config(path, own).each_policy.values()] == ["m", "other"]
    for flags, message in (
        ([*own, "--generator.engine=vllm"], 'need generator.engine = "torch": vLLM serves one model'),
        (["--lora.rank=0", "--generator.engine=vllm"], "need adapters in vLLM; set lora.rank = 16"),
        (
            ["--lora.rank=0", "--sync.restart=true", "--sync.link=checkpoint", "--sync.in_flight=retry"],
            "[[policies]] do not go with sync.restart",
        ),
        ([*own, "--evaluation.against_start=true"], "do not go with evaluation.against_start if they train several"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_config(path, flags)


def test_an_evaluation_against_the_start_needs_tasks(path: Path) -> None:
    flags = ["--evaluation.against_start=true", "--evaluation.tasks=0"]
    with pytest.raises(ConfigError, match=r"start = true does nothing without evaluation\.tasks above 0"):
        load_config(path, flags)
    load_config(path, flags[:1])
