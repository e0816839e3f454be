"""When an engine had requests, piece by piece."""

from __future__ import annotations

from slipstream.generators.activity import ActivityLog


def test_activity_is_taken_in_pieces_without_gaps() -> None:
    log = ActivityLog("engine 3", 1.0)
    log.requests.begin(2.0)
    first = log.take(4.0, {"busy_s": 1.5, "tokens": 10})
    assert (first.track, first.start, first.end) == ("engine 3", 1.0, 4.0)
    assert first.requests == [(2.0, 4.0)] and (first.forward_s, first.tokens) == (1.5, 10)
    log.requests.end(5.0)
    log.requests.begin(6.0)
    log.requests.end(6.5)
    log.asleep.begin(6.5)
    second = log.take(7.0, {"busy_s": 2.0, "tokens": 14})
    assert second.start == 4.0 and second.requests == [(4.0, 5.0), (6.0, 6.5)] and second.asleep == [(6.5, 7.0)]
    assert (second.forward_s, second.tokens) == (0.5, 4)
    log.asleep.end(7.25)
    third = log.take(8.0, {"busy_s": 2.0, "tokens": 14})
    assert third.requests == [] and third.asleep == [(7.0, 7.25)] and third.forward_s == 0
    log.requests.begin(8.0)
    log.asleep.begin(9.0)
    log.asleep.end(9.5)
    log.take(10.0, {"busy_s": 3.0, "tokens": 20})
    assert log.busy_s == 2.0 + 1.5 + 1.5, "with requests in flight and awake"
