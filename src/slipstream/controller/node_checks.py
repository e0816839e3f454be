"""Checks of the nodes and servers of a run: collects reports, tries the network between them, and finds faults."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from safetensors import safe_open

from slipstream.config.loading import absolute_path
from slipstream.config.schema import Config, ConfigError
from slipstream.controller.node_faults import (
    MIN_BANDWIDTH,
    Fault,
    Needs,
    bandwidth_faults,
    connection_faults,
    find_faults,
    several,
)
from slipstream.controller.node_worker import TOKEN, NodeReport, NodeWorker, versions
from slipstream.environments.load import LIBRARIES
from slipstream.errors import RunError, UserError
from slipstream.generators.vllm.server_client import RequestFailed, ServerClient, inspect_server
from slipstream.generators.vllm.worker_methods import WorkerMethods
from slipstream.model.device import dtype_name
from slipstream.runtime.addresses import link_environment, private_store
from slipstream.runtime.placement import VISIBLE, Network, place, resolve_auto
from slipstream.runtime.runtime import Node, Runtime, current_runtime
from slipstream.runtime.worker import describe_death
from slipstream.runtime.worker_process import WorkerProcess

WORKER = "slipstream.controller.node_worker:NodeWorker"
REPORT_TIMEOUT_S, IMPORT_TIMEOUT_S, NETWORK_TIMEOUT_S = 45.0, 90.0, 30.0
ALL_REDUCE_TIMEOUT_S = 60.0  # of the start of its ranks, the all-reduce, and the search for the pairs
GROUP_S, PAIR_S = 15.0, (1.5, 5.0)  # of all ranks together, and the least and most of a pair
# A timeout raises an exception instead of ending the process, and GPUs have the numbers of nvidia-smi.
NCCL = {"TORCH_NCCL_BLOCKING_WAIT": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
CHECKPOINT_BYTES = 12  # of a parameter: float32 weights and both moments of AdamW

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass
class Examination:
    """What was found on the nodes. `skipped` has the reason by check."""

    reports: list[NodeReport] = field(default_factory=list)
    bandwidth: dict[tuple[str, str], float] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    servers: dict[str, float] = field(default_factory=dict)  # bytes/s from the trainer's node, by URL
    link: str = ""  # that `sync.link = "auto"` means, and why

    def add(self, check: str, text: str) -> None:
        self.faults.append(Fault(check, text))


async def check_nodes(config: Config, directory: Path) -> None:
    """Check the nodes of a run on Ray before it starts workers. Raises `RunError` with a line for each fault.

    Too little bandwidth between hosts is a fault. If `measure_network` has measured it, that result is used once; else
    it is measured here.
    """
    runtime = current_runtime()
    measured, runtime.bandwidth = runtime.bandwidth, {}
    found = await examine(runtime, config, directory.absolute(), all_nodes=False, bandwidth=measured)
    if found.faults:
        lines = "\n".join(f"{fault.check}: {fault.text}" for fault in found.faults)
        raise RunError(f"the nodes of the run have faults; `slipstream doctor` checks them again:\n{lines}")


async def measure_network(runtime: Runtime, config: Config) -> Network:
    """The network between the hosts that answer, for the run's link. `check_nodes` reports the others."""
    found = Examination()
    hosts = {node.address: node for node in runtime.nodes()}.values()
    if len(hosts) < 2:
        return Network()
    async with _workers({node: _process(node, config) for node in hosts}, REPORT_TIMEOUT_S) as (workers, _):
        await _try_network(workers, Needs(), found)
        runtime.bandwidth = found.bandwidth
        return await _network(workers, found)


async def _network(workers: Mapping[Node, NodeWorker], found: Examination) -> Network:
    devices, _ = await gather({node: worker.has_rdma() for node, worker in workers.items()}, NETWORK_TIMEOUT_S)
    rdma = len(devices) == len(workers) > 1 and all(devices.values())
    return Network(min(found.bandwidth.values(), default=0.0), rdma)


async def examine(
    runtime: Runtime, config: Config | None, directory: Path, *, all_nodes: bool = True,
    elsewhere: Mapping[str, Path] | None = None, bandwidth: Mapping[tuple[str, str], float] | None = None,
) -> Examination:  # fmt: skip
    """Check all nodes of the runtime, for a run in this directory or for any run.

    The network is tried between all nodes, or between hosts with different addresses. `elsewhere` has the directory of
    nodes by name, for tests. `bandwidth` is measured unless it is given. Each wait has a limit: a node that does not
    answer is a fault.
    """
    found = Examination(bandwidth=dict(bandwidth or {}))
    needs = await asyncio.to_thread(_needs, runtime, config, directory, found)
    processes = {node: _process(node, config) for node in runtime.nodes()}
    async with _workers(processes, REPORT_TIMEOUT_S) as (workers, failed):
        silent = await _collect(workers, config, directory, elsewhere or {}, found)
        for node, why in (failed | silent).items():
            remedy = "see `ray status` and the raylet's log there, or remove the node"
            found.add("nodes", f"node {node.name} {why}; {remedy}")
        found.faults += find_faults(found.reports, needs)
        hosts = {node: worker for node, worker in workers.items() if node not in silent}
        await _try_imports(hosts, config, found)
        if all_nodes and hosts and config and config.generator.servers:
            found.servers, faults = await try_servers(next(iter(hosts.values())), config)
            found.faults += faults
        if not all_nodes:
            first = {node.address: node for node in reversed(hosts)}.values()
            hosts = {node: worker for node, worker in hosts.items() if node in first}
        if hosts and (all_nodes or len(hosts) > 1):
            await _try_network(hosts, needs, found)
            if config and config.sync.link == "auto" and not found.faults:
                network = await _network(hosts, found)
                found.link = resolve_auto(config, runtime.gpus, runtime.hosts, network).sync.chosen
            await _try_all_reduce([*hosts], runtime, config, found)
    return found


def _needs(runtime: Runtime, config: Config | None, directory: Path, found: Examination) -> Needs:
    """What the run needs. GPUs that it can't be placed on are a fault."""
    needs = Needs(str(directory), versions=versions(), ray=runtime.kind == "ray")
    if not config:
        return needs
    try:
        config = resolve_auto(config, runtime.gpus, runtime.hosts)
        placement = place(config, runtime.gpus)
    except ConfigError as error:
        found.add("GPUs", str(error))
        return needs
    values = _parameters(Path(config.model.path))
    weights = values * (4 if dtype_name(config, runtime.gpus) == "float32" else 2)
    trained, link = 0 if config.lora.rank else values, config.sync.link
    return replace(
        needs, gpus=len({gpu for gpus in (*placement.generators, placement.trainer) for gpu in gpus}),
        gpus_together=max(map(len, placement.generators), default=0),
        engine_size=config.generator.engine_size,
        disk=(config.checkpoint.keep + 1) * CHECKPOINT_BYTES * trained + weights,
        memory=2 * weights if link == "shared" else 0, published=weights if link.startswith("nccl") else 0,
        vllm=config.generator.engine == "vllm" and not config.generator.servers,
    )  # fmt: skip


def _parameters(path: Path) -> int:
    """Number of values in the safetensors files of a model's directory; 0 for a Hub name."""
    count = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            count += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return count


async def _collect(
    workers: Mapping[Node, NodeWorker], config: Config | None, directory: Path, elsewhere: Mapping[str, Path],
    found: Examination,
) -> dict[Node, str]:  # fmt: skip
    """Fill in the reports. Returns why others are missing."""
    folder = directory / f".doctor-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        written = (folder / TOKEN).write_text(TOKEN) > 0
    except OSError as error:
        written = False
        found.add("run directory", f"{directory} can't be written ({error.strerror}); name another")
    try:
        places = {node: str(elsewhere.get(node.name, directory)) for node in workers}
        calls = {n: w.report(n.name, n.gpus, places[n], folder.name, config) for n, w in workers.items()}
        reports, failed = await gather(calls, REPORT_TIMEOUT_S)
        for node, report in reports.items():
            where = report.directory if written else ""  # else there is a fault already
            if written and not where and not (folder / node.name).exists():
                where = "is another directory there"
            found.reports.append(replace(report, directory=where))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return failed


async def _try_imports(workers: Mapping[Node, NodeWorker], config: Config | None, found: Examination) -> None:
    """Load the user's own classes that options name."""
    if not config:
        return
    names = [each.name for each in config.each_environment]
    named = [("environment.name", LIBRARIES.get(name.partition(":")[0], name)) for name in names]
    named.append(("trainer.kind", config.trainer.kind))
    named.append(("generator.engine", config.generator.engine))
    plugins = [(option, absolute_path(reference)) for option, reference in named if ":" in reference]
    loading = {(node.name, *plugin): worker.load(plugin[1]) for node, worker in workers.items() for plugin in plugins}
    errors, late = await gather(loading, IMPORT_TIMEOUT_S)
    for (name, option, reference), why in (errors | late).items():
        if why:
            found.add("imports", f"node {name}: {option} = {reference!r} can't be loaded: {why}")


async def _try_network(workers: Mapping[Node, NodeWorker], needs: Needs, found: Examination) -> None:
    """Try connections between all nodes, or of one with itself, then the bandwidth of each pair if one is unknown."""
    peers, failed = await gather({n: worker.listen(n.address) for n, worker in workers.items()}, NETWORK_TIMEOUT_S)
    pairs = [(one, other) for one in peers for other in peers if one != other or len(workers) == 1]
    tries = {(one, other): workers[one].connect(peers[other]) for one, other in pairs}
    errors, silent = await gather(tries, NETWORK_TIMEOUT_S)
    found.faults += connection_faults({(one.name, other.name): why for (one, other), why in errors.items()})
    for node, why in (failed | {one: why for (one, _), why in silent.items()}).items():
        found.add("connections", f"node {node.name} {why}; check its network")
    if len(found.bandwidth) < math.comb(len(workers), 2):
        connected = {pair for pair, why in errors.items() if why == ""}
        await _measure_bandwidth(workers, peers, connected, found)
    found.faults += bandwidth_faults(found.bandwidth, needs)


async def _measure_bandwidth(
    workers: Mapping[Node, NodeWorker], peers: Mapping[Node, tuple[str, int]], connected: Container[tuple[Node, Node]],
    found: Examination,
) -> None:  # fmt: skip
    """Measure the bandwidth of each pair. A broken stream is a fault of pairs that are `connected`."""
    rates, broken = await in_rounds([*peers], lambda a, b: workers[a].measure_bandwidth(peers[b]), NETWORK_TIMEOUT_S)
    found.bandwidth = {(a.name, b.name): rate for (a, b), rate in rates.items()}
    for (a, b), why in broken.items():
        if (a, b) in connected:
            text = f"node {a.name} can't send to node {b.name}: the stream {why}; check MTU and routes"
            found.add("bandwidth", text)


async def _try_all_reduce(nodes: Sequence[Node], runtime: Runtime, config: Config | None, found: Examination) -> None:
    """An all-reduce with one rank on each node, or with all ranks of the trainer on the only one."""
    each = 1 if len(nodes) > 1 or not config else config.trainer.ranks
    unreachable = any(fault.check == "connections" for fault in found.faults)
    if unreachable or len(nodes) * each == 1:
        found.skipped["all-reduce"] = "not all nodes can be reached" if unreachable else "one rank"
        return
    gpus = {report.node: sorted(report.gpus, key=lambda gpu: -gpu.free) for report in found.reports}
    on_gpus = all(len(gpus[n.name]) >= each for n in nodes) and not (config and config.trainer.device == "cpu")
    ranks = [(n, str(gpus[n.name][i].index) if on_gpus else "") for n in nodes for i in range(each)]
    processes = {i: _process(node, config, NCCL | {VISIBLE: gpu}) for i, (node, gpu) in enumerate(ranks)}
    store, backend = private_store(runtime.address), "nccl" if on_gpus else "gloo"
    error, pairs = await all_reduce(processes, f"{runtime.address}:{store.port}", "cuda" if on_gpus else "cpu")
    names = [f"nodes {ranks[a][0].name} and {ranks[b][0].name}" for a, b in sorted(pairs)]
    remedy = f"set {backend.upper()}_SOCKET_IFNAME on both to the interface of their common network, and open its ports"
    for where in dict.fromkeys(names or [several([node.name for node in nodes])]) if error else ():
        found.add("all-reduce", f"the all-reduce ({backend}) fails on {where}: {error}; {remedy}")


async def all_reduce(
    processes: Mapping[int, WorkerProcess], store: str, device: str
) -> tuple[str, list[tuple[int, int]]]:
    """An all-reduce of ranks that meet in a store at "host:port". Returns the error, and the pairs that can't talk."""
    last, limit = time.monotonic() + ALL_REDUCE_TIMEOUT_S, GROUP_S
    async with _workers(processes, ALL_REDUCE_TIMEOUT_S - GROUP_S) as (ranks, missing):

        def reduce(*members: int) -> Awaitable[Any]:
            group = store, device, str(members), len(members), limit - 0.5
            return asyncio.gather(*(ranks[rank].all_reduce(*group, i) for i, rank in enumerate(members)))

        importing = {rank: worker.load("torch:tensor") for rank, worker in ranks.items()}
        await gather(importing, last - time.monotonic() - GROUP_S)
        failed = missing or (await gather({0: reduce(*ranks)}, limit))[1]
        limit = min(PAIR_S[1], max(PAIR_S[0], (last - time.monotonic()) / len(processes)))
        pairs = (await in_rounds([*ranks], reduce, limit, last))[1] if failed and not missing else {}
        return next(iter(failed.values()), ""), [*pairs]


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of `count` ranks in rounds in which each rank has at most one partner (the circle method)."""
    ranks = [*range(count), *([-1] if count % 2 else [])]
    for _ in range(len(ranks) - 1):
        half = zip(ranks[: len(ranks) // 2], reversed(ranks), strict=False)
        yield [(min(pair), max(pair)) for pair in half if -1 not in pair]
        ranks.insert(1, ranks.pop())


async def in_rounds(
    items: Sequence[K], call: Callable[[K, K], Awaitable[T]], limit: float, last: float = math.inf
) -> tuple[dict[tuple[K, K], T], dict[tuple[K, K], str]]:
    """As `gather`, for all pairs of items, round by round. No round begins after the time `last`."""
    results: dict[tuple[K, K], T] = {}
    failed: dict[tuple[K, K], str] = {}
    for pairs in rounds(len(items)):
        if time.monotonic() < last:
            calls = {(items[i], items[j]): call(items[i], items[j]) for i, j in pairs}
            found, errors = await gather(calls, limit)
            results, failed = results | found, failed | errors
    return results, failed


async def try_servers(trainer: NodeWorker, config: Config) -> tuple[dict[str, float], list[Fault]]:
    """Bytes per second from the worker on the trainer's node to each of `generator.servers`, and the faults."""
    results = [await _try_server(url, trainer, config) for url in config.generator.servers]  # one stream at a time
    rates = {url: rate for url, rate in zip(config.generator.servers, results, strict=True) if isinstance(rate, float)}
    return rates, [Fault("servers", found) for found in results if isinstance(found, str)]


async def _try_server(url: str, trainer: NodeWorker, config: Config) -> float | str:
    """The rate, or the fault."""
    client = ServerClient(url)
    try:
        client.open()
        await inspect_server(client, config)
        peer = await trainer.serve_streams(urlsplit(url).hostname or "")
        rates = await client.call_workers("be reached", None, WorkerMethods.slipstream_receive_stream, *peer)
    except ConfigError as error:
        return str(error)
    except UserError as error:
        return f"{client.name}: the trainer's node can't send to it: {error}"
    except RequestFailed as failure:
        return f"{failure}; open the ports of this host for it, or name another network as sync.interface"
    finally:
        await client.close()
    if min(rates) < MIN_BANDWIDTH:
        return f"{client.name} receives {8e-6 * min(rates):.1f} Mbit/s from the trainer's node; check its network"
    return min(rates)


def _process(node: Node, config: Config | None, environment: Mapping[str, str] | None = None) -> WorkerProcess:
    """A process on the network of the run's link."""
    try:
        network = link_environment(config) if config else {}
    except ConfigError:  # a server of the user that can't be reached, which `try_servers` reports
        network = {}
    return WorkerProcess("its process", launcher=node.launcher, environment={**network, **(environment or {})})


@asynccontextmanager
async def _workers(
    processes: Mapping[K, WorkerProcess], limit: float
) -> AsyncIterator[tuple[dict[K, NodeWorker], dict[K, str]]]:
    """Start workers. Returns them, and why others did not start. They end with the context."""
    try:
        yield await gather({key: process.start(NodeWorker, WORKER) for key, process in processes.items()}, limit)
    finally:
        for process in processes.values():
            process.kill()
        await asyncio.gather(*(process.stop(grace=0.0) for process in processes.values()))


async def gather(calls: Mapping[K, Awaitable[T]], limit: float) -> tuple[dict[K, T], dict[K, str]]:
    """Results of the calls by their keys, and a message for each call without a result after `limit` seconds."""
    tasks = {key: asyncio.ensure_future(call) for key, call in calls.items()}
    results: dict[K, T] = {}
    failed: dict[K, str] = {}
    if tasks:
        await asyncio.wait(tasks.values(), timeout=limit)
    for key, task in tasks.items():
        if not task.done():
            task.cancel()
            failed[key] = f"did not answer within {limit:g} s"
        elif isinstance(error := task.exception(), UserError):
            failed[key] = f"failed: {describe_death(error)[:300]}"
        else:
            results[key] = task.result()
    return results, failed
