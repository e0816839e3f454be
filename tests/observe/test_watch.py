"""`slipstream watch`: a page that follows its runs, for readers who are allowed to, and gauges for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from slipstream import cli, commands, load_run
from slipstream.observe.page import data as page_data
from slipstream.observe.page.data import run_data
from slipstream.runtime.run_directory import lock, write_atomically
from tests.observe import browser
from tests.observe.synthetic import HOSTILE, SyntheticRun

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("aiohttp.web")
watch = pytest.importorskip("slipstream.observe.watch")

STEPS = 12


class GrowingRun:
    """A made-up run that is running, and takes a step when it is told to."""

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, SyntheticRun(path, STEPS, 2, 4)
        self.source.write()
        (path / "summary.json").unlink()
        self.lock = lock(path / "lock")
        self.step = STEPS

    def add(self, *names: str) -> None:
        """Take a step and write its line, its rollouts and its events."""
        self.step += 1
        record, events = self.source.step(self.step)
        self.append("events.jsonl", *events)
        self.append("metrics.jsonl", record | dict.fromkeys(names, 0.5))

    def append(self, name: str, *records: Any) -> None:
        with (self.path / name).open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def rewind(self, step: int) -> None:
        """What a resume does to the records."""
        for name in ("metrics.jsonl", "events.jsonl"):
            lines = (self.path / name).read_text().splitlines(keepends=True)
            write_atomically(self.path / name, "".join(lines[: len(lines) * step // self.step]))
        for later in range(step + 1, self.step + 1):
            (self.path / "rollouts" / f"step_{later:06d}.parquet").unlink()
        self.step = step


@pytest.fixture
def growing(tmp_path: Path) -> GrowingRun:
    return GrowingRun(tmp_path / "run")


@pytest.fixture
def page(growing: GrowingRun, monkeypatch: pytest.MonkeyPatch) -> page_data.LivePage:
    monkeypatch.setattr(page_data, "POLL_S", 0.0)
    monkeypatch.setattr(page_data, "MEASURE_SHARE", math.inf)
    return page_data.LivePage([load_run(growing.path)])


GROWING = ("metrics", "evaluations", "events", "rollouts")


def joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The data of the run that a page has after these answers."""
    parts = [json.loads(json.dumps(answer["runs"][0])) for answer in answers]
    known = {name: [value for part in parts for value in part[name]] for name in ("events", "rollouts")}
    tables = {name: [part[name] for part in parts] for name in ("metrics", "evaluations")}
    columns = {
        name: {key: [v for part in found for v in part.get(key, [None] * len(part.get("step", ())))] for key in keys}
        for name, found in tables.items() for keys in [dict.fromkeys(key for part in found for key in part)]
    }  # fmt: skip
    return {**parts[-1], **known, **columns}


def everything(page: page_data.LivePage, since: str = "") -> list[dict[str, Any]]:
    """All answers until there is nothing new."""
    found = []
    while answer := page.changes(since):
        found.append(answer)
        since = answer["cursor"]
    return found


def test_changes_add_up_to_the_data_of_the_whole_run(growing: GrowingRun, page: page_data.LivePage) -> None:
    answers = everything(page)
    assert answers[0]["whole"] and len(answers[0]["options"]) > 100
    growing.add()
    growing.append("evaluations.jsonl", {"step": 13, "eval/score": 0.5, "eval/tasks": 100})
    first = everything(page, answers[-1]["cursor"])
    growing.add("env/new")  # a metric that earlier steps lack
    second = everything(page, first[-1]["cursor"])
    assert [answer["whole"] for answer in first + second] == [False] * len(first + second)
    assert [step["step"] for step in second[0]["runs"][0]["rollouts"]] == [[14] * 8]  # only those of the new step
    known = joined(answers + first + second)
    assert known == json.loads(json.dumps(run_data(load_run(growing.path))))
    assert known["metrics"]["env/new"] == [None] * 13 + [0.5]


def test_an_unchanged_run_is_not_sent_again_and_its_end_is(growing: GrowingRun, page: page_data.LivePage) -> None:
    cursor = everything(page)[-1]["cursor"]
    assert page.changes(cursor) == {}
    growing.lock.close()
    [change] = everything(page, cursor)
    assert change["runs"][0]["state"] == "dead" and not any(change["runs"][0][name] for name in GROWING)
    (growing.path / "summary.json").write_text('{"steps": 12, "stopped": null}')
    [change] = everything(page, change["cursor"])
    assert change["runs"][0]["state"] == "complete"


def test_a_resume_that_replaces_records_sends_all_data_again(growing: GrowingRun, page: page_data.LivePage) -> None:
    cursor = everything(page)[-1]["cursor"]
    growing.rewind(6)
    answers = everything(page, cursor)
    known = joined(answers)
    assert answers[0]["whole"] and known["metrics"]["step"] == [1, 2, 3, 4, 5, 6]
    assert [step["step"][0] for step in known["rollouts"]] == [1, 2, 3, 4, 5, 6]


def test_rollouts_of_a_step_are_read_once_its_line_is_there(growing: GrowingRun, page: page_data.LivePage) -> None:
    cursor = everything(page)[-1]["cursor"]
    record, _ = growing.source.step(STEPS + 1)
    assert everything(page, cursor) == []
    growing.append("metrics.jsonl", record)
    [change] = everything(page, cursor)
    assert [set(step["step"]) for step in change["runs"][0]["rollouts"]] == [{STEPS + 1}]


def test_two_readers_of_a_dead_run_do_not_take_each_other_for_it(growing: GrowingRun) -> None:
    growing.lock.close()
    with lock(growing.path / "lock", "r"):
        assert load_run(growing.path).state == "dead"


@contextlib.asynccontextmanager
async def served(*paths: Path, host: str = "127.0.0.1") -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    server = watch.WatchServer([load_run(path) for path in paths], host)
    runner = aiohttp.web.AppRunner(server.app, shutdown_timeout=1.0)
    try:
        await runner.setup()
        await aiohttp.web.SockSite(runner, server.socket).start()
        async with aiohttp.ClientSession() as session:
            yield server.url, session
    finally:
        await runner.cleanup()


def test_requests_are_answered_or_refused_in_one_line(growing: GrowingRun) -> None:
    texts = {"/api/texts?run=0&step=1&visit=1": 200, "/api/texts?run=0&step=99&visit=1": 404}
    texts |= {"/api/texts?run=1&step=1&visit=1": 404, "/api/texts?run=0&step=x&visit=1": 400, "/api/texts": 400}
    found = {
        "/": 200,
        "/api/data?since=x": 200,
        "/metrics": 200,
        "/api/search?run=0&text=%5B": 200,
        "/config.toml": 404,
    }

    async def main() -> None:
        async with served(growing.path) as (url, session):
            for path, status in {**texts, **found}.items():
                async with session.get(url[:-1] + path) as answer:
                    assert answer.status == status, path
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"
                    assert answer.headers["Cache-Control"] == "no-store" and "Server" in answer.headers
                    assert "Access-Control-Allow-Origin" not in answer.headers
            for method in ("POST", "OPTIONS", "HEAD", "PUT"):
                async with session.request(method, url) as answer:
                    assert answer.status == 405
            for name, status in {"evil.example": 403, "localhost:1": 200, "[::1]:9": 200, "[": 403, "": 403}.items():
                async with session.get(url, headers={"Host": name}) as answer:
                    assert answer.status == status, name
            assert not load_run(growing.path).problems[1:]

    asyncio.run(main())


def test_other_addresses_than_loopback_need_the_token(growing: GrowingRun) -> None:
    async def main() -> None:
        async with served(growing.path, host="0.0.0.0") as (url, session):
            port, _, token = url.rpartition(":")[2].partition("/?token=")
            assert len(token) > 20
            for path in ("", "api/data", "metrics", "nothing"):
                for given, status in (("", 403), (f"?token={token[:-1]}", 403), (f"?token={token}", 200)):
                    async with session.get(f"http://127.0.0.1:{port}/{path}{given}") as answer:
                        assert answer.status == (404 if (path, status) == ("nothing", 200) else status)
            async with session.get(f"http://127.0.0.1:{port}/?token={token}") as answer:
                assert token not in await answer.text() and answer.headers["Referrer-Policy"] == "no-referrer"

    asyncio.run(main())


def test_the_server_finds_texts_and_sends_one_group(growing: GrowingRun) -> None:
    async def main() -> None:
        async with served(growing.path) as (url, session):
            async with session.get(f"{url}api/search", params={"run": 0, "text": HOSTILE[0].upper()}) as answer:
                [found] = await answer.json()
            step, visit, rollout = found.split()
            query = {"run": 0, "step": step, "visit": visit}
            async with session.get(f"{url}api/texts", params=query) as answer:
                [group] = (await answer.json())["groups"]
            assert (step, rollout, group["visit"]) == ("1", "0", int(visit)) and len(group["rollouts"]) == 4

    asyncio.run(main())


def test_prometheus_reads_the_last_record_of_each_run(growing: GrowingRun, tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    other = Path(shutil.copytree(growing.path, tmp_path / 'so "called\\'))
    runs = [load_run(growing.path), load_run(other)]
    families = {family.name: family for family in parser.text_string_to_metric_families(watch.prometheus(runs))}
    rewards = {sample.labels["run"]: sample.value for sample in families["slipstream_reward_mean"].samples}
    assert rewards == dict.fromkeys(("run", 'so "called\\'), runs[0].metrics[-1]["reward/mean"])
    assert families["slipstream_eval_score"].type == "gauge" and "slipstream_rollout_failures" not in families
    assert {s.labels["run"]: s.value for s in families["slipstream_running"].samples}["run"] == 1.0
    twice = watch.prometheus([runs[0], load_run(growing.path)])  # the label of equal names is the path
    assert f'slipstream_step{{run="{growing.path}"}} 12.0' in twice and 'run="run"' not in twice


def test_a_wrong_argument_is_one_line(
    growing: GrowingRun, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = str(growing.path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, message in (
            ([str(tmp_path)], "holds no run (no config.toml)"),
            ([run, "--port", str(port)], f"--port {port} of 127.0.0.1 can't be used: Address already in use; choose"),
            ([run, "--port", "65536"], "--port 65536 is no port; choose one from 1 to 65535, or 0"),
            ([run, "--host", "a..b"], "--host 'a..b' is unknown; give an address of this machine"),
            ([run, "--host", ""], "--host '' is unknown"),
            ([run, "--host", "203.0.113.7"], "--port 0 of 203.0.113.7 can't be used: Cannot assign requested address"),
            ([run, "--loop.steps", "3"], "--loop.steps=3 is no option of this command"),
        ):
            assert cli.main(["watch", *arguments]) == 2
            output = capfd.readouterr()
            assert message in output.err and output.err.count("\n") == 1 and not output.out
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    assert cli.main(["watch", run]) == 2
    assert "slipstream watch needs aiohttp: pip install 'slipstream-rl[watch]'" in capfd.readouterr().err


def test_interrupt_ends_the_command(growing: GrowingRun) -> None:
    command = [sys.executable, "-m", "slipstream", "watch", str(growing.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        assert "Ctrl-C ends the server" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


@pytest.mark.skipif(browser.PROGRAM is None, reason="needs Chromium")
def test_a_page_follows_its_run_and_keeps_what_its_user_chose(growing: GrowingRun, tmp_path: Path) -> None:
    shutil.rmtree(growing.path / "policy")  # without a tokenizer the page shows completions as they were recorded

    async def main() -> None:
        async with (
            served(growing.path) as (url, _),
            browser.tab(url, tmp_path / "profile") as tab,
        ):
            assert await tab.run("document.querySelector('h1 + .badge').textContent") == "running"
            show = "document.querySelector('#{}').scrollIntoView()"
            await tab.run(show.format("rollouts"))
            await tab.until("charts.all.length > 2 && document.querySelector('.bar-button')")
            metric = await tab.run("charts.all.map((chart) => chart.metric).find((name) => !/^eval/.test(name))")
            await tab.run("charts.all[0].setSelect({left: 50, width: 100, top: 0, height: 100}); null")
            await tab.run("timeline.view = [1, 2]; [...document.querySelectorAll('.bar-button')].at(-1).click()")
            await tab.run("openGroup(1, state.data.runs[0].rollouts.visit[0], 0)")
            kept = "JSON.stringify([charts.range, timeline.view, rollouts.filter, scrollY])"
            before = await tab.run(kept)
            growing.add("env/new")
            assert await tab.run("POLL_MS") + 1000 * page_data.POLL_S < 2000  # until a step is on the page
            await tab.until(f"state.data.runs[0].metrics.step.length === {STEPS + 1} && !live.parts[3].isStale")
            assert await tab.run(kept) == before
            rows = "[...document.querySelectorAll('.rollouts tbody tr')].map((row) => row.cells[1].textContent)"
            assert "13" in await tab.run(rows)
            assert await tab.run("document.querySelectorAll('.completion')[0].textContent") == HOSTILE[0]
            for part in ("timeline", "curves", "summary"):
                await tab.run(show.format(part))
                await tab.until(f"!live.parts.find((part) => part.id === '{part}').isStale")
            assert await tab.run("timeline.rows[0].last") > growing.source.published[-2]
            assert "13 in" in await tab.run("document.querySelector('#summary').textContent")
            await tab.run("document.querySelector('#curves').scrollIntoView()")
            last = f"charts.all.find((chart) => chart.metric === '{metric}')?.data[0].at(-1)"
            await tab.until(f"{last} === {STEPS + 1}")  # the chart is drawn again when it comes near the window
            growing.rewind(6)
            await tab.until("state.data.runs[0].metrics.step.length === 6")
            growing.lock.close()
            await tab.until("document.querySelector('h1 + .badge').textContent === 'ended without a summary'")
            assert tab.errors == [] and {asked.partition("api/")[0] for asked in tab.requests} == {url}

    asyncio.run(main())
