"""1,000 episodes at once in environment workers, of which 5% crash their process, 5% hang, and 5% leak memory.

    python benchmarks/episodes.py [--episodes 1000] [--workers 64] [--json FILE]

The episodes are played first without faults, then with them, by the controller's code for episodes and workers. A fault
happens after the first of four turns. A crash leaves a child process behind; a hang waits for ever, loops in Python, or
loops in C code, which only the end of its process stops; a leak keeps 100 MB. An episode without a fault is drawn again
if the fault of a neighbour in its worker ends it, as `environment.rollout_retries` does. Completions are made in this
process after a delay: this measures the controller and the workers, without engines, trainer and recorder.

A timer on this process's event loop is due every millisecond; a stall is its delay. The bar is for the longest stall of
each tenth of a second; `stall_parts` are the parts of these, such as the wait for a processor. `machine` has the same
of a process that only sleeps. `phases` are the longest stalls during each call of these kinds. The garbage collector is
set as in a run. Processes that are left over are found by an environment variable that workers and their children
inherit.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller import BEAT, PARTS, Watch, described, machine, quantile, save_tokenizer
from simulated import VOCABULARY
from transformers import PreTrainedTokenizerFast
from work import at_least_one, conditions

from slipstream.config.loading import load_config
from slipstream.environments.base import Policy
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.episode import EpisodeOptions, EventLoopWatchdog, RolloutFailed, blocked_limit, run_episode
from slipstream.environments.load import close_environment, load_environments
from slipstream.environments.worker_environment import EpisodeProcess
from slipstream.rollout import Completion, Sampling, VersionSpan
from slipstream.run import SWITCH_INTERVAL_S
from slipstream.runtime.event_loop import new_event_loop, throttle
from slipstream.runtime.memory import freeze_heap, raise_gc_thresholds
from slipstream.runtime.messages import MessageStream
from slipstream.runtime.process import LocalProcess
from slipstream.runtime.worker_process import WorkerProcess

BARS = {"stall_p99_ms": 20.0, "unfinished": 0, "different": 0, "left_over": 0}
FAULTS = ("crash", "hang: waits", "hang: Python", "hang: C", "leak")
SHARES = (50, 17, 17, 16, 50)  # of 1,000 episodes
LEAK_BYTES, WORKER_MEMORY_GB = 100_000_000, 0.5
TURNS, TOKENS, DELAY_S, TIMEOUT_S = 4, 256, 1.0, 60.0
SPAN_S = 0.1  # of whose stalls the longest counts
DRAWS = 50  # of one episode, at most
MARK = "SLIPSTREAM_EPISODES"
ENVIRONMENT = """
import asyncio, collections, itertools, os, subprocess
from slipstream.environments.base import Task

leaked = []

class Faulty:
    test = ()

    def __init__(self, faults):
        self.train = [Task(str(i), f"task {i} " + "word " * 200, {"fault": f}) for i, f in enumerate(faults)]

    async def rollout(self, task, policy):
        total = 0
        for turn in range(4):
            total += sum((await policy.sample(f"{task.prompt}{turn}")).token_ids)
            if turn == 0:
                await self.fail(task.data["fault"])
        return total % 1000

    async def fail(self, fault):
        if fault == "crash":
            subprocess.Popen(["sleep", "1000"])
            os._exit(3)
        if fault == "hang: waits":
            await asyncio.Event().wait()
        while fault == "hang: Python":
            pass
        if fault == "hang: C":
            collections.deque(itertools.repeat(0), maxlen=0)
        if fault == "leak":
            leaked.append(bytearray(b"x" * LEAK_BYTES))
""".replace("LEAK_BYTES", str(LEAK_BYTES))


class Delayed:
    """A generator whose tokens depend on the seed alone, after a delay of `DELAY_S` on average."""

    version = 0

    def __init__(self) -> None:
        self._draw = random.Random(0)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(self._draw.uniform(0.0, 2 * DELAY_S))
        tokens = tuple((sampling.seed + 7 * i) % VOCABULARY for i in range(TOKENS))
        spans = (VersionSpan(0, 0, TOKENS),)
        return Completion(tuple(prompt_ids), tokens, (-0.5,) * TOKENS, spans, "length", policy=sampling.policy)

    async def close(self) -> None: ...


@dataclass
class Played:
    """Outcomes of all episodes: reward by index, seconds and draws until then, and reasons of failures by fault."""

    rewards: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    failures: dict[str, Counter[str]] = field(default_factory=dict)


def faults(episodes: int) -> list[str]:
    """The fault of each episode, or "", in random order."""
    kinds = [kind for kind, share in zip(FAULTS, SHARES, strict=True) for _ in range(round(share * episodes / 1000))]
    kinds += [""] * (episodes - len(kinds))
    random.Random(0).shuffle(kinds)
    return kinds


async def play_all(kinds: list[str], options: argparse.Namespace, scratch: Path, watch: Watch) -> tuple[Played, float]:
    """Play the episodes at once. Returns the outcomes, and the seconds that closing took."""
    (scratch / "faulty.py").write_text(ENVIRONMENT)
    config = load_config(None, [
        f"--model.path={scratch}", f"--environment.name={scratch / 'faulty.py'}:Faulty", "--loop.max_lag=1",
        f"--environment.workers={options.workers}", f"--environment.timeout={TIMEOUT_S}",
        f"--environment.worker_memory_gb={WORKER_MEMORY_GB}", f"--environment.options.faults={json.dumps(kinds)}",
    ])  # fmt: skip
    [loaded] = load_environments(config)
    tokenizer, played = ChatTokenizer(PreTrainedTokenizerFast.from_pretrained(scratch)), Played()
    freeze_heap()
    began = time.perf_counter()

    async def play(index: int) -> None:
        task, kind = loaded.environment.train[index], kinds[index]
        for draw in range(1, DRAWS + 1):
            await throttle()
            policy = Policy(Delayed(), tokenizer, Sampling(max_tokens=TOKENS), f"{index}")
            try:
                [rollout] = await run_episode(loaded.environment, task, policy, EpisodeOptions(TIMEOUT_S))
            except RolloutFailed as failure:
                played.failures.setdefault(kind or "none", Counter())[failure.reason] += 1
                if kind not in ("", "leak"):
                    return
                continue
            played.rewards[index] = rollout.reward
            played.seconds.append(time.perf_counter() - began)
            played.draws.append(draw)
            return

    with EventLoopWatchdog(blocked_limit([TIMEOUT_S])):
        watch.start()
        await asyncio.gather(*(play(index) for index in range(len(kinds))))
        closing = time.perf_counter()
        await close_environment(loaded.environment)
        return played, time.perf_counter() - closing


def marked() -> list[str]:
    """Command lines of other processes with the mark of this benchmark."""
    wanted, found = f"{MARK}={os.environ[MARK]}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
        except OSError:  # it has ended
            pass
    return found


@contextmanager
def watch_phases(watch: Watch) -> Iterator[None]:
    """Measure what might stall the loop during a block."""
    phases: tuple[tuple[Any, str, str], ...] = (
        (LocalProcess, "__init__", "start of a process"), (EpisodeProcess, "start", "start of a worker"),
        (WorkerProcess, "kill", "kill"), (WorkerProcess, "_lose", "death"), (WorkerProcess, "_flush", "message sent"),
        (MessageStream, "data_received", "messages received (thread)"),
    )  # fmt: skip
    with ExitStack() as after:
        for owner, method, name in phases:
            after.callback(setattr, owner, method, vars(owner)[method])
            watch.around(owner, method, name)
        gc.callbacks.append(watch.collected)
        after.callback(gc.callbacks.remove, watch.collected)
        yield


def longest_of_spans(late: list[float]) -> list[float]:
    """The longest of successive delays in each `SPAN_S`, in ms; a delay follows the last one by `BEAT`."""
    found, at = dict[int, float](), 0.0
    for delay in late:
        span = int(at / SPAN_S)
        found[span] = max(delay, found.get(span, 0.0))
        at += BEAT + delay / 1000
    return [*found.values()]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def summary(kinds: list[str], options: argparse.Namespace, scratch: Path) -> tuple[dict[int, float], dict[str, Any]]:
    """Play the episodes in an event loop of its own. Returns the rewards and the record."""
    began, before, watch = time.perf_counter(), descriptors(), Watch()
    with watch_phases(watch), asyncio.Runner(loop_factory=new_event_loop) as runner:
        played, closing = runner.run(play_all(kinds, options, scratch, watch))
    time.sleep(1.0)  # a killed process needs a moment to be gone
    left = marked()
    first, last = watch.stalls.starts[0], watch.stalls.ends[-1]
    spans = [(first + i * SPAN_S, first + (i + 1) * SPAN_S) for i in range(int((last - first) / SPAN_S))]
    succeeding = sum(kind in ("", "leak") for kind in kinds)
    record = {
        "faults": dict(Counter(filter(None, kinds))), "seconds": round(time.perf_counter() - began, 1),
        "closing_s": round(closing, 1), "stall": described(watch.longest(spans)),
        "stall_parts": {part: described(watch.longest(spans, part)) for part in PARTS},
        "stall_with_a_processor": described(watch.longest(spans, PARTS[0], PARTS[2])),
        "beat": described([1000 * (came - due) for due, came in watch.stalls]),
        "phases": {name: described(watch.longest(spans)) for name, spans in sorted(watch.phases.items())},
        "finished": len(played.rewards), "unfinished": succeeding - len(played.rewards),
        "at_first_draw": sum(draw == 1 for draw in played.draws), "most_draws": max(played.draws),
        "finished_after_s": {f"p{q}": round(quantile(played.seconds, q / 100), 1) for q in (50, 99, 100)},
        "failures": {kind: dict(reasons) for kind, reasons in sorted(played.failures.items())},
        "left_over": len(left), "left_over_processes": left, "descriptors_left": descriptors() - before,
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }  # fmt: skip
    return played.rewards, record


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    save_tokenizer(scratch)
    late, over = multiprocessing.SimpleQueue(), multiprocessing.Event()
    other = multiprocessing.Process(target=machine, args=(late, over), daemon=True)
    other.start()
    os.environ[MARK] = uuid.uuid4().hex
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_gc_thresholds()
    try:
        expected, without = summary([""] * options.episodes, options, scratch)
        rewards, found = summary(faults(options.episodes), options, scratch)
    except BaseException:
        other.kill()  # it ignores the SIGTERM that multiprocessing sends at exit
        raise
    over.set()
    found["different"] = sum(reward != expected.get(index) for index, reward in rewards.items())
    return {
        "episodes": options.episodes, "workers": options.workers, "without_faults": without, "with_faults": found,
        "machine": described(longest_of_spans(late.get())),
    }  # fmt: skip


def missed(found: dict[str, Any]) -> list[str]:
    """Bars that the episodes with faults miss."""
    values = {**found["with_faults"], "stall_p99_ms": found["with_faults"]["stall"]["p99_ms"]}
    return [f"{name} is {values[name]}, of at most {bar}" for name, bar in BARS.items() if values[name] > bar]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--episodes", type=at_least_one, default=1000)
    found.add_argument("--workers", type=at_least_one, default=64)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(options, Path(scratch))
    print(json.dumps(found, indent=1))
    print("\n".join(missed(found)) or "all bars are met")
    if options.json:
        options.json.write_text(json.dumps({**conditions(), "bars": BARS, **found}, indent=1) + "\n")
    sys.exit(bool(missed(found)))


if __name__ == "__main__":
    main()
