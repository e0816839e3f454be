"""Engines on a Ray cluster are replaced, and their number can be changed."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.schema import RuntimeConfig
from slipstream.controller.engine_supervisor import scale
from slipstream.runtime.runtime import open_runtime
from tests.controller.test_engine_supervisor import Warned, balanced, play, run_of, send, step, until
from tests.runtime.conftest import MEMORY

pytest.importorskip("ray")


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_engines_return_and_are_added_on_a_cluster(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is killed, another one's node is removed, and a further one waits for a node to be added."""
    from ray.cluster_utils import Cluster

    monkeypatch.setattr("tests.controller.test_engine_supervisor.LIMIT", 240.0)
    head = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    flags = ["--generator.replicas=2", "--runtime.kind=ray", f"--runtime.address={cluster.address}",
             "--trainer.device=cpu", "--generator.device=cpu"]  # fmt: skip

    async def script(run: Warned) -> None:
        pool = run.cluster.generator
        send(pool.generators[1], signal.SIGKILL)
        await until(lambda: len(pool.alive) == 1)
        await until(lambda: len(pool.alive) == 2)
        await scale(run, 3)  # all CPUs are taken
        await step(run, 3)
        assert len(pool.alive) == 2
        node = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        await until(lambda: len(pool.alive) == 3)
        await step(run, 3)
        assert len({engine.version for engine in pool.alive}) == 1
        cluster.remove_node(node)
        await until(lambda: len(pool.alive) == 2)
        await step(run, 2)
        cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        await until(lambda: len(pool.alive) == 3)
        await step(run, 2)
        await scale(run, 1)
        await step(run, 2)

    try:
        with open_runtime(RuntimeConfig(kind="ray", address=cluster.address)):
            summary: dict[str, Any] = asyncio.run(play(run_of(tiny, tmp_path, *flags), script))
    finally:
        cluster.shutdown()
    records = balanced(summary, tmp_path / "run" / "metrics.jsonl")
    assert summary["engine_restarts"] == 2 and records[-1]["engines/alive"] == 1
