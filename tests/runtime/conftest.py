"""A Ray cluster of several nodes on this host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

MEMORY = 80 * 2**20  # bytes of each node's object store


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A head and three nodes of two CPUs. Returns the address."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # On busy processors a node may miss health checks; Ray then ends it, and with it this process as a driver.
    patient = {"health_check_failure_threshold": 60}
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": MEMORY, "_system_config": patient}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(3):
        cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
    yield cluster.address
    cluster.shutdown()
