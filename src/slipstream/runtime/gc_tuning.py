"""Garbage-collector tuning for processes that hold millions of small objects."""

from __future__ import annotations

import gc

# A full collection then runs after five million new containers. By default Python runs one after a growth of 25 %, and
# visits every token of every list. The smaller collections visit at most ten thousand objects, in some milliseconds.
THRESHOLDS = (1_000, 10, 500)


def freeze_heap() -> None:
    """Exclude all existing objects from garbage collection.

    Libraries and models hold half a million permanent objects. Each full collection would visit them, which takes some
    tenths of a second.
    """
    gc.collect()
    gc.freeze()


def raise_gc_thresholds() -> None:
    """Make full collections rare, for processes that create few reference cycles, such as vLLM's."""
    gc.set_threshold(*THRESHOLDS)
