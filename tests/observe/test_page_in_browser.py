"""The page of `slipstream report` in a browser: it opens without a network, and its controls work."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from slipstream import load_run
from slipstream.observe.page import write_report
from tests.observe import browser
from tests.observe.synthetic import HOSTILE, SyntheticRun

MIDDLE_OF_A_ROLLOUT = """(() => {
  const row = timeline.rows[1], { start, end, lane } = row.rollouts[3];
  const box = timeline.canvas.getBoundingClientRect();
  const y = row.top + row.height - (lane + 0.5) * row.height / row.lanes;
  return [box.left + (xOf(start) + xOf(end)) / 2, box.top + y];
})()"""

pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason="needs Chromium")
pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page")
    runs = [load_run(SyntheticRun(path / name, 12, 2, 4, seed=seed).write()) for seed, name in enumerate("ab")]
    write_report(runs[:1], path / "one.html")
    write_report(runs, path / "two.html")
    shutil.rmtree(path / "a" / "policy")  # without a tokenizer the page shows completions as they were recorded
    write_report([load_run(path / "a")], path / "hostile.html")
    return path


def look(page: Path, name: str, check: Callable[[browser.Tab], Awaitable[None]], width: int = 1440) -> None:
    """Open a page, check it, and assert that it asked for nothing and reported no error."""

    async def main() -> None:
        async with browser.tab((page / name).as_uri(), page / "profile", width) as tab:
            await check(tab)
            assert tab.requests == [] and tab.errors == []

    asyncio.run(main())


def test_a_page_opens_alone_and_its_text_stays_text(page: Path) -> None:
    async def check(tab: browser.Tab) -> None:
        await tab.run("openGroup(1, state.data.runs[0].rollouts.visit[0], 0)")
        symbols = {0x1B: "\u241b", 0: "\u2400", 7: "\u2407", 0x202E: "⟨202e⟩", 0x202C: "⟨202c⟩"}
        for i, text in enumerate(HOSTILE):
            completion = f"document.querySelectorAll('.completion')[{i}]"
            assert await tab.run(f"{completion}.textContent") == text.translate(symbols)
            assert await tab.run(f"{completion}.childElementCount") == 0
        assert await tab.run("document.title") == "a – Slipstream"

    look(page, "hostile.html", check)


def test_a_bar_of_the_histogram_shows_the_rollouts_behind_it(page: Path) -> None:
    async def check(tab: browser.Tab) -> None:
        bar = "[...document.querySelectorAll('.bar-button')].at(-1)"
        label = await tab.run(f"{bar}.getAttribute('aria-label')")
        await tab.run(f"{bar}.click()")
        shown = await tab.run("[...document.querySelectorAll('.rollouts tbody tr')].map((r) => r.cells[3].textContent)")
        assert label == f"Reward 1: {len(shown)} rollouts" and set(shown) == {"1"}
        await tab.run("document.querySelector('.rollouts tbody tr').click()")
        await tab.until("document.querySelectorAll('.member').length === 4")
        assert await tab.run("document.querySelectorAll('.member .token[class*=surprise]').length") > 50

    look(page, "one.html", check)


def test_curves_zoom_together_and_several_runs_are_overlaid(page: Path) -> None:
    async def check(tab: browser.Tab) -> None:
        await tab.run("document.querySelector('#curves').scrollIntoView()")
        await tab.until("charts.all.length > 2")
        assert await tab.run("charts.all[0].series.length") == 5  # x, and raw and smoothed values of two runs
        await tab.run("charts.all[0].setSelect({left: 50, width: 100, top: 0, height: 100})")
        scales = "[...new Set(charts.all.map((chart) => JSON.stringify(chart.scales.x.min)))].length"
        assert await tab.run("charts.range !== null") and await tab.run(scales) == 1
        await tab.run("document.querySelector('.legend button').click()")
        await tab.until("charts.all.length > 0")
        assert await tab.run("charts.all[0].series[1].show") is False
        differing = "[...document.querySelectorAll('.config tbody th')].map((cell) => cell.textContent)"
        assert await tab.run(differing) == ["model.path"]

    look(page, "two.html", check)


def test_reward_and_score_lead_the_curves_and_the_verdict_is_in_the_summary(page: Path) -> None:
    async def check(tab: browser.Tab) -> None:
        names = await tab.run("[...document.querySelectorAll('.chart')].map((node) => node.dataset.metric)")
        assert names[:3] == ["reward/mean", "eval/score", "train/loss"]
        assert await tab.run("document.querySelector('#curves').textContent.includes('* other metrics')") is True
        assert await tab.run("yRange(null, 0.4, 0.4)") == [0, 0.8], "a flat line is in the middle"
        assert await tab.run("document.querySelector('#health').textContent.includes('trainer waited')")
        assert await tab.run("tickLabels(null, [78.501, 78.502, 78.503])") == ["78.501", "78.502", "78.503"]
        assert await tab.run(
            "metricNames([{warnings: [], evaluations: {}, metrics: {'env/x': [1, 2], 'reward/mean': [1, 2]}}]).names"
        ) == ["reward/mean"]

    look(page, "one.html", check)


def test_the_timeline_begins_with_the_first_rollout_and_fits_any_window(page: Path) -> None:
    async def check(tab: browser.Tab) -> None:
        first = "Math.min(...timeline.rows.flatMap((row) => row.rollouts.map((rollout) => rollout.start)))"
        assert await tab.run(f"timeline.view[0] === {first} && timeline.view[0] > 0")
        await tab.run("timeline.canvas.parentNode.style.display = 'none', resizeTimeline(), paintNow()")
        assert await tab.run("timeline.width") == 200

    look(page, "one.html", check)


def test_the_badge_counts_the_rules_that_warned(page: Path) -> None:
    async def check(tab: browser.Tab) -> None:
        for rules, text in (("'a'", "1 health warning"), ("'a', 'b', 'a'", "2 health warnings")):
            badge = f"warningBadge({{warnings: [{rules}].map((rule) => ({{rule}}))}}).textContent"
            assert await tab.run(badge) == text

    look(page, "one.html", check)


def test_a_cause_has_a_remedy_with_a_link_to_the_best_rollouts_and_a_consequence_has_none(page: Path) -> None:
    async def check(tab: browser.Tab) -> None:
        text = "Read the best (slipstream rollouts RUN), mend"
        cause = f"{{rule: 'score-falls', step: 3, text: 'hacked', detail: [], follows: null, remedy: '{text}'}}"
        await tab.run(
            f"(() => {{ const cause = {cause}; state.data.runs[0].warnings = "
            "[cause, {...cause, rule: 'no-signal', follows: 'score-falls'}]; state.data.runs[0].faults = []; "
            "drawSummary(); })()"
        )
        items = "[...document.querySelectorAll('#health li > div:first-child')].map((item) => item.textContent)"
        cause, consequence = await tab.run(items)
        assert cause.endswith("What to do: Read the best (show), mend") and "What to do" not in consequence
        await tab.run("document.querySelector('#health li button.link').click()")
        await tab.until("document.querySelectorAll('.member.picked .token').length")
        assert "reward 1" in await tab.run("document.querySelector('.member.picked header').textContent")
        rewards = "[...document.querySelectorAll('.rollouts tbody tr')].map((row) => +row.cells[3].textContent)"
        shown = await tab.run(rewards)
        assert shown == sorted(shown, reverse=True)

    look(page, "one.html", check)


def test_values_that_differ_by_rounding_are_drawn(page: Path) -> None:
    async def check(tab: browser.Tab) -> None:
        values = "[1, 0.9999999]"
        await tab.run(f"state.data.runs[0].metrics = {{step: [1, 2], 'policy/ratio_mean': {values}}}, drawCurves()")
        await tab.run("document.querySelector('[data-metric=\"policy/ratio_mean\"]').scrollIntoView()")
        await tab.until("charts.all.some((chart) => chart.metric === 'policy/ratio_mean')")
        await tab.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")

    look(page, "one.html", check)


def test_a_rollout_of_the_timeline_tells_its_life(page: Path) -> None:
    async def check(tab: browser.Tab) -> None:
        await tab.run("document.querySelector('#timeline').scrollIntoView()")
        x, y = await tab.run(MIDDLE_OF_A_ROLLOUT)
        for kind in ("mousePressed", "mouseReleased"):
            await tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        assert await tab.run("timeline.picked === timeline.rows[1].rollouts[3]")
        life = await tab.run("timeline.detail.textContent")
        assert "starts to sample" in life and "trains on it" in life and "is published" in life
        await tab.run("timeline.detail.querySelector('button').click()")
        await tab.until("document.querySelectorAll('.member').length === 4")

    look(page, "one.html", check)


def test_a_phone_scrolls_only_downwards_and_the_theme_changes(page: Path) -> None:
    async def check(tab: browser.Tab) -> None:
        assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
        before = await tab.run("getComputedStyle(document.body).backgroundColor")
        await tab.run("document.querySelector('#theme').click()")
        assert await tab.run("getComputedStyle(document.body).backgroundColor") != before

    look(page, "one.html", check, width=500)  # the least that a window without a screen can have
