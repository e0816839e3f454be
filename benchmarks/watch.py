"""Measure `slipstream watch` with a page open in Chromium: what it costs a run, and how soon a step is on the page.

    python benchmarks/watch.py --rounds 12 --seconds 10 --json benchmarks/results/watch.json

The demo's run goes on while the page is opened and closed in turn: each round compares the steps per second of two
neighbouring periods. Then steps are added to a made-up run of 2,000 steps and 100,000 rollouts, one a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from synthetic_run import SyntheticRun
from work import conditions

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo

from slipstream import load_run
from slipstream.runtime.run_directory import lock
from tests.observe import browser

ROOT = Path(__file__).parents[1]
SETTLE_S = 3.0  # after the page was opened or closed
COMMAND = [sys.executable, "-m", "slipstream"]


@contextlib.contextmanager
def demo_run(folder: Path) -> Iterator[Path]:
    """The run of `make demo`, from random weights, without evaluations, until the end of the block."""
    demo.build_model(0, 16).save_pretrained(folder / "start")
    demo.build_tokenizer().save_pretrained(folder / "start")
    options = [f"--model.path={folder / 'start'}", f"--run.dir={folder / 'run'}", "--loop.steps=1000000"]
    options += ["--evaluation.every=0", "--checkpoint.every=1000000", "--quiet"]
    command = [*COMMAND, "train", str(ROOT / "examples" / "addition.toml"), *options]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            metrics = folder / "run" / "metrics.jsonl"
            while not (metrics.exists() and metrics.stat().st_size):
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
            yield folder / "run"
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def watched(path: Path, profile: Path) -> AsyncIterator[tuple[str, browser.Tab, int]]:
    """URL of a server, its page in a browser, and the server's process."""
    with subprocess.Popen([*COMMAND, "watch", str(path)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        async with browser.tab(url, profile) as tab:
            yield url, tab, server.pid
        server.terminate()


def processor_s(pid: int) -> float:
    """Seconds of processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def browser_s(profile: Path) -> float:
    """Seconds of processor time of the processes of a browser."""
    total = 0.0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(profile).encode() in (process / "cmdline").read_bytes():
                total += processor_s(int(process.name))
    return total


async def cost(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Steps per second with an open page and without one, in turn, and processor seconds per second."""
    ratios, rates, server, chromium = [], {True: [], False: []}, [], []
    with demo_run(folder) as path:
        run = load_run(path)
        async with watched(path, folder / "profile") as (url, tab, pid):
            for at in range(rounds):
                for is_open in (at % 2 == 0, at % 2 == 1):
                    await tab.call("Page.navigate", url=url if is_open else "about:blank")
                    await asyncio.sleep(SETTLE_S)
                    used = (processor_s(pid), browser_s(folder / "profile"))
                    run.poll()
                    before, began = len(run.metrics), time.monotonic()
                    await asyncio.sleep(seconds)
                    run.poll()
                    took = time.monotonic() - began
                    rates[is_open].append((len(run.metrics) - before) / took)
                    if is_open:
                        server.append((processor_s(pid) - used[0]) / took)
                        chromium.append((browser_s(folder / "profile") - used[1]) / took)
                ratios.append(rates[True][-1] / rates[False][-1])
    return {
        "steps_per_s_open": statistics.median(rates[True]), "steps_per_s_closed": statistics.median(rates[False]),
        "ratio": statistics.median(ratios), "ratios": sorted(ratios), "server_processor": statistics.median(server),
        "browser_processor": statistics.median(chromium), "load": os.getloadavg()[1],
    }  # fmt: skip


async def delay(folder: Path, steps: int, added: int) -> dict[str, Any]:
    """Seconds until a step is drawn after its line was written, and the server's processor seconds per step."""
    source = SyntheticRun(folder / "large", steps, 5, 10)
    path = source.write()
    (path / "summary.json").unlink()
    with lock(path / "lock"):
        async with watched(path, folder / "profile2") as (_, tab, pid):
            usable = int(await tab.run("document.documentElement.dataset.ready"))
            await tab.until("!live.more")
            ready, delays = processor_s(pid), []
            for step in range(steps + 1, steps + added + 1):
                record, events = source.step(step)
                with (path / "events.jsonl").open("a") as file:
                    file.writelines(json.dumps(event) + "\n" for event in events)
                with (path / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(record) + "\n")
                began = time.monotonic()
                await tab.until(f"document.querySelector('#summary').textContent.includes('{step:,} in')")
                delays.append(time.monotonic() - began)
            used = (processor_s(pid) - ready) / added
            found = {"usable_ms": usable, "start_processor_s": ready, "processor_s_per_step": used}
            found |= {"delay_s": statistics.median(delays), "longest_delay_s": max(delays)}
            return found | {"console_errors": len(tab.errors), "steps": steps, "rollouts": steps * 50}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--rounds", type=int, default=12, help="of two periods, with and without an open page")
    found.add_argument("--seconds", type=float, default=10.0, help="of each period")
    found.add_argument("--steps", type=int, default=2000, help="of the made-up run")
    found.add_argument("--added", type=int, default=30, help="steps added to it")
    found.add_argument("--json", type=Path, help="write the record to this file")
    return found


def main() -> None:
    options = parser().parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        found = {
            "cost": asyncio.run(cost(folder, options.rounds, options.seconds)),
            "delay": asyncio.run(delay(folder, options.steps, options.added)),
        }
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps({**conditions(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
