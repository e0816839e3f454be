"""Bounds on the lag of tokens: the admission gate before the buffer and the staleness check after it.

The *lag* of a token is the trainer's version minus the version that sampled it. Admission makes large lags rare: no
more groups are started than the next `max_lag + 1` versions can consume. The check when a batch is taken drops stale
groups, since a group admitted in time can still end late; their tasks are tried again.
"""

from __future__ import annotations


def capacity(
    *, version: int, max_lag: int, groups_per_version: int, trained: int, ready: int, running: int, buffer: int
) -> int:
    """Number of groups that may start now.

    `trained` counts groups since the start of the run. Dropped, failed and filtered groups are not counted, so each is
    replaced at once. `buffer` bounds running and ready groups together. With `max_lag` 0, groups are replaced when the
    last running group ends, so that the composition of every forward pass depends only on the seed.
    """
    if max_lag == 0 and running:
        return 0
    by_lag = (max_lag + version + 1) * groups_per_version - (trained + ready + running)
    return max(0, min(by_lag, buffer - ready - running))


def is_stale(version: int, oldest: int, max_lag: int) -> bool:
    """Whether a token sampled by version `oldest` exceeds `max_lag` at `version`."""
    return version - oldest > max_lag
