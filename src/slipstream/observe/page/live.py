"""The data of a live page: first all records, then only records that are new to the page."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from typing import Any

from slipstream.observe.page.data import RunData, describe_options
from slipstream.observe.run_data import Run

POLL_S = 0.5  # between two looks at the files, for any number of pages
READ_S = 0.3  # for rollouts of earlier steps in one answer, so that metrics don't wait for them


class LivePage:
    """The data of a page on `runs` for any number of readers."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = [RunData(run) for run in runs]
        self._polled, self._version = -math.inf, 0
        self._began = time.time_ns()  # when records were read that no resume has replaced since

    def poll(self) -> None:
        """Read what was written, unless that was done within `POLL_S`."""
        if not any(data.unread for data in self.runs) and time.monotonic() - self._polled < POLL_S:
            return
        for data in self.runs:
            replaced = data.run.replaced
            changed = data.run.poll()
            if data.run.replaced != replaced:
                data.clear()
                self._began = time.time_ns()
            self._version += data.update(changed, READ_S)
        self._polled = time.monotonic()

    def changes(self, since: str) -> dict[str, Any]:
        """What is newer than the cursor `since`, with the next cursor: {} if nothing is.

        All data (`whole`) for an unknown cursor, or after a resume replaced records. `more`: rollouts of some steps are
        not read yet, so ask again.
        """
        self.poll()
        sizes = [data.sizes for data in self.runs]
        cursor = "-".join(map(str, (self._began, self._version, *(size for four in sizes for size in four))))
        if since == cursor:
            return {}
        whole = not re.fullmatch(rf"{self._began}(-\d+){{{1 + 4 * len(sizes)}}}", since, re.ASCII)
        known = [0] * 4 * len(sizes) if whole else [int(size) for size in since.split("-")[2:]]
        found = [data.since(known[4 * i : 4 * i + 4]) for i, data in enumerate(self.runs)]
        options = {"options": list(describe_options())} if whole else {}
        more = any(data.unread for data in self.runs)
        return {"cursor": cursor, "whole": whole, "more": more, "runs": found} | options
