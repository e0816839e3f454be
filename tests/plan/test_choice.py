"""`loop.max_lag = "auto"` and `generator.replicas = "auto"`."""

from __future__ import annotations

import pytest

from slipstream.config.loading import load_config
from slipstream.config.schema import AUTO, Config, ConfigError
from slipstream.plan.choice import choose_options
from slipstream.plan.hardware import find_gpu, kind_of


def config(*flags: str) -> Config:
    shared = [
        "--model.path=7B",
        "--environment.name=addition",
        "--sampling.max_tokens=8192",
        "--loop.groups_per_step=64",
    ]
    return load_config(None, [*shared, *flags])


BOTH = ("--loop.max_lag=auto", "--generator.replicas=auto", "--generator.engine=vllm", "--generator.max_num_seqs=128")


def test_auto_takes_numbers_for_a_known_gpu() -> None:
    given = config(*BOTH, "--trainer.ranks=3")
    assert (given.loop.max_lag, given.generator.replicas) == (AUTO, AUTO)
    chosen = choose_options(given, 8, "NVIDIA H100 80GB HBM3")
    assert chosen.generator.replicas in (4, 5)
    assert chosen.loop.max_lag in (1, 2, 4, 8)
    few = choose_options(config(*BOTH, "--trainer.ranks=1", "--model.path=0.6B"), 8, "NVIDIA H100 80GB HBM3")
    assert few.generator.replicas <= 7


def test_auto_is_one_without_a_known_gpu() -> None:
    chosen = choose_options(config(*BOTH), 0, "")
    assert (chosen.generator.replicas, chosen.loop.max_lag) == (1, 1)


def test_given_numbers_stay() -> None:
    given = config("--loop.max_lag=3", "--generator.replicas=2")
    assert choose_options(given, 8, "NVIDIA H100 80GB HBM3") is given


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA H20", "h20"), ("Tesla V100", None),
    ],
)  # fmt: skip
def test_kinds_by_their_names_in_cuda(name: str, kind: str | None) -> None:
    found = kind_of(name)
    assert (found.name if found else None) == kind
    assert not kind or find_gpu(name).name == kind


@pytest.mark.parametrize(
    ("flag", "expected"),
    [("--generator.replicas=0", "generator.replicas = 0: it must be"), ("--loop.max_lag=many", "loop.max_lag")],
)
def test_other_values_are_refused(flag: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        config(flag)
