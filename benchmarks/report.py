"""Measure the page of `slipstream report` for a made-up run: time to write it, its size, and its speed in Chromium.

python benchmarks/report.py --steps 2000 --groups 5 --group-size 10 --json benchmarks/results/report.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from synthetic_run import SyntheticRun
from work import conditions

sys.path.insert(0, str(Path(__file__).parents[1]))
from slipstream import load_run
from slipstream.observe.page import write_report
from tests.observe import browser

# Moves the timeline in every frame for two seconds. Returns the frames and the milliseconds of each drawing.
PAN = """new Promise((done) => {
  moveTo([timeline.extent[1] * (0.5 - SHARE / 2), timeline.extent[1] * (0.5 + SHARE / 2)]);
  zoomTimeline(1.2);
  const took = [], began = performance.now();
  const frame = () => {
    const now = performance.now();
    panTimeline(Math.floor((now - began) / 500) % 2 ? -9 : 9);
    paintNow();
    took.push(performance.now() - now);
    if (now - began < 2000) requestAnimationFrame(frame); else done({ frames: took.length, took });
  };
  requestAnimationFrame(frame);
})"""


async def measure(page: Path, profile: Path, shares: list[float]) -> dict[str, Any]:
    """Open the page, then move its timeline where it shows these shares of the run."""
    async with browser.tab(page.as_uri(), profile) as tab:
        found: dict[str, Any] = {"usable_ms": int(await tab.run("document.documentElement.dataset.ready"))}
        await tab.run("document.querySelector('#timeline').scrollIntoView()")
        found["timeline"] = []
        for share in shares:
            panned = await tab.run(PAN.replace("SHARE", str(share)))
            shown = await tab.run("timeline.rows.filter((row) => row.rollouts.length).every((row) => row.drawn)")
            milliseconds = statistics.median(panned["took"])
            row = {"share": share, "frames_per_s": panned["frames"] / 2, "drawing_ms": round(milliseconds, 2)}
            found["timeline"].append(row | {"single_rollouts": shown})
        began = time.perf_counter()
        await tab.run("document.querySelector('.bar-button').click()")
        found["filter_ms"] = round(1000 * (time.perf_counter() - began))
        return found | {"requests": len(tab.requests), "console_errors": len(tab.errors)}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--steps", type=int, default=2000)
    found.add_argument("--groups", type=int, default=5)
    found.add_argument("--group-size", type=int, default=10)
    found.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.1, 0.02], help="of the run that are shown")
    found.add_argument("--json", type=Path, help="write the record to this file")
    return found


def main() -> None:
    options = parser().parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = SyntheticRun(Path(folder) / "run", options.steps, options.groups, options.group_size).write()
        wall, processor = time.perf_counter(), time.process_time()
        write_report([load_run(path)], path / "report.html")
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        found = {
            "steps": options.steps, "rollouts": options.steps * options.groups * options.group_size,
            "megabytes": round((path / "report.html").stat().st_size / 1e6, 2),
            "write_s": round(wall, 1), "write_processor_s": round(processor, 1),
            **asyncio.run(measure(path / "report.html", Path(folder) / "profile", options.shares)),
        }  # fmt: skip
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps({**conditions(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
