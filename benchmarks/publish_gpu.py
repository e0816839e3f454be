"""The cost of a publish for sequences in flight on GPUs: vLLM on one, the trainer on the other, 256 sequences decoding.

    python benchmarks/publish_gpu.py nccl nccl_direct [--shape 1.7B] [--publishes 10] [--json FILE] [config flags]
    python benchmarks/publish_gpu.py lora --engines 2          # each with 256 sequences and a GPU of its own
    python benchmarks/publish_gpu.py lora --engines 2 --memory 0.4 --trainer.device=cuda:1   # on the second engine's
    python benchmarks/publish_gpu.py lora --shape 11M --sequences 4 --memory 0.3             # on a CPU

Links run one after the other in the same run, each in an engine of its own. Before each publish a share of the weights'
elements changes, at random positions. The gap is the time between two consecutive tokens of all sequences, measured at
their arrival. The pause of a publish is the largest gap from its start to a quarter of a second after its end, less the
median gap of the second before it. Sending is the duration of the trainer's call; the transfer begins when both sides
take part. An engine is ready when it samples by the new weights. With several engines, `ready` is the time of the last
one, and gaps are those of the engine with the longest pause. A publish ends after the comparison of checksums. Other
flags are options of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from work import conditions, save_model

from slipstream.config.loading import load_config
from slipstream.config.schema import Config
from slipstream.controller.launch import WORKER_CLASSES, Cluster
from slipstream.generators.pool import GeneratorPool
from slipstream.generators.vllm.engine import VllmWorker
from slipstream.rollout import Sampling
from slipstream.runtime.worker import handle
from slipstream.sync.link import PublishHandle
from slipstream.trainers.trainer_worker import PytorchTrainerWorker

MORE = {"single_copy": ["--generator.gpu_memory_utilization=0.4"], "lora": ["--lora.rank=32", "--loop.max_lag=4"]}
TOKENS, QUIET, AFTER = 3000, 1.0, 0.25  # of a completion; seconds before and after a publish


class TimedEngine(VllmWorker):
    """Records the end of each step of the engine, and the start of the last receive."""

    receiving = 0.0

    async def prepare(self, handle: PublishHandle) -> str:
        self.receiving = time.monotonic()
        return await super().prepare(handle)

    async def began_to_receive(self) -> float:
        return self.receiving

    def _load(self) -> Any:
        engine, opened = super()._load()
        self._ends: list[float] = []
        step = engine.step

        def timed() -> Any:
            found = step()
            self._ends.append(time.perf_counter())
            return found

        engine.step = timed  # type: ignore[method-assign]
        return engine, opened

    async def ends(self) -> list[float]:
        ends, self._ends = self._ends, []
        return ends


class MeasuredTrainer(PytorchTrainerWorker):
    """Records the time of the last send. Reports its GPU memory in addition to the float32 masters."""

    sent = (0.0, 0.0)

    async def send(self, handle: PublishHandle) -> PublishHandle | None:
        began = time.monotonic()
        sizes = await super().send(handle)
        self.sent = began, time.monotonic()
        return sizes

    async def last_sent(self) -> tuple[float, float]:
        return self.sent

    async def change(self, share: float) -> None:
        self._trainer.before_update()
        for parameter in self._trainer.parameters.values():
            places = torch.randint(parameter.numel(), (int(share * parameter.numel()),), device=parameter.device)
            parameter.data.view(-1)[places] *= 1 + 2**-6  # at least two steps of bfloat16
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    async def beside_masters(self) -> int:
        masters = sum(p.numel() * p.element_size() for p in self._trainer.parameters.values())
        return torch.cuda.memory_allocated() - masters


def configure(model: Path, link: str, options: argparse.Namespace, flags: list[str]) -> Config:
    return load_config(None, [
        f"--model.path={model}", "--model.dtype=bfloat16", "--environment.name=addition", f"--sync.link={link}",
        "--generator.engine=vllm", f"--generator.max_num_seqs={options.sequences}",
        f"--generator.replicas={options.engines}", f"--generator.gpu_memory_utilization={options.memory}",
        "--generator.max_model_len=4096", *MORE.get(link, []), *flags,
    ])  # fmt: skip


async def measure(
    model: Path, folder: Path, link: str, options: argparse.Namespace, flags: list[str]
) -> dict[str, Any]:
    config, publishes = configure(model, link, options, flags), options.publishes
    WORKER_CLASSES.update(vllm="publish_gpu:TimedEngine", pytorch="publish_gpu:MeasuredTrainer")
    began = time.perf_counter()
    pools = await Cluster.start(config, folder)
    try:
        await pools.link.connect(0)
        started = time.perf_counter() - began
        print(f"{link}: started in {started:.0f} s", file=sys.stderr)
        trainer = handle(MeasuredTrainer, pools.trainer_process)
        beside = await trainer.beside_masters()
        sampling = Sampling(max_tokens=TOKENS)
        count = options.sequences * options.engines
        running = [asyncio.ensure_future(decode(pools.generator, [1, 2, 3, i + 4], sampling)) for i in range(count)]
        await asyncio.sleep(4)
        engines = [handle(TimedEngine, generator.process) for generator in pools.generator.generators]
        rows = []
        for version in range(1, publishes + 1):
            await trainer.change(options.changed)
            await asyncio.gather(*(engine.ends() for engine in engines))
            await asyncio.sleep(QUIET)
            start = time.perf_counter()
            stats = await pools.link.publish(version)
            end = time.perf_counter()
            await asyncio.sleep(AFTER)
            began, ended = await trainer.last_sent()
            both = max([began, *[await engine.began_to_receive() for engine in engines]])  # a host has one clock
            each = [
                describe(await engine.ends(), options.sequences, start, end, stats, (both, ended)) for engine in engines
            ]
            rows.append(max(each, key=lambda row: row["pause_ms"]))
        for task in running:
            if task.done():  # a request failed
                task.result()
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    finally:
        await pools.close()
    size = sum(p.stat().st_size for p in model.glob("*.safetensors"))  # of all weights, in the published format
    found = {name: statistics.median(row[name] for row in rows if name in row) for name in rows[-1]}
    if found["transfer_ms"] > 0:  # else generators fetch the version themselves
        found["transfer_gb_per_s"] = size / found["transfer_ms"] / 1e6
    described = {
        "link": link,
        "engines": options.engines,
        "bytes": size,
        "engine_gib": weights_of_engine(folder / "logs" / "generator_0.log"),
    }
    described |= {"trainer_bytes_beside_masters": beside, "start_s": started}
    return {**described, "publishes": publishes, **found, "each": rows}


async def decode(generator: GeneratorPool, prompt: list[int], sampling: Sampling) -> None:
    """Sample one completion after another: a slow link takes longer than the longest one."""
    while True:
        await generator.generate(prompt, sampling)


def weights_of_engine(log: Path) -> float | None:
    """GiB of GPU memory for the model, if vLLM logs it."""
    found = re.search(r"Model loading took ([\d.]+) GiB", log.read_text())
    return float(found[1]) if found else None


def describe(
    ends: list[float], sequences: int, start: float, end: float, stats: Any, transfer: tuple[float, float]
) -> dict[str, float]:
    """Metrics of one publish, from the ends of steps and from start and end of the transfer."""
    gaps = [(b, 1000 * (b - a)) for a, b in itertools.pairwise(ends)]
    quiet = [gap for at, gap in gaps if at < start]
    near = [gap for at, gap in gaps if start <= at <= end + AFTER]
    during = [gap for at, gap in gaps if start <= at <= end]
    usual = statistics.median(quiet)
    return {
        "usual_gap_ms": usual,
        "longest_usual_gap_ms": max(quiet),
        "largest_gap_ms": max(near),
        "pause_ms": max(near) - usual,
        "sending_ms": 1000 * stats.sending,
        "ready_ms": 1000 * stats.ready,
        "publish_ms": 1000 * stats.total,
        "tokens_per_s": sequences * len(quiet) / (sum(quiet) / 1000),
        # Tokens during the publish, as a share of the usual rate.
        "speed_during": usual * len(during) / max(1000 * (end - start), usual),
        "transfer_ms": max(0.0, 1000 * (transfer[1] - transfer[0])),
        **({"speed_in_transfer": usual * rate(ends, *transfer) / 1000} if transfer[0] < transfer[1] else {}),
    }


def rate(ends: list[float], start: float, end: float) -> float:
    """Steps a second between two times; a step that is partly in between counts by its share."""
    return sum(max(0.0, min(b, end) - max(a, start)) / (b - a) for a, b in itertools.pairwise(ends)) / (end - start)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("links", nargs="+")
    found.add_argument("--shape", default="1.7B")
    found.add_argument("--publishes", type=int, default=10)
    found.add_argument("--changed", type=float, default=0.02)
    found.add_argument("--engines", type=int, default=1)
    found.add_argument("--sequences", type=int, default=256, help="of each engine")
    found.add_argument("--memory", type=float, default=0.8)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options, flags = parser().parse_known_args()
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"  # to log the memory of the model
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        save_model(options.shape, model, torch.bfloat16)
        torch.cuda.empty_cache()
        results = []
        for link in options.links:
            results.append(asyncio.run(measure(model, Path(temporary) / link, link, options, flags)))
            print(json.dumps({k: v for k, v in results[-1].items() if k != "each"}), flush=True)
            if options.json:
                options.json.write_text(json.dumps({**conditions(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
