"""The addition environment: sizes and their validation."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.config.environments import EnvironmentConfig
from slipstream.config.schema import ConfigError
from slipstream.environments.addition import Addition, target
from slipstream.environments.load import load_environment


@pytest.mark.parametrize(
    ("option", "value"), [("digits", 0), ("digits", 10), ("digits", "2"), ("test", 0), ("test", 10_000)]
)
def test_invalid_sizes_raise_with_the_options_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^environment\.options\.{option} = ") as caught:
        load_environment(EnvironmentConfig(name="addition", options={option: value}))
    assert "\n" not in str(caught.value)


def test_nine_digits_are_sampled_without_a_list_of_all_sums() -> None:
    environment = Addition(digits=9, test=5, train=5)
    assert len(environment.train) == len(environment.test) == 5
    a, b = map(int, environment.test[0].id.split("+"))
    assert target(environment.test[0]) == str(a + b)[::-1]
