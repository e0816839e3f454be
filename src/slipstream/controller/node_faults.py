"""Faults of nodes, each with its remedy: pure functions of the nodes' reports and of what a run needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.controller.node_worker import NodeReport

MIN_SHM = 2**30  # bytes of /dev/shm for NCCL, vLLM and Ray; Docker gives 64 MiB
MIN_OPEN_FILES = 1024, 4096  # on one node, on several
MIN_LOCKED_MEMORY = 2**32  # for InfiniBand, whose drivers lock the memory of buffers
MIN_BANDWIDTH = 12.5e6  # bytes/s: 100 Mbit/s
PUBLISH_LIMIT_S = 60.0  # of a broadcast of the `nccl` link
GB = 1e9
Reports = Sequence[NodeReport]


@dataclass(frozen=True)
class Needs:
    """What a run needs. Sizes in bytes, 0 if unknown or not needed."""

    directory: str = "."
    gpus: int = 0  # of all nodes
    gpus_together: int = 0  # of one node
    engine_size: str = ""  # options that set it
    disk: int = 0
    memory: int = 0  # of the controller's node
    published: int = 0
    vllm: bool = False
    ray: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)  # of the controller


class Fault(NamedTuple):
    """A fault and its remedy, found by the check of this name."""

    check: str
    text: str


def find_faults(reports: Reports, needs: Needs) -> list[Fault]:
    """The faults that reports of nodes have."""
    if not reports:
        return []
    table = [row for report in reports for row in _node_checks(report, reports, needs)] + _run_checks(reports, needs)
    faults = [Fault(check, text) for check, found, text in table if found]
    return [*(Fault("versions", text) for text in _different_versions(reports, needs)), *faults]


def _node_checks(r: NodeReport, reports: Reports, needs: Needs) -> list[tuple[str, object, str]]:
    """Check, whether a node has the fault, and its text."""
    many, torch, shm = len(reports) > 1, r.versions.get("torch", ""), r.gpus or needs.vllm or needs.ray
    sizes = [(name, size) for report in reports for name, size in report.files.items()]
    wrong = sorted({name for name, size in sizes if r.files and size > r.files.get(name, -1)})
    rows = (
        ("model files", r.model, r.model),
        ("model files", wrong, f"model files are missing or differ ({several(wrong, '')}); copy them again"),
        ("GPUs", r.gpu_error, f"nvidia-smi fails ({r.gpu_error}); install or restart the NVIDIA driver"),
        ("GPUs", r.gpus and "+cpu" in torch, f"torch {torch} has no CUDA for its GPUs; install a CUDA build of torch"),
        ("GPUs", r.gpus and (r.ray_gpus or 0) > len(r.gpus),
         f"Ray schedules {r.ray_gpus} GPUs, but nvidia-smi finds {len(r.gpus)}; restart its Ray"),
        ("memory", 0 <= r.shm < MIN_SHM and shm,
         f"/dev/shm has {r.shm / GB:.2f} GB, and NCCL, vLLM and Ray need {MIN_SHM / GB:.1f}; mount it larger, in "
         "Docker with --shm-size=8g"),
        ("limits", 0 <= r.open_files < MIN_OPEN_FILES[many],
         f"`ulimit -n` is {r.open_files}, and a run needs {MIN_OPEN_FILES[many]}; raise it before Ray starts"),
        ("limits", r.infiniband and many and 0 <= r.locked_memory < MIN_LOCKED_MEMORY,
         f"`ulimit -l` is {r.locked_memory // 1024} kB, too little for InfiniBand; set it to unlimited"),
        ("run directory", r.directory,
         f"{needs.directory} {r.directory}; mount one file system for run.dir on all nodes"),
        ("host names", r.resolution, f"{r.resolution}; add it to /etc/hosts"),
    )  # fmt: skip
    return [(check, found, f"node {r.node}: {text}") for check, found, text in rows]


def _run_checks(reports: Reports, needs: Needs) -> list[tuple[str, object, str]]:
    """Check, whether the nodes together have the fault, and its text."""
    controller, gpus = reports[0], [gpu for r in reports for gpu in r.gpus]
    without_vllm = [r.node for r in reports if not r.versions.get("vLLM")]
    drivers = [f"{r.node} {r.gpus[0].driver}" for r in reports if r.gpus]
    free = sum(2 * gpu.free >= gpu.total for gpu in gpus)
    largest = max(max(len(r.gpus), r.ray_gpus or 0) for r in reports)  # only Ray counts GPUs of other vendors
    memory, disk = f"{controller.memory / GB:.1f} GB of memory are free", f"has {_gigabytes(controller.disk)} GB free"
    return [
        ("versions", needs.vllm and without_vllm,
         f'generator.engine = "vllm", but vLLM is missing on {several(without_vllm)}: pip install '
         '"slipstream-rl[vllm]"'),
        ("GPUs", len({gpu.driver for gpu in gpus}) > 1,
         f"the NVIDIA driver differs: {several(drivers, '')}; install the same one on every node"),
        ("GPUs", free < needs.gpus <= len(gpus),
         f"the run needs {needs.gpus} GPUs, but only {free} have half of their memory free; see `nvidia-smi`"),
        ("GPUs", needs.gpus_together > largest,
         f"{needs.engine_size}, but a node has at most {largest} GPUs; lower it"),
        ("memory", 0 <= controller.memory < needs.memory,
         f"both copies of the weights of the shared link need {needs.memory / GB:.1f} GB, but {memory} on "
         f"{controller.node}; free some"),
        ("run directory", 0 <= controller.disk < needs.disk,
         f"{needs.directory} {disk}, and checkpoints take about {_gigabytes(needs.disk)}; free some, or lower "
         "checkpoint.keep, or name another run.dir"),
    ]  # fmt: skip


def _gigabytes(size: float) -> str:
    return f"{size / GB:.1f}" if size >= GB else f"{size / GB:.2g}"


def _different_versions(reports: Reports, needs: Needs) -> Iterator[str]:
    for package in reports[0].versions:
        nodes: dict[str, list[str]] = defaultdict(list)
        for report in reports:
            nodes[report.versions.get(package, "")].append(report.node)
        found = [(several(names), "have" if len(names) > 1 else "has", version) for version, names in nodes.items()]
        if (own := needs.versions.get(package)) is not None and own not in nodes:
            found.append(("the controller", "has", own))
        if len(found) > 1:
            (who, has, version), *others = found
            rest = "".join(f", {other} {theirs or 'none'}" for other, _, theirs in others)
            yield f"{who} {has} {package} {version or 'none'}{rest}; install the same"


def connection_faults(errors: Mapping[tuple[str, str], str]) -> list[Fault]:
    """Faults of connections by (from, to): one line for each pair of nodes."""
    faults = []
    for (one, other), error in errors.items():
        both = errors.get((other, one))
        between = f"node {one} can't connect to node {other}"
        if both:
            between = f"nodes {one} and {other} can't connect to each other"
        remedy = "open all TCP ports between them in firewalls, and check their routes"
        if error and not (both and other < one):
            faults.append(Fault("connections", f"{between} ({error}); {remedy}"))
    return faults


def bandwidth_faults(rates: Mapping[tuple[str, str], float], needs: Needs) -> list[Fault]:
    """Faults of the bandwidth between pairs of nodes, in bytes/s."""
    faults = []
    for (one, other), rate in rates.items():
        duration, slow = needs.published / max(rate, 1.0), ""
        if duration > PUBLISH_LIMIT_S:
            slow = f", so a publish takes {duration:.0f} s, and the limit is {PUBLISH_LIMIT_S:g} s; use a faster "
            slow += 'network, or sync.link = "lora"'
        elif rate < MIN_BANDWIDTH:
            slow = f", less than {8 * MIN_BANDWIDTH / GB:g}; check cables, switches and network interfaces"
        if slow:
            faults.append(Fault("bandwidth", f"nodes {one} and {other}: {8 * rate / GB:.2f} Gbit/s{slow}"))
    return faults


def several(names: Sequence[str], word: str = "node") -> str:
    """The names in a sentence, at most four of them."""
    shown = list(names[:4]) + ([f"{len(names) - 4} more"] if len(names) > 4 else [])
    text = " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))
    return f"{word}{'s' * (len(names) > 1)} {text}" if word else text
