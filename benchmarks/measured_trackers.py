"""Trackers for `trackers.py` that record the processor time of their process. Imports no tensor library."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.observe.tracker_backends import Tensorboard

INTERVAL_S = 1.0


class Measured(Tensorboard):
    """Tensorboard. `cpu.jsonl` of the run directory gets wall and processor time each second, from its start on."""

    def start(self, run: Any, project: str, run_id: str) -> str:
        started = super().start(run, project, run_id)
        threading.Thread(target=self._record, args=(run.path / "cpu.jsonl",), daemon=True).start()
        return started

    def _record(self, path: Path) -> None:
        while True:
            with path.open("a") as file:
                file.write(json.dumps([time.monotonic(), time.process_time()]) + "\n")
            time.sleep(INTERVAL_S)


class Hangs(Measured):
    """A tracker that never returns from its first call after its start."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        threading.Event().wait()
