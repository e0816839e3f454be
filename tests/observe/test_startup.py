"""Progress messages while processes start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slipstream.observe import progress
from slipstream.observe.progress import report_startup


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(progress, "FIRST_REPORT_S", 0.01)
    (tmp_path / "generator_0.log").write_text("INFO begins\nLoading:  10%\rLoading:  20%\n\n")
    (tmp_path / "trainer.log").write_text("")
    return tmp_path


def test_a_slow_start_is_reported_at_growing_intervals(logs: Path) -> None:
    told: list[str] = []

    async def start() -> int:
        while len(told) < 9:
            await asyncio.sleep(0)
        return 7

    assert asyncio.run(report_startup(start(), told.append, logs)) == 7
    first, *said = told[:3]
    assert first.startswith("still starting after 0:00, with this at the end of the logs in ") and str(logs) in first
    assert said == ["  generator_0.log: Loading:  20%", "  trainer.log: (nothing)"]


def test_a_quick_start_is_not_reported(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_REPORT_S", 60.0)

    async def start() -> int:
        return 7

    assert asyncio.run(report_startup(start(), pytest.fail, logs)) == 7


def test_an_error_is_raised_and_cancellation_waits_for_cleanup(logs: Path) -> None:
    ended: list[bool] = []

    async def fail() -> None:
        raise ValueError("no GPU")

    async def start() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            ended.append(True)

    async def main() -> None:
        with pytest.raises(ValueError, match="no GPU"):
            await report_startup(fail(), lambda text: None, logs)
        starting = asyncio.ensure_future(report_startup(start(), lambda text: None, logs))
        await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert ended == [True]

    asyncio.run(main())
