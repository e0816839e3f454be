"""Checks of the nodes of a real Ray cluster."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config.schema import RuntimeConfig
from slipstream.controller.node_checks import examine
from slipstream.runtime.runtime import current_runtime, open_runtime


@pytest.mark.e2e
def test_the_nodes_of_a_cluster_are_checked_together(
    cluster: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Connections, bandwidth and an all-reduce between all nodes."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("")
    flags = [f"--model.path={tiny}", "--environment.name=addition", f"--runtime.address={cluster}"]
    status = main(["doctor", "run.toml", "--json", "--runtime.kind=ray", *flags])
    found = json.loads(capsys.readouterr().out)
    assert status == 0 and not found["faults"] and set(found["checks"].values()) == {"ok"}
    assert len(found["nodes"]) == 4 and len({node["node"] for node in found["nodes"]}) == 4
    assert len(found["bandwidth"]) == 6 and all(rate["bytes_per_s"] > 1e7 for rate in found["bandwidth"])


@pytest.mark.e2e
def test_a_node_that_does_not_see_the_run_directory_is_named(cluster: str, tmp_path: Path) -> None:
    with open_runtime(RuntimeConfig(kind="ray", address=cluster)):
        names = [node.name for node in current_runtime().nodes()]
        elsewhere = {names[2]: tmp_path / "none"}
        found = asyncio.run(examine(current_runtime(), None, tmp_path, all_nodes=False, elsewhere=elsewhere))
    [fault] = found.faults
    assert fault.text == f"node {names[2]}: {tmp_path} is not there; mount one file system for run.dir on all nodes"
