"""What `deploy/` names exists, and agrees with the rest of the tree."""

from __future__ import annotations

import re
import subprocess

import pytest

from slipstream.config.loading import option_names
from tests.test_records import ROOT

DEPLOY = ROOT / "deploy"
FILES = [path for path in DEPLOY.rglob("*") if path.is_file()]


def test_ray_has_one_version() -> None:
    """That of `constraints.txt`, in the image and in Kubernetes."""
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    for path in FILES:
        for version in re.findall(r'(?:rayVersion: "|ray\[default\]==)([\d.]+)', path.read_text()):
            assert version == pinned[1], path


def test_flags_are_options() -> None:
    found = [name for path in FILES for name in re.findall(r"--([a-z_]+\.[a-z_]+)", path.read_text())]
    assert found and set(found) <= set(option_names())


def test_kubernetes_files_have_the_same_cluster() -> None:
    """Ray of the job is that of the cluster."""
    yaml = pytest.importorskip("yaml")
    cluster, job = (
        yaml.safe_load((DEPLOY / "kubernetes" / f"ray{name}.yaml").read_text()) for name in ("cluster", "job")
    )
    assert (
        cluster["spec"] == job["spec"]["rayClusterSpec"] and cluster["kind"] == "RayCluster" and job["kind"] == "RayJob"
    )


def test_the_slurm_script_is_valid() -> None:
    subprocess.run(["bash", "-n", DEPLOY / "slurm" / "run.sbatch"], check=True)
