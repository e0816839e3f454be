"""Publishes under faults: each sampled token must come from a published version, and engines must come back.

    python benchmarks/publish_faults.py [--faults 1000] [--seed 0] [--links Delta Checkpoint Shared Nccl Lora]
        [--kinds KIND ...] [--json benchmarks/results/publish_faults.json]

Three embedded engines decode all the time, each a process, while a trainer process publishes tiny float32 models of
which 2% of the values change. Faults are injected at random moments of publishes, with a fixed seed: an engine is
killed (-9) or stopped for up to 0.5 s; a byte of a transfer is flipped, its connection cut or slowed down (by a proxy
between engines and trainer); a byte of a served tensor is flipped during or after the swap; an engine claims another
base than it has, or has no memory for a version; two publishes overlap; the clocks of an engine and of this process are
set back by an hour; the trainer is killed, and its successor publishes the next version. An engine that died is
replaced, and joins while further versions are published; the next fault waits until it has joined. `Lora` publishes
adapters to two vLLM engines, which fetch them through the proxy. `Handover` is colocated placement: the trainer writes
into the served weights of engines, which sleep in the first half of the publishes and only pause in the second.

Every completion is checked in this process against the values that the trainer had for the version that each span
names: the log-probability of each token must be the same. A fault has ended when every engine serves the newest
version; `back_s` is the time from the fault until then. `told_apart` is the fraction of spans that the version
before, too, was compared with, and did not explain.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import torch
from work import SHAPES, conditions, save_model

import slipstream
from slipstream.config.schema import Config
from slipstream.controller.launch import Cluster
from slipstream.generators.pool import EngineReplica
from slipstream.model.inspection import trained_parameters
from slipstream.model.loading import load_model
from slipstream.rollout import Completion, Sampling
from slipstream.runtime.worker import WorkerDied, WorkerError, handle
from slipstream.sync import update
from slipstream.sync.checkpoint import CheckpointReceiver, CheckpointSender
from slipstream.sync.delta import DeltaReceiver, DeltaSender
from slipstream.sync.nccl import NcclReceiver, NcclSender
from slipstream.sync.shared import SharedReceiver, SharedSender
from slipstream.tools.verify import PerturbingTrainer

ORDERS = "SLIPSTREAM_FAULTS"  # environment variable: a directory with a file for each fault that an engine is to make
CLIENTS, TOKENS, TOLERANCE = 6, 24, 1e-3
LIMIT_S = 60.0
MODELS = {"Lora": "1M"}  # "tiny" has heads of 8 dimensions, which vLLM does not take on a CPU
# Weights of the kinds of faults.
COMMON = {"kill": 1, "stop": 12, "overlap": 12, "flip after swap": 1, "clock set back": 4, "kill trainer": 1}
WIRE = {"flip on the wire": 12, "cut": 12, "slow": 4}
KINDS = {
    "Delta": COMMON | {"stop": 8, "overlap": 8} | WIRE | {"wrong base": 8, "flip during swap": 8, "no memory": 8},
    "Checkpoint": COMMON, "Shared": COMMON, "Nccl": COMMON,
    "Lora": WIRE | {"kill": 1, "stop": 8, "overlap": 8},
    "Handover": {"kill": 8, "stop": 8, "overlap": 8},
}  # fmt: skip
BY_ENGINES = ("wrong base", "flip after swap", "flip during swap", "no memory", "clock set back")
SHARES = {"Delta": 0.6, "Checkpoint": 0.135, "Shared": 0.135, "Nccl": 0.03, "Lora": 0.1, "Handover": 0.1}


def take(order: str) -> bool:
    """Whether this process is to make a fault now. True once for each order."""
    path = Path(os.environ.get(ORDERS, "/nonexistent")) / f"{order}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        return True
    return False


def swap_with_flip(changed: Any, swap: Any = update._Changed.swap) -> Any:
    has, expected = swap(changed)
    if len(changed._indices) and take("flip during swap"):
        changed._served[changed._indices[0]] ^= 1
        has = changed._served[changed._indices]
    return has, expected


update._Changed.swap = swap_with_flip  # type: ignore[method-assign]


def add_without_memory(staged: Any, decoded: Any, add: Any = update.Update.add) -> None:
    if take("no memory"):
        raise MemoryError("no memory is left")
    add(staged, decoded)


update.Update.add = add_without_memory  # type: ignore[method-assign]


def set_clock_back() -> None:
    """Let `time.time` return an hour less from now on, in this process."""
    time.time = lambda now=time.time: now() - 3600.0  # type: ignore[assignment]


def faulty(base: Any) -> Any:
    """A receiver that makes the faults which are ordered."""

    class Faulty(base):
        def attach(self, shards: Mapping[str, Any]) -> None:
            self._all = shards
            super().attach(shards)

        def prepare(self, published: Any) -> Any:
            if (getattr(self, "_held", 0) or 0) > 1 and take("wrong base"):
                self._held -= 1
            if take("clock set back"):
                set_clock_back()
            return super().prepare(published)

        def swapped(self) -> None:
            super().swapped()
            if take("flip after swap"):
                tensor = next(shard.tensor for name, shard in self._all.items() if name == "model.norm.weight")
                if base is SharedReceiver:  # other processes have this memory, too
                    tensor.data = tensor.detach().clone()
                tensor.detach().view(torch.int32)[3] ^= 1 << 23

    return Faulty


class Delta:
    Sender, Receiver = DeltaSender, faulty(DeltaReceiver)


class Checkpoint:
    Sender, Receiver = CheckpointSender, faulty(CheckpointReceiver)


class Shared:
    Sender, Receiver = SharedSender, faulty(SharedReceiver)


class Nccl:
    Sender, Receiver = NcclSender, faulty(NcclReceiver)


class Trainer(PerturbingTrainer):
    """Changes 2% of the values of each matrix, and all of each vector and adapter."""

    def _noise(self, seed: int, strength: float) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for noise in super()._noise(seed, strength):
            sparse = noise.ndim > 1 and not self._config.lora.rank
            kept = torch.rand(noise.shape, generator=generator) < (0.02 if sparse else 1.0)
            yield noise * kept

    async def values(self) -> dict[str, bytes]:
        """The values of each parameter, in float32."""
        return {n: p.detach().contiguous().numpy().tobytes() for n, p in self._trainer.parameters.items()}


class Proxy:
    """Passes connections to the trainer on. `fault` is made in the next one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self.fault = rng, ""

    async def open(self, target: tuple[str, int]) -> tuple[str, int]:
        """The address of a server that passes connections on to the target."""
        self._target = target
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        address: tuple[str, int] = server.sockets[0].getsockname()
        return address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault, self.fault = self.fault, ""
        with contextlib.suppress(OSError):
            inner, outer = await asyncio.open_connection(*self._target)
            place = self._rng.randrange(40, 4000)
            copies = [asyncio.ensure_future(self._copy(reader, outer, "", 0)),
                      asyncio.ensure_future(self._copy(inner, writer, fault, place))]  # fmt: skip
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            for end in (writer, outer):
                end.close()

    async def _copy(self, source: asyncio.StreamReader, into: asyncio.StreamWriter, fault: str, place: int) -> None:
        """Copy until the end, with the fault at byte `place`, or in the last data before it."""
        at = 0
        with contextlib.suppress(OSError):
            while data := bytearray(await source.read(1000 if fault == "slow" else 65536)):
                if fault == "slow":
                    await asyncio.sleep(0.1)
                if fault in ("cut", "flip on the wire") and (at + len(data) > place or at > 40):
                    here = min(max(0, place - at), len(data) - 1)
                    if fault == "cut":
                        into.write(data[:here])
                        return
                    data[here] ^= 1 << self._rng.randrange(8)
                    fault = ""
                at += len(data)
                into.write(data)
                await into.drain()


class ThroughProxy:
    """The trainer, whose connection information or, by `lora`, publish handles name the proxy."""

    def __init__(self, trainer: Any, proxy: Proxy) -> None:
        self._trainer, self._proxy = trainer, proxy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    async def open_link(self, receivers: int) -> Any:
        info = await self._trainer.open_link(receivers)
        if "address" in info:
            info["address"] = await self._proxy.open(tuple(info["address"]))
        return info

    async def stage(self, version: int) -> Any:
        handle = await self._trainer.stage(version)
        if "server" in handle:
            handle["server"] = await self._proxy.open(tuple(handle["server"]))
        return handle


class Oracle:
    """A model of this process with the values of any version that was published."""

    def __init__(self, config: Config) -> None:
        self._model = load_model(config.model, config.lora, device=torch.device("cpu"), dtype=torch.float32)
        self._parameters = trained_parameters(self._model)
        self.values: dict[int, dict[str, bytes]] = {}
        self.tokens = self.wrong = self.spans = self.told_apart = 0

    @torch.no_grad()
    def _differs(self, completion: Completion, version: int, start: int, end: int) -> bool:
        for name, parameter in self._parameters.items():
            found = torch.frombuffer(bytearray(self.values[version][name]), dtype=torch.float32)
            parameter.copy_(found.view(parameter.shape))
        prompt = len(completion.prompt_ids)
        ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids[:end]]])
        found = self._model(ids).logits[0].float().log_softmax(-1)[prompt + start - 1 : prompt + end - 1]
        chosen = found.gather(1, ids[0, prompt + start :, None])[:, 0]
        return bool(((chosen - torch.tensor([*completion.logprobs[start:end]])).abs() > TOLERANCE).any())

    def check(self, completion: Completion) -> None:
        for span in completion.spans:
            tokens = span.end - span.start
            if not tokens:
                continue
            unpublished = span.version not in self.values
            if unpublished or self._differs(completion, span.version, span.start, span.end):
                self.wrong += tokens
                print(f"{tokens} tokens are not of version {span.version}", file=sys.stderr)
            self.tokens += tokens
            if span.version and not unpublished and self.spans % 10 == 0:
                self.told_apart += self._differs(completion, span.version - 1, span.start, span.end)
            self.spans += 1


class Faults:
    """The faults of one link."""

    def __init__(self, link: str, cluster: Cluster, config: Config, rng: random.Random, orders: Path) -> None:
        self._link, self._cluster, self._config, self._rng, self._orders = link, cluster, config, rng, orders
        self._proxy, self._oracle, self.version = Proxy(rng), Oracle(config), 0
        self._use_trainer()
        self._replacing: set[EngineReplica] = set()
        self._changing = asyncio.Lock()  # of the weights, which a publish may be reading
        self.replaced, self.failed_publishes = 0, 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._turns: Any = cluster._colocation

    def _use_trainer(self) -> None:
        self._trainer: Any = handle(Trainer, self._cluster.trainer_process)
        self._publisher: Any = self._cluster.link
        if self._link in ("Delta", "Lora"):
            self._publisher._trainer = ThroughProxy(self._publisher._trainer, self._proxy)

    async def run(self, kinds: Mapping[str, int], count: int) -> dict[str, Any]:
        self._oracle.values[0] = await self._trainer.values()
        await self._publisher.connect(0)
        self._cluster.generator.supervised = True
        self._tasks = [asyncio.create_task(self._supervise()), *(asyncio.create_task(self._client(i))
                       for i in range(CLIENTS))]  # fmt: skip
        plan = [*kinds, *self._rng.choices([*kinds], [*kinds.values()], k=count)][:count]
        back: dict[str, list[float]] = {kind: [] for kind in kinds}
        for place, kind in enumerate(plan):
            if self._turns and place == count // 2:
                await self._stay_awake()
            back[kind].append(await self._inject(kind))
            for task in self._tasks:
                if task.done():
                    task.result()
        for task in self._tasks:
            task.cancel()
        oracle = self._oracle
        return {
            "link": self._link.lower(), "faults": count, "publishes": self.version, "engines_replaced": self.replaced,
            "tokens": oracle.tokens, "tokens_of_no_published_version": oracle.wrong,
            "told_apart": oracle.told_apart / max(1, -(-oracle.spans // 10)),
            "by_kind": {kind: {"faults": len(times), "back_s": statistics.median(times), "back_s_max": max(times)}
                        for kind, times in back.items() if times},
        }  # fmt: skip

    async def _inject(self, kind: str) -> float:
        """Make one fault during a publish, and wait until it has ended. Returns the seconds."""
        engine = self._rng.choice(self._cluster.generator.running)
        pid, order = engine.process.process.pid, self._orders  # type: ignore[union-attr]
        began, file = time.monotonic(), order / f"{kind}.{pid}"
        if kind in BY_ENGINES:
            file.touch()
        if kind == "clock set back":
            set_clock_back()
        if kind in ("cut", "flip on the wire", "slow"):
            self._proxy.fault = kind
        publishing = asyncio.ensure_future(self._publish())
        if kind in ("kill", "stop"):
            await asyncio.sleep(self._rng.random() * 0.05)
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind == "stop":
                await asyncio.sleep(self._rng.random() * 0.5)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        if kind == "kill trainer":
            await asyncio.sleep(self._rng.random() * 0.05)
            began = time.monotonic()
            await self._kill_trainer(publishing)
        if kind in ("kill", "overlap"):
            await self._publish()
        with contextlib.suppress(WorkerDied, WorkerError) if kind == "kill trainer" else contextlib.nullcontext():
            await publishing
        while not self._all_back() or file.exists() or self._proxy.fault:
            if time.monotonic() - began > LIMIT_S:
                sys.exit(f"{self._link}: after {kind!r} not all engines were back within {LIMIT_S:.0f} s")
            if file.exists() or self._proxy.fault:
                await self._publish()
            await asyncio.sleep(0.005)
        return time.monotonic() - began

    async def _stay_awake(self) -> None:
        """Let colocated engines only pause from now on, as if the trainer's steps fit beside them."""
        async with self._changing:
            await self._trainer.onload()
            self._turns._fits = True

    async def _kill_trainer(self, publishing: asyncio.Future[None]) -> None:
        """Kill the trainer during a publish, and let its successor publish to the engines, which stay."""
        os.kill(self._cluster.trainer_ranks[0].process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        with contextlib.suppress(WorkerDied, WorkerError):
            await publishing
        if not self._cluster.engines_can_stay:
            sys.exit(f"{self._link}: the engines can't connect to another trainer")
        await self._cluster.restart_trainer()
        self._use_trainer()
        self._oracle.values.setdefault(self.version, self._oracle.values[self.version - 1])  # it was not published
        self.version += 1
        await self._trainer.change(self.version, 3.0)
        self._oracle.values[self.version] = await self._trainer.values()
        await self._publisher.connect(self.version)

    def _all_back(self) -> bool:
        engines = self._cluster.generator.generators
        return len(engines) == self._config.generator.replicas and all(
            g.alive and g.quarantined is None and g.version == self.version for g in engines
        )

    async def _publish(self) -> None:
        """Change the weights and publish them. Changes wait for an earlier publish, as a run's steps do."""
        async with self._changing, self._turn():
            self.version += 1
            version, free = self.version, asyncio.Event()
            await self._trainer.change(version, 3.0)
            self._oracle.values[version] = await self._trainer.values()
            self._oracle.values.pop(version - 200, None)
            publishing = asyncio.ensure_future(self._publisher.publish(version, "", free))
            if self._turns:
                await publishing
            freed = asyncio.ensure_future(free.wait())
            await asyncio.wait((publishing, freed), return_when=asyncio.FIRST_COMPLETED)
            freed.cancel()
        await publishing

    def _turn(self) -> AbstractAsyncContextManager[None]:
        """The turn of a colocated trainer."""
        return self._cluster.trainer_turn(publishes=True) if self._turns else contextlib.nullcontext()

    async def _client(self, number: int) -> None:
        rng = random.Random(number)
        while True:
            prompt = [rng.randrange(1, SHAPES["tiny"]["vocab_size"]) for _ in range(4)]
            sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, seed=rng.randrange(2**31))
            with contextlib.suppress(WorkerDied):
                self._oracle.check(await self._cluster.generator.generate(prompt, sampling))

    async def _supervise(self) -> None:
        pool = self._cluster.generator
        while True:
            for engine in [g for g in pool.generators if g.process.dead and g not in self._replacing]:
                self._replacing.add(engine)
                self._tasks.append(asyncio.create_task(self._replace(engine)))
            await asyncio.sleep(0.01)

    async def _replace(self, engine: EngineReplica) -> None:
        self.replaced += 1
        successor, start = engine.create_successor(self._config)
        self._cluster.generator.change(add=[successor], remove=[engine])
        await engine.process.stop(5)
        await start()
        successor.started = True
        await self._publisher.join(successor)
        with contextlib.suppress(WorkerError):
            async with self._turn():
                await self._publisher.publish_again(self.version)


async def measure(
    link: str, kinds: Mapping[str, int], count: int, seed: int, verify: str, scratch: Path
) -> dict[str, Any]:
    orders = scratch / f"orders {link}"
    orders.mkdir()
    os.environ[ORDERS] = str(orders)
    chosen = "--sync.placement=colocated" if link == "Handover" else f"--sync.link={__file__}:{link}"
    engines = [chosen, "--sync.in_flight=recompute", "--generator.replicas=3"]
    if link == "Lora":
        engines = ["--sync.interface=lo",  # as on another host, so that engines fetch adapters
                   "--sync.link=lora", "--sync.in_flight=retry", "--generator.engine=vllm", "--generator.replicas=2",
                   "--lora.rank=4", "--lora.targets=['q_proj', 'v_proj']"]  # fmt: skip
    config = slipstream.load_config(
        None, [f"--model.path={scratch / MODELS.get(link, 'tiny')}", "--environment.name=addition", *engines,
               f"--trainer.kind={__file__}:Trainer", "--generator.threads=1", "--trainer.threads=1",
               f"--sync.verify={verify}", "--loop.max_lag=2", "--trainer.device=cpu", "--generator.device=cpu",
               "--model.dtype=float32"],
    )  # fmt: skip
    cluster = await Cluster.start(config, scratch / link)
    faults = Faults(link, cluster, config, random.Random(seed), orders)
    try:
        began = time.monotonic()
        return await faults.run(kinds, count) | {"seconds": time.monotonic() - began}
    finally:
        for task in faults._tasks:
            task.cancel()
        await cluster.close()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--faults", type=int, default=1000)
    found.add_argument("--links", nargs="+", default=[*SHARES], choices=[*SHARES])
    found.add_argument("--kinds", nargs="+", default=[*COMMON, *KINDS["Delta"]], help="of faults")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--verify", default="full", choices=["full", "sampled", "off"], help="sync.verify")
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options, found = parser().parse_args(), []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        for shape in ("tiny", *MODELS.values()):
            save_model(shape, Path(temporary) / shape)
        for link in options.links:
            count = round(options.faults * SHARES[link])
            kinds = {kind: weight for kind, weight in KINDS[link].items() if kind in options.kinds}
            found.append(asyncio.run(measure(link, kinds, count, options.seed, options.verify, Path(temporary))))
            print(json.dumps(found[-1]), flush=True)
    total = Counter[str]()
    for each in found:
        total.update({key: each[key] for key in ("faults", "tokens", "tokens_of_no_published_version")})
    print(dict(total))
    if options.json:
        options.json.write_text(json.dumps(conditions() | dict(total) | {"links": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
