"""The data of the page of `slipstream report`, and the file that holds it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import cli, load_run
from slipstream.controller.finish import write_page
from slipstream.observe.estimates import wilson_interval
from slipstream.observe.health import WHILE_RUNNING
from slipstream.observe.page import data, render, write_report
from slipstream.observe.page.data import page_data, run_data
from slipstream.observe.page.render import json_pieces, pack
from slipstream.observe.page.rollouts import TokenTexts, spread, step_texts
from slipstream.observe.recorder import SCHEMA
from slipstream.observe.score import compare_scores
from tests.observe.synthetic import SyntheticRun, build_tokenizer

STEPS, GROUPS, SIZE = 20, 2, 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SyntheticRun(tmp_path_factory.mktemp("page") / "run", STEPS, GROUPS, SIZE).write()


@pytest.fixture
def copy(path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(path, tmp_path / "run"))


def data_of(html: str, name: str = "data") -> Any:
    found = re.search(rf'<script type="application/json" id="{name}">([^<]*)</script>', html)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def columns_of(data: dict[str, Any]) -> dict[str, list[Any]]:
    """The columns of the rollouts of all steps."""
    names = dict.fromkeys(name for step in data["rollouts"] for name in step)
    return {name: [value for step in data["rollouts"] for value in step[name]] for name in names}


def test_the_columns_of_rollouts_are_those_of_the_records(path: Path) -> None:
    run = load_run(path)
    columns = columns_of(run_data(run))
    rows = [row for step in run.rollout_steps for row in run.rollouts(step)]
    assert len(columns["step"]) == len(rows) == STEPS * GROUPS * SIZE
    for i, row in enumerate(rows):
        spans = row["spans"]
        assert (columns["visit"][i], columns["rollout"][i]) == (row["visit_id"], row["rollout"])
        assert columns["tokens"][i] == len(row["completion_ids"]) and columns["turns"][i] == 1
        assert (columns["oldest"][i], columns["newest"][i]) == (spans[0]["version"], spans[-1]["version"])
        assert (columns["task"][i], columns["reason"][i]) == (row["task_id"], row["finish_reason"])
        assert columns["env/correct"][i] == dict(row["metrics"])["correct"]


def test_the_timeline_has_the_events_that_are_drawn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(path)
    found = run_data(run)
    assert found["events"] == [e for e in run.events if e["kind"] != "engine"] and "engine 0" in found["fractions"]
    assert found["verdict"].startswith("Of the time since the first rollout")
    monkeypatch.setattr(data, "MAX_ROLLOUTS", STEPS * GROUPS * SIZE // 2)
    half = run_data(run)
    assert half["every"] == 2 and len(half["rollouts"]) == STEPS // 2
    assert sum(e["kind"] == "group" for e in half["events"]) == STEPS * GROUPS // 2
    assert sum(e["kind"] == "step" for e in half["events"]) == STEPS


def test_faults_name_engines_as_the_timeline_does(copy: Path) -> None:
    with (copy / "events.jsonl").open("a") as file:
        event = {"kind": "fault", "track": "engine 0", "start": 92, "end": None, "what": "generator 0 died"}
        file.write(json.dumps(event) + "\n")
    assert run_data(load_run(copy))["events"][-1]["what"] == "engine 0 died"


def test_tokens_and_their_text_are_those_of_the_records(path: Path) -> None:
    run = load_run(path)
    texts = TokenTexts.of(run)
    block = step_texts(run, 2, texts)
    assert block is not None and texts.tokenizer
    rows = run.rollouts(2)
    shown = [rollout["turns"][0] for group in block["groups"] for rollout in group["rollouts"]]
    by_ids = {tuple(row["completion_ids"]): row for row in rows}
    assert len(shown) == len(rows)
    for turn in shown:
        text = "".join(block["pieces"][i] for i in turn["tokens"])
        row = next(row for row in rows if row["completion"] + "<eos>" == text)
        assert turn["logprobs"] == [round(-100 * p) for p in row["logprobs"]]
        assert turn["spans"] == [[s["version"], s["start"], s["end"]] for s in row["spans"]]
    assert len(by_ids) == len(rows)


def test_turns_and_what_the_environment_said(copy: Path) -> None:
    def row(turn: int, prompt: list[int], sampled: list[int]) -> dict[str, Any]:
        return {
            "step": 1, "visit_id": 1, "task_id": "t", "rollout": 0, "role": "", "turn": turn, "prompt": "p",
            "completion": "c", "prompt_ids": prompt, "completion_ids": sampled, "reward": 1.0,
            "advantage": float("nan"),
            "spans": [{"version": turn, "start": 0, "end": len(sampled)}], "logprobs": [float("nan")] * len(sampled),
            "finish_reason": "stop", "temperature": 1.0, "metrics": [], "steps": [], "teacher": [],
        }  # fmt: skip

    rows = [row(0, [4], [5, 6]), row(1, [4, 5, 6, 7, 8], [9]), row(2, [3], [9] * 9_000)]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), copy / "rollouts" / "step_000001.parquet")
    run = load_run(copy)
    found = step_texts(run, 1, TokenTexts(build_tokenizer().backend_tokenizer))
    assert found is not None
    (rollout,) = found["groups"][0]["rollouts"]
    assert [turn.get("environment") for turn in rollout["turns"]] == [None, "56", "p"]  # the last one was rewritten
    assert rollout["turns"][2]["cut"] == 1_000 and rollout["turns"][0]["logprobs"] == [None, None]
    columns = run_data(run)["rollouts"][0]
    assert [columns[name][0] for name in ("turns", "tokens", "oldest", "newest", "advantage")] == [3, 9003, 0, 2, None]


def test_a_character_of_several_tokens_belongs_to_the_first() -> None:
    class Bytes:
        def encode(self, text: str, add_special_tokens: bool) -> Any:
            return SimpleNamespace(ids=list(text.encode()))

        def decode(self, ids: list[int], **options: bool) -> str:
            return bytes(ids).decode("utf-8", "replace")

    assert TokenTexts(Bytes()).split(list("aé!".encode())) == ["a", "é", "", "!"]


def test_without_a_tokenizer_long_texts_are_cut(copy: Path) -> None:
    shutil.rmtree(copy / "policy")
    (copy / "config.toml").unlink()  # which names the model
    run = load_run(copy)
    table = run.table(1)
    assert table is not None
    rows = [row | {"completion": "x" * 1_000_000} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), copy / "rollouts" / "step_000001.parquet")
    found = step_texts(run, 1, TokenTexts.of(run))
    assert found is not None
    (turn,) = found["groups"][0]["rollouts"][0]["turns"]
    assert len(turn["text"]) + turn["cut"] == 1_000_000 and len(turn["text"]) <= 60_000


def test_scores_have_intervals() -> None:
    def evaluation(rewards: list[float], tasks: int | None = None) -> dict[str, Any]:
        samples = [{"id": str(i), "reward": reward} for i, reward in enumerate(rewards)]
        return {"eval/score": sum(rewards) / len(rewards), "eval/tasks": tasks or len(rewards), "samples": samples}

    paired = compare_scores([evaluation([0.0] * 5 + [1.0] * 5), evaluation([0.0] * 2 + [1.0] * 8)])
    assert paired is not None and "pairs" in paired["method"]
    assert paired["difference"] == pytest.approx([0.3, 0.3 - 2.2622 * 0.1527525, 0.3 + 2.2622 * 0.1527525], abs=1e-4)
    assert paired["before"] == pytest.approx([0.5, 0.2366, 0.7634], abs=1e-4)  # Wilson (1927)
    sampled = compare_scores([evaluation([0.5, 0.5], 56), evaluation([0.7, 0.7], 48)])
    assert sampled is not None and "binomial" in sampled["method"]
    assert sampled["difference"] == pytest.approx([0.2, 0.0106, 0.3681], abs=5e-3)
    above = compare_scores([evaluation([3.0, 5.0], 9)])
    assert above is not None and above["before"] == [4.0, None, None] and above["after"] is None
    assert compare_scores([]) is None and wilson_interval(0.0, 10).low == 0.0


def test_differences_of_independent_fractions_are_newcombe_s() -> None:
    """The first example of Newcombe (1998): 56 of 70 and 48 of 80 differ by 0.2, from 0.0524 to 0.3339."""
    found = compare_scores([{"eval/score": 48 / 80, "eval/tasks": 80}, {"eval/score": 56 / 70, "eval/tasks": 70}])
    assert found is not None and found["difference"] == pytest.approx([0.2, 0.0524, 0.3339], abs=1e-4)


def test_the_file_holds_all_and_its_policy_allows_only_its_own_parts(copy: Path, tmp_path: Path) -> None:
    with (copy / "events.jsonl").open("a") as file:
        event = {"kind": "fault", "track": "</script><script>alert(1)</script>", "start": 1.0, "what": "\ud800 <!--"}
        file.write(json.dumps(event) + "\n")
    write_report([load_run(copy)], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    data = data_of(html)["runs"][0]
    assert data["events"][-1]["track"] == "</script><script>alert(1)</script>" and "alert(1)" not in html
    assert data["state"] == "complete" and data["texts"] == list(range(1, STEPS + 1))
    assert data_of(html, "texts-0-3")["step"] == 3
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None and "default-src &#39;none&#39;" in policy[1] and "unsafe" not in policy[1]
    for kind in ("script", "style"):
        parts = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.S)
        assert len(parts) == 2
        for part in parts:
            assert base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() in policy[1]
    assert not re.search(r"""(src|href)=["'](?!#)""", re.sub(r"<script>.*?</script>", "", html, flags=re.S))
    assert "innerHTML" not in html and "connect-src" not in html
    assert "connect-src &#39;self&#39;" in render({"runs": [data]}, live=True)


def test_damaged_and_missing_records_are_named(copy: Path, tmp_path: Path) -> None:
    (copy / "rollouts" / "step_000002.parquet").write_bytes(b"PAR1 damaged")
    (copy / "metrics.jsonl").write_text((copy / "metrics.jsonl").read_text()[:-20])
    pq.write_table(pa.table({"step": [4], "completion": ["4"]}), copy / "rollouts" / "step_000004.parquet")
    (copy / "summary.json").unlink()
    (copy / "events.jsonl").unlink()
    write_report([load_run(copy)], tmp_path / "page.html")
    data = data_of((tmp_path / "page.html").read_text())["runs"][0]
    assert data["state"] == "dead" and data["verdict"] is None and len(data["metrics"]["step"]) == STEPS - 1
    assert sorted(set(columns_of(data)["step"])) == [1, 3, *range(5, STEPS + 1)]
    said = "\n".join(data["problems"])
    assert "step_000002.parquet can't be read" in said and "events.jsonl is missing" in said and "killed" in said
    assert "step_000004.parquet can't be read" in said


def test_a_run_without_a_step(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[loop]\nsteps = 3\n")
    data = page_data([load_run(tmp_path)])["runs"][0]
    assert data["rollouts"] == [] and data["score"] is None and data["facts"][0][1] == "– → –"
    assert "no step is recorded" in data["problems"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(JSON)
def test_json_in_pieces_is_json(data: Any) -> None:
    assert json.loads("".join(json_pieces(data))) == json.loads(json.dumps(data))


def test_no_piece_of_json_holds_the_columns_of_two_steps() -> None:
    steps = [{"step": [step] * 100, "reward": [0.5] * 100} for step in range(3)]
    assert max(map(len, json_pieces({"runs": [{"rollouts": steps}]}))) <= len(json.dumps([0.5] * 100))


def test_numbers_that_are_not_finite_are_null() -> None:
    packed = pack({"advantage": float("nan"), "rewards": [float("inf"), 1.5]})
    assert gzip.decompress(base64.b64decode(packed)) == b'{"advantage":null,"rewards":[null,1.5]}'


def test_causes_come_before_consequences_and_a_death_is_one_entry(copy: Path) -> None:
    why = "died (log: logs/generator_1.log): It was killed by SIGKILL"
    died = f"generator 1 {why}; 1 of 2 generators are left"
    (copy / "summary.json").write_text(json.dumps({"engines_lost": [died]}))
    rules = {"trainer-idle": 2, "large-updates": 9, "engine-lost": 4, "gone": 3, "mismatch": 1, "entropy-collapse": 8}
    event = {"kind": "warning", "track": "controller", "start": 1.0, "text": "", "remedy": f"A{WHILE_RUNNING}B"}
    events = [e for e in load_run(copy).events if e["kind"] != "warning"]
    events += [event | {"rule": rule, "step": step} for rule, step in rules.items()]
    (copy / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    found = run_data(load_run(copy))
    assert [(w["rule"], w["follows"]) for w in found["warnings"]] == [
        ("gone", None), ("engine-lost", None), ("large-updates", None), ("mismatch", "large-updates"),
        ("trainer-idle", "engine-lost"), ("entropy-collapse", "large-updates"),
    ]  # fmt: skip
    assert found["warnings"][1]["detail"] == [f"engine 1 {why}"] and found["warnings"][1]["remedy"] == "A"
    assert found["verdict"] is None, "trainer-idle has who waited"
    (copy / "events.jsonl").write_text((copy / "events.jsonl").read_text().replace("trainer-idle", "no-signal"))
    assert run_data(load_run(copy))["verdict"].startswith("Of the time since the first rollout")
    assert not set(re.findall("; (?:raise|add|give|use) ", run_data(load_run(copy))["verdict"]))
    assert not any("engine 1" in fault for fault in found["faults"])


def test_steps_are_spread() -> None:
    assert spread(list(range(1, 10))) == [1, 9, 5, 3, 7, 2, 4, 6, 8]
    assert [spread(list(range(n))) for n in range(3)] == [[], [0], [0, 1]]


def test_the_command(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(copy)]) == 0
    assert capsys.readouterr().out.strip() == str(copy / "report.html") and (copy / "report.html").exists()
    before = (copy / "report.html").read_text()
    assert cli.main(["report", str(copy), str(copy)]) == 0
    assert capsys.readouterr().out.strip() == str(copy / "comparison.html")
    assert (copy / "report.html").read_text() == before, "a comparison replaces no run's own page"
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert cli.main(["report", str(copy), "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert "choose another file with --output" in capsys.readouterr().err


def test_a_page_that_a_run_fails_to_write_is_a_warning(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run: Any = SimpleNamespace(directory=SimpleNamespace(path=copy), stopped=None)
    write_page(run)
    assert data_of((copy / "report.html").read_text())["runs"][0]["state"] == "complete"
    assert capsys.readouterr().err == ""
    (copy / "report.html").unlink()
    (copy / "report.html").mkdir()
    write_page(run)
    assert "report.html was not written: IsADirectoryError: " in capsys.readouterr().err
