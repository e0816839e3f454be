"""The simulated engine against step-by-step decoding, and its slots, cache, swaps and deaths."""

from __future__ import annotations

import pytest

from slipstream.plan.costs import PublishCost
from slipstream.plan.engine import Request, SimulatedEngine
from slipstream.rollout import VersionSpan
from tests.plan.cases import scenario

COST = scenario().engine
ADAPTERS = PublishCost("lora", 0.02, 0.0, 0.0, 0.0)


def engine(slots: int = 4, kv_tokens: float = 1e6) -> SimulatedEngine:
    return SimulatedEngine(COST, slots, kv_tokens)


def request(context: int = 10, tokens: int = 20, prefix: object = None) -> Request:
    return Request(None, context, tokens, prefix or object(), context)


def play(found: SimulatedEngine) -> list[Request]:
    """Play an engine to its end."""
    ended = found.advance(found.at)
    while (at := found.next_event()) is not None:
        ended += found.advance(at)
    return ended


def test_many_steps_at_once_take_the_time_of_single_steps() -> None:
    found = engine()
    lengths = [300, 500, 500, 900, 250]
    for tokens in lengths:
        found.add(request(100, tokens))
    assert len(play(found)) == len(lengths)
    running, waiting, now = [], list(lengths), 0.0
    while running or waiting:
        while waiting and len(running) < 4:
            now += COST.prefill(100)
            running.append([waiting.pop(0), 100])
        now += COST.step(len(running), sum(context for _, context in running))
        running = [[left - 1, context + 1] for left, context in running if left > 1]
    assert found.at == pytest.approx(now, rel=0.01)


def test_slots_bound_the_sequences_and_all_tokens_are_sampled() -> None:
    found = engine(slots=3)
    for tokens in (5, 7, 9, 11):
        found.add(request(10, tokens))
    found.advance(0.0)
    assert (len(found.active), len(found.waiting)) == (3, 1)
    ended = play(found)
    assert [r.spans for r in ended] == [[VersionSpan(0, 0, n)] for n in (5, 7, 9, 11)]
    assert found.sampled == pytest.approx(32)
    assert found.tokens == pytest.approx(0)


def test_the_newest_sequence_is_preempted_and_keeps_its_tokens() -> None:
    found = engine(kv_tokens=100)
    for _ in range(2):
        found.add(request(20, 60))
    ended = play(found)
    assert found.preemptions >= 1
    assert [r.spans[-1].end for r in ended] == [60, 60]
    assert found.sampled == pytest.approx(120)


def test_a_swap_divides_the_spans_at_the_token() -> None:
    found = engine()
    found.add(request(0, 50))
    found.advance(0.0)
    at = COST.step(1, 5) * 10.5
    found.swap(at, 1, 0.001, "continue")
    (ended,) = play(found)
    first, second = ended.spans
    assert (first.version, second.version, second.end) == (0, 1, 50)
    assert first.end == second.start and abs(first.end - 10) <= 2


def test_sequences_on_adapters_keep_the_version_that_they_started_with() -> None:
    """A queued one starts with the version of its slot's moment. `retry` restarts on the new version anyway."""
    found = SimulatedEngine(COST, 1, 1e6, scenario(publish=ADAPTERS).keeps_version)
    for _ in range(2):
        found.add(request(0, 50))
    found.advance(0.0)
    found.swap(COST.step(1, 5) * 10.5, 1, 0.0, "continue")
    assert [ended.spans for ended in play(found)] == [[VersionSpan(version, 0, 50)] for version in (0, 1)]
    assert not scenario(publish=ADAPTERS, in_flight="retry").keeps_version and not scenario().keeps_version


def test_sequences_on_adapters_keep_their_version_over_a_preemption() -> None:
    found = SimulatedEngine(COST, 4, 60, keeps_version=True)
    for _ in range(2):
        found.add(request(0, 40))
    found.advance(0.0)
    found.swap(COST.step(2, 5) * 10, 1, 0.0, "continue")
    ended = play(found)
    assert found.preemptions == 1 and {span.version for request in ended for span in request.spans} == {0}


def test_retry_samples_again_under_the_new_version() -> None:
    found = engine()
    found.add(request(0, 50))
    found.advance(0.0)
    found.swap(COST.step(1, 0) * 10, 1, 0.0, "retry")
    (ended,) = play(found)
    assert ended.spans == [VersionSpan(1, 0, 50)]


@pytest.mark.parametrize("admitted", [False, True])
def test_retry_samples_all_tokens_of_a_preempted_request_again(admitted: bool) -> None:
    found = engine(kv_tokens=100)
    for _ in range(2):
        found.add(request(20, 60))
    found.advance(0.0)
    while not found.preemptions:
        at = found.next_event()
        assert at is not None
        found.advance(at)
    assert found.waiting[0].spans
    found.kv_tokens = 1e6
    if admitted:
        found.advance(found.at)
    found.swap(found.at, 1, 0.0, "retry")
    assert [ended.spans for ended in play(found)] == [[VersionSpan(1, 0, 60)]] * 2


def test_recompute_computes_each_sequence_by_itself() -> None:
    """Not all of them as one long sequence, in which each token would attend to those of the others."""
    found = engine(slots=8)
    for _ in range(8):
        found.add(request(4000, 100))
    found.advance(0.0)
    before, busy = found.at, found.busy_s
    found.swap(before, 1, 0.0, "recompute")
    assert found.at - before == pytest.approx(8 * COST.prefill(4000))
    assert found.busy_s - busy == pytest.approx(found.at - before)


def test_a_shared_prompt_is_computed_once() -> None:
    times = []
    for shared in (True, False):
        found, prefix = engine(), object()
        for _ in range(4):
            found.add(request(5000, 1, prefix if shared else None))
        found.advance(0.0)
        times.append(found.at)
    assert times[0] == pytest.approx(times[1] / 4, rel=0.01)


def test_a_dead_engine_returns_its_requests() -> None:
    found = engine(slots=1)
    for _ in range(2):
        found.add(request(0, 50))
    found.advance(0.0)
    assert len(found.kill(0.01)) == 2
    assert found.next_event() is None and found.load == 0
