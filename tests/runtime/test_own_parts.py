"""User-defined generators, trainers and links, named by file or module."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.controller.launch import Cluster
from slipstream.errors import UserError
from slipstream.sync.link import find_link

PARTS = """
from asyncio import CancelledError
from slipstream.generators.generator_worker import GeneratorWorker
from slipstream.trainers.trainer_worker import PytorchTrainerWorker
from slipstream.sync.link import Receiver, Sender
from slipstream.sync.shared import Shared

class Generator(GeneratorWorker): pass
class Trainer(PytorchTrainerWorker): pass
class Link(Shared): pass
class Plain: pass
class Hollow:
    def __init__(self, *arguments): pass

class Stop(BaseException): pass

def raises(error):
    def start(self, *arguments): raise error
    return type("Raises", (GeneratorWorker,), {"__init__": start})

Lines, Value, Ends = raises(RuntimeError("one\\ntwo")), raises(ValueError("one\\ntwo")), raises(Stop("at once"))
Exits, Interrupted, Cancelled = raises(SystemExit(3)), raises(KeyboardInterrupt()), raises(CancelledError("gone"))

class PlainLink: Sender = Receiver = Plain
class BareLink: Sender, Receiver = Sender, Receiver
class LateKind(type):
    @property
    def Sender(cls): raise KeyError("late")
class LateLink(metaclass=LateKind): pass
class FunctionLink: Sender = Receiver = raises
class RaisingLink(Shared):
    Sender = type("Raises", (Shared.Sender,), {"__init__": raises(OSError("one\\ntwo")).__init__})
class RaisingReceiver(Shared):
    Receiver = type("Raises", (Shared.Receiver,), {"__init__": raises(Stop("at once")).__init__})
"""


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    path = tmp_path / "parts.py"
    path.write_text(PARTS)
    return path


def start(model: Path, directory: Path, **kinds: str) -> str:
    """The connected link of a run with these classes."""
    flags = [f"--{name.replace('_', '.')}={kind}" for name, kind in kinds.items()]

    async def main() -> str:
        config = load_config(None, [f"--model.path={model}", "--environment.name=addition", *flags])
        pools = await Cluster.start(config, directory)
        try:
            await pools.link.connect(0)
            return str((await pools.link.publish(1)).version)
        finally:
            await pools.close()

    return asyncio.run(main())


def test_a_file_holds_generator_trainer_and_link(tiny: Path, parts: Path, tmp_path: Path) -> None:
    kinds = {"generator_engine": "Generator", "trainer_kind": "Trainer", "sync_link": "Link"}
    assert start(tiny, tmp_path, **{option: f"{parts}:{name}" for option, name in kinds.items()}) == "1"


def test_a_module_holds_an_engine(tiny: Path, parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts.rename(tmp_path / "own_engine.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert start(tiny, tmp_path, generator_engine="own_engine:Generator") == "1"


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("generator.engine", "{file}:Generatr", "has no attribute 'Generatr' (did you mean Generator?)"),
        ("trainer.kind", "{folder}/part.py:Trainer", "part.py (did you mean parts.py?)"),
        ("generator.engine", "no_such_module:Generator", "No module named 'no_such_module'"),
        (
            "trainer.kind",
            "{file}:Plain",
            "it can't be called with 2 arguments (too many positional arguments); docs/own",
        ),
        ("generator.engine", "{file}:Hollow", "it has no attribute 'checksums'; docs/own-parts.md says what it needs"),
        ("generator.engine", "{file}:Lines", "RuntimeError: one two ("),
        ("trainer.kind", "{file}:Value", "ValueError: one two ("),
        ("generator.engine", "{file}:Value", "ValueError: one two ("),
        ("generator.engine", "{file}:Ends", "Stop: at once ("),
        ("generator.engine", "{file}:Exits", "SystemExit: 3 ("),
        ("generator.engine", "{file}:Interrupted", "KeyboardInterrupt ("),
        ("generator.engine", "{file}:Cancelled", "CancelledError: gone ("),
    ],
)
def test_a_misspelt_worker_class_is_an_error_of_one_line(
    option: str, name: str, said: str, tiny: Path, parts: Path, tmp_path: Path
) -> None:
    kind = name.format(file=parts, folder=parts.parent)
    with pytest.raises(ConfigError) as caught:
        start(tiny, tmp_path, **{option.replace(".", "_"): kind})
    assert str(caught.value).startswith(f'{option} = "{kind}" can\'t be loaded: ') and said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{file}:Lnk", "has no attribute 'Lnk' (did you mean Link?)"),
        ("{folder}/pats.py:Link", "pats.py (did you mean parts.py?)"),
        ("{file}:Plain", "has no Sender; a link has a Sender and a Receiver"),
        ("{file}:PlainLink", "derive it from slipstream.sync.link.Sender; docs/own-parts.md"),
        ("{file}:BareLink", "its Sender does not implement connection_info, stage; docs/own-parts.md"),
        ("{file}:FunctionLink", "and no class"),
        ("{file}:LateLink", "can't be loaded: KeyError: 'late' ("),
    ],
)
def test_a_misspelt_link_is_an_error_of_one_line(name: str, said: str, parts: Path) -> None:
    link = name.format(file=parts, folder=parts.parent)
    with pytest.raises(ConfigError) as caught:
        find_link(link)
    assert str(caught.value).startswith(f'sync.link = "{link}"') and said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"), [("RaisingLink", "OSError: one two ("), ("RaisingReceiver", "Stop: at once (")]
)
def test_a_link_whose_end_raises_is_an_error_of_one_line(name: str, said: str, tiny: Path, parts: Path) -> None:
    with pytest.raises(UserError) as caught:
        start(tiny, parts.parent, sync_link=f"{parts}:{name}")
    assert f'sync.link = "{parts}:{name}" can\'t be loaded: {said}' in str(caught.value)
    assert "\n" not in str(caught.value) and not getattr(caught.value, "__notes__", [])
