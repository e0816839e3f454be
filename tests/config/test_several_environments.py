"""`[[environments]]`: each takes what it lacks from `[environment]` and `[sampling]`; faults are one line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from slipstream.config.loading import as_flags, dump, load_config, load_policy_config, validate, with_absolute_paths
from slipstream.config.schema import Config, ConfigError

TWO = """
[model]
path = "m"
[environment]
timeout = 20
[[environments]]
name = "addition"
weight = 3
options = { digits = 1 }
[environments.sampling]
max_tokens = 3
[[environments]]
name = "path/to/own.py:Own"
timeout = 7.0
curriculum = { drop_after = 2 }
[sampling]
max_tokens = 9
temperature = 0.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TWO)
    return path


def described(config: Config) -> list[tuple[object, ...]]:
    return [
        (e.label, e.weight, e.options, e.timeout, config.sampling_of(e), e.curriculum.drop_after)
        for e in config.each_environment
    ]


def test_each_environment_takes_what_it_lacks_from_the_shared_sections(file: Path) -> None:
    config = load_config(file)
    first, second = config.each_environment
    assert (first.label, first.weight, first.timeout, first.options) == ("addition", 3.0, 20.0, {"digits": 1})
    assert (second.label, second.weight, second.timeout, second.options) == ("Own", 1.0, 7.0, {})
    assert [config.sampling_of(each).max_tokens for each in (first, second)] == [3, 9]
    assert {config.sampling_of(each).temperature for each in (first, second)} == {0.5}
    assert (config.longest_timeout, config.longest_completion) == (20.0, 9)
    changed = load_config(file, ["--environment.timeout=5", "--sampling.max_tokens=8"])
    assert [each.timeout for each in changed.each_environment] == [5.0, 7.0]
    assert [changed.sampling_of(each).max_tokens for each in changed.each_environment] == [3, 8]


def test_a_flag_sets_an_option_of_one_environment(file: Path) -> None:
    flags = ["--environments.0.weight=5", "--environments.1.name=2024", "--environments.1.sampling.top_k", "4"]
    first, second = load_config(file, flags).each_environment
    assert (first.weight, second.name, second.sampling.top_k) == (5.0, "2024", 4)
    for flag in ("--environments.2.weight=1", "--environments.0=1", "--environments.x.weight=1"):
        with pytest.raises(ConfigError, match=r"^--environments\.\w"):
            load_config(file, [flag])
    with pytest.raises(ConfigError, match=r"there is no entry 2 of \[\[environments\]\], which are counted from 0"):
        load_config(file, ["--environments.2.weight=1"])
    with pytest.raises(ConfigError, match=r"no entry 0 of \[\[policies\]\], which a flag can't add; write them into"):
        load_config(file, ["--policies.0.name=a"])


def test_one_environment_is_a_list_of_one() -> None:
    config = load_config(None, ["--model.path=m", "--environment.name=gsm8k", "--environment.sampling.top_k=4"])
    [only] = config.each_environment
    assert (only.label, only.name, config.sampling_of(only).top_k, config.largest_top_k) == ("gsm8k", "gsm8k", 4, 4)


def test_what_is_recorded_means_the_same(file: Path) -> None:
    config = load_config(file)
    read = validate(tomllib.loads(dump(config)))
    for other in (read, with_absolute_paths(config), load_config(None, as_flags(config))):
        assert described(other) == described(config)
    later = validate(tomllib.loads(dump(config)) | {"sampling": {"max_tokens": 50}})
    assert [later.sampling_of(each).max_tokens for each in later.each_environment] == [3, 50]


def test_a_policy_is_evaluated_on_all_environments_of_its_run_or_on_one(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "policy").mkdir(parents=True)
    (run / "config.toml").write_text(dump(load_config(file)))
    for environment, labels in ((None, ["addition", "Own"]), ("Own", ["Own"]), ("addition", ["addition"])):
        config = load_policy_config(str(run), environment, [])
        assert [each.label for each in config.each_environment] == labels
    assert load_policy_config(str(run), "addition", []).each_environment[0].options == {"digits": 1}
    for target in (str(run), str(file)):
        [one] = load_policy_config(target, "Own", []).environments
        assert (one.name, one.timeout, one.curriculum.drop_after) == ("path/to/own.py:Own", 7.0, 2)
        [other] = load_policy_config(target, "gsm8k", ["--environment.options.shots=1"]).each_environment
        assert (other.name, other.options, other.timeout) == ("gsm8k", {"shots": 1}, 20.0)
        with pytest.raises(ConfigError, match=r"which has addition, Own, and no environment \(did you mean Own\?\)$"):
            load_policy_config(target, "Owm", [])
    [changed] = load_policy_config(str(file), "Own", ["--environments.1.timeout=5"]).environments
    assert changed.timeout == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (('"path/to/own.py:Own"', '"addition"'), 'environments.1 and environments.0 are both "addition" in metrics'),
        (("weight = 3", "weight = 0"), "environments.0.weight = 0: it must be greater than 0"),
        (("weight = 3", "wieght = 3"), "unknown option environments.0.wieght (did you mean environments.0.weight?)"),
        (("max_tokens = 3", "max_token = 3"), "sampling.max_token (did you mean environments.0.sampling.max_tokens?)"),
        (("drop_after", "drop_afer"), "drop_afer (did you mean environments.1.curriculum.drop_after?)"),
        (("weight = 3", "turns = 3"), "unknown option environments.0.turns (did you mean environments.0.max_turns?)"),
        (('name = "addition"', 'name = ""'), 'environments.0.name = "": it must not be empty'),
        (('name = "addition"', ""), "environments.0.name is not set"),
        (("[environment]", '[environment]\nname = "gsm8k"'), 'environment.name = "gsm8k" does not go with [['),
        (("[environment]", "[environment]\noptions = { a = 1 }"), "environment.options = {\"a\" = 1} does not go with"),
        (("weight = 3", "max_concurrent = 3"), "environments.0.max_concurrent is for all environments; set"),
        (("weight = 3", 'label = "a/b"'), 'label = "a/b" of an environment: use letters, digits'),
        (("max_tokens = 3", "top_p = 2"), "environments.0.sampling.top_p = 2: it must be less than or equal to 1"),
        (("max_tokens = 3", "temperature = 0.001"), "environments.0.sampling.temperature = 0.001 must be from 0.01"),
        (("{ digits = 1 }", "{ day = 2020-01-01 }"), "environments.0.options.day = datetime.date(2020, 1, 1) is"),
        (
            ("[model]", "[generator]\nmax_model_len = 12\n[model]", "max_tokens = 3", "max_tokens = 12"),
            "no room for a prompt in addition to environments.0.sampling.max_tokens = 12; raise",
        ),
        (
            ("[model]", '[generator]\nengine = "vllm"\n[model]', "max_tokens = 3", "top_p = 0.5"),
            "environments.0.sampling.top_p = 0.5 alone can't be replayed with vLLM",
        ),
        (("[environment]\n", "[[environment]]\n"), "environment"),
    ],
)  # fmt: skip
def test_faults_name_the_environment(file: Path, changes: tuple[str, ...], said: str) -> None:
    text = TWO
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text
        text = text.replace(old, new, 1)
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert said in str(raised.value).splitlines()[0]
