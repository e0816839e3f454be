"""How old a token may be: pure arithmetic, used at both ends of the buffer.

A *version* counts publishes: version 0 is the start policy, and each publish adds one. The *lag* of a token is the
newest version minus the version that drew it. Admission makes large lags rare, because no more work is started than the
next `max_lag + 1` versions can consume; the check at the taking end makes them impossible, because a straggler that was
admitted in time can still finish late.
"""

from __future__ import annotations


def capacity(
    *, version: int, max_lag: int, groups_per_version: int, trained: int, ready: int, running: int, buffer: int
) -> int:
    """How many more groups may be started now (0 if none).

    Groups that were dropped, failed or filtered are counted nowhere, so each of them is refunded at once. `buffer` caps
    unfinished and ready groups together. With `max_lag` 0 a refund is paid when the last running group ends: a
    synchronous run generates in waves, and the make-up of every forward pass is a function of the seed.
    """
    if max_lag == 0 and running:
        return 0
    by_lag = (max_lag + version + 1) * groups_per_version - (trained + ready + running)
    return max(0, min(by_lag, buffer - ready - running))


def is_stale(version: int, oldest: int, max_lag: int) -> bool:
    """Whether a token that version `oldest` drew is too old to train on at `version`."""
    return version - oldest > max_lag
