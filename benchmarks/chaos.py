"""Runs heal: random faults in one run, which has to end by itself with every rollout accounted for.

    python benchmarks/chaos.py [--runtime ray] [--steps 500] [--faults 50] [--seed 0] [--json FILE]
    python benchmarks/chaos.py --steps 10000 --faults 49 --signals SIGKILL        # memory over a long run

A tiny model is trained by two ranks, with two engines, a reward function in worker processes and a teacher. With
`--runtime ray` they are on a cluster of four nodes, all on this host. At random moments a worker is killed with -9 or
stopped with SIGSTOP, or a node is removed (and another one added). A fault is recovered once the worker has a new
process and the run has taken a further step. Afterwards the records are audited as in kill.py, and the steps that each
restart of the trainer lost are at most those since a checkpoint. The memory of every process is sampled; its growth is
the median of the last quarter of the samples by that of the first, without the first tenth of the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kill import GROUPS, MODULE, SIZE, WORK, audit, steps_done
from work import conditions, save_model

ROLES = ("generator_0", "generator_1", "trainer", "trainer_1", "teacher", "reward")
SIGNALS = ["SIGKILL", "SIGSTOP"]
MARK = "SLIPSTREAM_CHAOS"  # environment variable by which processes of this benchmark are found
RECOVERY_TIMEOUT_S = 180.0
MEMORY = 80 * 2**20  # bytes of each node's object store
CHECKPOINT_STEPS = 5  # between two checkpoints
SAMPLE_S = 5.0  # between two samples of memory


class Nodes:
    """A Ray cluster of a head and three nodes, each a set of processes on this host."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": MEMORY}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._add() for _ in range(3)]
        self.address: str = self._cluster.address

    def replace(self, rng: random.Random) -> None:
        """Remove a node with all its processes, and add another one."""
        self._nodes.append(self._add())
        self._cluster.remove_node(self._nodes.pop(rng.randrange(3)), allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=2, object_store_memory=MEMORY)


def arguments(options: argparse.Namespace, model: Path, directory: Path, address: str) -> list[str]:
    values = {
        "model.path": model, "environment.name": f"{WORK}:Work", "environment.options": "{ tasks = 50 }",
        "environment.reward_workers": 1, "scoring.kind": f"{Path(__file__)}:score", "teacher.path": model,
        "teacher.threads": 1, "run.dir": directory, "loop.steps": options.steps, "loop.groups_per_step": GROUPS,
        "loop.group_size": SIZE, "loop.max_lag": 2, "loop.seed": 5, "sampling.max_tokens": 5, "trainer.threads": 1,
        "trainer.ranks": 2, "trainer.device": "cpu", "generator.device": "cpu", "generator.replicas": 2,
        "generator.threads": 1, "generator.max_restarts": options.faults, "runtime.max_restarts": options.faults,
        "checkpoint.every": CHECKPOINT_STEPS, "evaluation.tasks": 0, "environment.timeout": 600,
        "scoring.timeout": 20, "environment.max_failures": 10000,
        "loop.retries": 100,
    }  # fmt: skip
    if address:
        values |= {"runtime.kind": "ray", "runtime.address": address}
    path = directory.with_suffix(".toml")
    path.write_text("")
    return [*MODULE, "train", str(path), *(f"--{name}={value}" for name, value in values.items())]


def score(task: Any, rollout: Any) -> float:
    """The reward function of the run, in a worker process."""
    return float(rollout.reward)


def workers(mark: str) -> dict[str, int]:
    """Process ids of the run's workers by role."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes()
            if b"slipstream.runtime.worker_main" in command and mark in (path / "environ").read_text(errors="replace"):
                log = (path / "fd" / "1").readlink()
                found["reward" if log.name == "null" else log.stem] = int(path.name)
    return found


class MemorySamples:
    """Context that samples the resident memory of the controller and of each worker, in MB, with the step."""

    def __init__(self, directory: Path, mark: str, controller: int) -> None:
        self.samples: list[tuple[int, dict[str, float]]] = []
        self._directory, self._mark, self._controller = directory, mark, controller
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemorySamples:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._over.wait(SAMPLE_S):
            found = {}
            for role, process in {**workers(self._mark), "controller": self._controller}.items():
                with contextlib.suppress(OSError):
                    found[role] = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * page / 1e6
            self.samples.append((steps_done(self._directory), found))

    def growth(self, steps: int) -> dict[str, float]:
        """By role: the median of the last quarter of the samples by that of the first, after a tenth of the steps."""
        by_role = defaultdict(list)
        for step, found in self.samples:
            for role, size in found.items():
                if step >= steps // 10:
                    by_role[role].append(size)
        quarters = {role: (sizes, -(-len(sizes) // 4)) for role, sizes in by_role.items()}
        median = statistics.median
        return {role: round(median(sizes[-n:]) / median(sizes[:n]), 3) for role, (sizes, n) in quarters.items()}


def inject(rng: random.Random, mark: str, nodes: Nodes | None, signals: list[signal.Signals]) -> tuple[str, str, int]:
    """Cause one fault. Returns its kind, the role and the process that it hit."""
    if nodes and rng.random() < 0.1:
        nodes.replace(rng)
        return "node removed", "", 0
    known = workers(mark)
    role = rng.choice(sorted(set(known) & set(ROLES)))
    number = rng.choice(signals)
    os.kill(known[role], number)
    return number.name, role, known[role]


def recovery(directory: Path, mark: str, fault: tuple[str, str, int], run: subprocess.Popen[str]) -> float:
    """Seconds until the worker has another process and a further step is taken. Raises `AssertionError`."""
    began, (kind, role, process) = time.monotonic(), fault
    last = began + RECOVERY_TIMEOUT_S
    while (role and workers(mark).get(role, process) == process) and run.poll() is None:
        assert time.monotonic() < last, f"{kind} of {role} is not recovered from"
        time.sleep(0.05)
    stamp = (directory / "metrics.jsonl").stat().st_mtime_ns
    while (directory / "metrics.jsonl").stat().st_mtime_ns == stamp and run.poll() is None:
        assert time.monotonic() < last, f"no step follows {kind} of {role or 'a node'}"
        time.sleep(0.05)
    return time.monotonic() - began


@contextlib.contextmanager
def cluster(kind: str) -> Iterator[Nodes | None]:
    nodes = Nodes() if kind == "ray" else None
    try:
        yield nodes
    finally:
        if nodes:
            nodes.close()


def measure(options: argparse.Namespace, scratch: Path, nodes: Nodes | None, mark: str) -> dict[str, Any]:
    """Run with faults, then audit. Returns the recovery times by kind of fault, and memory."""
    directory, log, began = scratch / "run", scratch / "output", time.monotonic()
    command = arguments(options, scratch / "model", directory, nodes.address if nodes else "")
    with log.open("w") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output, text=True)
    try:
        with MemorySamples(directory, mark, run.pid) as memory:
            found = cause_faults(options, directory, mark, nodes, run)
            if wait_for_steps(directory, options, options.steps, began, run):
                subprocess.run([*MODULE, "stop", str(directory)], check=False)
            code = run.wait(timeout=3600)
        assert code == 0, f"the run ended with {code}"
        taken = steps_done(directory)
        assert options.seconds or taken == options.steps
        summary = audit(directory, taken)
        # The newest checkpoint may have been incomplete when the trainer died.
        most = 2 * CHECKPOINT_STEPS * summary["trainer_restarts"]
        assert summary["steps_lost"] <= most, f"{summary['steps_lost']} steps were lost, at most {most} are explained"
    except BaseException:
        run.kill()
        print(log.read_text()[-4000:], flush=True)
        raise
    times = [fault["seconds"] for fault in found]
    return {
        "steps": taken, "faults": len(found), "by_fault": found,
        "recovery_s": {"median": statistics.median(times or [0.0]), "max": max(times, default=0.0)},
        "seconds": round(time.monotonic() - began, 1), "rollouts": summary["rollouts"], "left_over": len(workers(mark)),
        "trainer_restarts": summary["trainer_restarts"], "steps_lost": summary["steps_lost"],
        "memory_growth": memory.growth(taken),
        "memory_mb": [[step, {role: round(size, 1) for role, size in sizes.items()}] for step, sizes in memory.samples],
    }  # fmt: skip


def wait_for_steps(
    directory: Path, options: argparse.Namespace, steps: int, began: float, run: subprocess.Popen[str]
) -> bool:
    """Wait for as many steps, or for the end of the run. Returns whether the time of the run is over before."""
    while steps_done(directory) < steps and run.poll() is None:
        if options.seconds and time.monotonic() - began > options.seconds:
            return True
        time.sleep(0.02)
    return False


def cause_faults(
    options: argparse.Namespace, directory: Path, mark: str, nodes: Nodes | None, run: subprocess.Popen[str]
) -> list[dict[str, Any]]:
    """Cause a fault after each part of the steps, and wait for the recovery. Returns the faults."""
    rng, found, began = random.Random(options.seed), [], time.monotonic()
    signals = [signal.Signals[name] for name in options.signals]
    for number in range(options.faults):
        due = (number + 1) * options.steps // (options.faults + 1)
        if wait_for_steps(directory, options, due, began, run) or run.poll() is not None:
            break
        time.sleep(rng.uniform(0.0, 0.1))
        fault = inject(rng, mark, nodes, signals)
        seconds = recovery(directory, mark, fault, run)
        found.append({"kind": fault[0], "role": fault[1], "step": due, "seconds": round(seconds, 2)})
        print(f"{number + 1}/{options.faults}: {fault[0]} {fault[1]} at step {due}: {seconds:.1f} s", flush=True)
    return found


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--runtime", choices=("local", "ray"), default="local")
    found.add_argument("--steps", type=int, default=500)
    found.add_argument("--faults", type=int, default=50)
    found.add_argument("--seconds", type=float, default=0.0, help="stop the run after this time, even before all steps")
    found.add_argument("--signals", nargs="+", choices=SIGNALS, default=SIGNALS)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    mark = os.environ[MARK] = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as temporary, cluster(options.runtime) as nodes:
        save_model("tiny", Path(temporary) / "model")
        found = measure(options, Path(temporary), nodes, mark)
    times = found["recovery_s"]
    growth = ", ".join(f"{role} {ratio:.3f}" for role, ratio in found["memory_growth"].items())
    print(
        f"{found['faults']} faults in {found['steps']} steps: the run ended by itself and is sound; recovery in "
        f"{times['median']:.1f} s (median), at most {times['max']:.1f} s; {found['left_over']} processes left; "
        f"{found['steps_lost']} steps lost in {found['trainer_restarts']} restarts of the trainer; memory: {growth}"
    )
    if options.json:
        options.json.write_text(json.dumps({**conditions(), **found}, indent=1) + "\n")
    sys.exit(bool(found["left_over"]))


if __name__ == "__main__":
    main()
