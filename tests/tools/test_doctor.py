"""`slipstream doctor` on this host."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config.loading import load_config
from slipstream.controller import node_checks
from slipstream.controller.node_checks import Examination, check_nodes, examine
from slipstream.controller.node_faults import Fault
from slipstream.controller.node_worker import NodeWorker
from slipstream.errors import RunError
from slipstream.runtime.addresses import INTERFACE, LOOPBACK
from slipstream.runtime.process import Launch, LocalProcess
from slipstream.runtime.runtime import Node, Runtime


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("")
    return tmp_path


def found(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Results and faults of `--json`."""
    printed = json.loads(capsys.readouterr().out)
    return printed["checks"], printed["faults"]


def flags(tiny: Path, environment: str = "addition") -> list[str]:
    return [
        f"--model.path={tiny}",
        f"--environment.name={environment}",
        "--trainer.device=cpu",
        "--generator.device=cpu",
    ]


def test_a_machine_is_checked_without_a_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "/dev/shm" in printed and "model files" in printed and printed.endswith("no faults\n")
    assert [path.name for path in folder.iterdir()] == ["run.toml"]  # nothing is left over


def test_options_that_do_not_go_with_the_model_are_faults(
    folder: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--trainer.ranks=3", "--trainer.context_parallel=3", *flags(tiny)]
    assert main(["doctor", "run.toml", "--json", *wrong]) == 1
    results, faults = found(capsys)
    assert results["options"] == "1 fault"
    assert [fault["text"] for fault in faults if fault["check"] == "options"] == [
        "trainer.context_parallel = 3 can't share out a model with 4 heads and 2 of keys and values; give 1"
    ]


def test_a_run_of_two_ranks_is_checked_with_an_all_reduce(
    folder: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "run.toml", "--json", "--trainer.ranks=2", *flags(tiny)]) == 0
    results, faults = found(capsys)
    assert results["all-reduce"] == results["model files"] == "ok" and not faults
    assert results["bandwidth"] == "skipped: one node"


def test_a_model_and_a_plugin_that_are_missing_are_faults(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken.py").write_text("import no_such_library")
    assert main(["doctor", "run.toml", "--json", *flags(folder / "none", "broken.py:Environment")]) == 1
    results, faults = found(capsys)
    texts = {fault["check"]: fault["text"] for fault in faults}
    assert "no such directory" in texts["model files"] and "no_such_library" in texts["imports"]
    assert results["imports"] == "1 fault" and results["environment"] == "skipped: its import fails"


def test_an_environment_that_can_not_be_made_is_a_fault(
    folder: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own.py").write_text("print('imported')\nclass Own:\n    train, test, rollout = [], [], None\n")
    assert main(["doctor", "run.toml", "--json", "--trainer.kind=none.py:T", *flags(tiny, "own.py:Own")]) == 1
    results, faults = found(capsys)
    assert results["imports"] == results["environment"] == "1 fault"
    assert [fault["text"] for fault in faults if fault["check"] == "environment"] == [
        "environment.name = 'own.py:Own' has no training tasks; check environment.options"
    ]


def test_more_gpus_than_there_are_is_a_fault(folder: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"--model.path={tiny}", "--environment.name=addition", "--generator.tensor_parallel_size=2"]
    given += ["--generator.engine=vllm"]
    assert main(["doctor", "run.toml", *given]) == 1
    assert "GPUs: generator.tensor_parallel_size = 2, but there are 0 GPUs here" in capsys.readouterr().out


def test_a_wrong_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--runtime.knd=ray"]) == 2
    assert "runtime.knd" in capsys.readouterr().err


def silent(launch: Launch) -> LocalProcess:
    """A process on a node that does not answer."""
    process = LocalProcess(launch)
    os.kill(process.pid, signal.SIGSTOP)
    return process


class WithSilent(Runtime):
    def nodes(self) -> list[Node]:
        return [*super().nodes(), Node("silent", "127.0.0.1", silent)]


def test_a_node_that_does_not_answer_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_checks, "REPORT_TIMEOUT_S", 5.0)
    examination = asyncio.run(examine(WithSilent(), None, tmp_path))
    assert [fault.check for fault in examination.faults] == ["nodes"] and len(examination.reports) == 1
    assert examination.faults[0].text.startswith("node silent did not answer within 5 s; see `ray status`")


def test_a_directory_that_a_node_does_not_see_is_a_fault(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    [fault] = asyncio.run(examine(Runtime(), None, tmp_path, elsewhere={gethostname(): other})).faults
    assert fault.check == "run directory" and "is another directory there" in fault.text
    none = {gethostname(): tmp_path / "none"}
    [fault] = asyncio.run(examine(Runtime(), None, tmp_path, elsewhere=none)).faults
    assert "is not there" in fault.text


def test_a_directory_that_cannot_be_written_is_one_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [fault] = asyncio.run(examine(Runtime(), None, Path("/proc/self"))).faults
    assert fault.check == "run directory" and fault.text.startswith("/proc/self can't be written (")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    [fault] = asyncio.run(examine(Runtime(), None, tmp_path)).faults
    assert fault.text.startswith(f"{tmp_path} can't be written (No space left on device)")


def test_faults_end_a_run_in_one_line_each(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, flags(tiny))
    faults = Examination(faults=[Fault("limits", "first"), Fault("GPUs", "second")])

    async def found(*_: object, **__: object) -> Examination:
        return faults

    monkeypatch.setattr(node_checks, "examine", found)
    with pytest.raises(RunError, match=r"\nlimits: first\nGPUs: second$"):
        asyncio.run(check_nodes(config, tmp_path))


class TwoHosts(Runtime):
    """Two hosts, which are this one under two addresses."""

    hosts = 2

    def nodes(self) -> list[Node]:
        return [Node("one", "127.0.0.1", LocalProcess), Node("two", "127.0.0.2", LocalProcess)]


def test_a_start_measures_the_network_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of the link and the checks of the nodes use the same rates. The next start measures again."""
    measured, runtime = list[int](), TwoHosts()

    async def counted(items: Any, *arguments: Any, measure: Any = node_checks.in_rounds) -> Any:
        measured.append(len(items))
        return await measure(items, *arguments)

    monkeypatch.setattr(node_checks, "in_rounds", counted)
    monkeypatch.setattr(node_checks, "current_runtime", lambda: runtime)
    config = load_config(None, flags(tiny))
    for start in (1, 2):
        assert asyncio.run(node_checks.measure_network(runtime, config)).rate > 0
        asyncio.run(check_nodes(config, tmp_path))
        assert measured == [2] * start
    asyncio.run(check_nodes(config, tmp_path))
    assert measured == [2] * 3, "without a choice of the link the checks measure"


def test_the_network_of_the_link_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "lo")
    host, port = asyncio.run(NodeWorker().listen("192.0.2.1"))  # an address that this host does not have
    assert host == LOOPBACK and asyncio.run(NodeWorker().connect((host, port))) == ""
