"""Real vLLM on a CPU, in this process: adapters that come while it draws, and those that can't be loaded."""

from __future__ import annotations

import importlib.util
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import load_config
from slipstream.generators.base import Interruption
from slipstream.models import load_model, trained_parameters
from slipstream.rollout import Completion, Sampling

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(240),
]
BOUND = 1e-4
LONG = 200


class Served:
    """An engine and a trainer's adapters, without the processes around them."""

    def __init__(self, model: Path, directory: Path) -> None:
        from slipstream.generators.vllm import VllmEngine
        from slipstream.sync.adapters import AdapterSender

        flags = ["--sync.link=lora", "--lora.rank=4", "--generator.slots=8", "--loop.max_lag=1"]
        named = [f"--model.path={model}", "--environment.name=addition", "--generator.kind=vllm"]
        config = load_config(None, [*named, *flags])
        self.policy = load_model(config.model, config.lora, device=torch.device("cpu"), dtype=torch.float32)
        self.engine = VllmEngine(config)
        self.sender = AdapterSender(trained_parameters(self.policy), config, directory, 1)
        self.weights = self.engine.open_weights("lora", self.sender.offer(), 1)
        self.version = 0

    def change(self) -> dict[str, Any]:
        """Other adapters. Returns the ticket of their version."""
        self.version += 1
        torch.manual_seed(self.version)
        with torch.no_grad():
            for parameter in trained_parameters(self.policy).values():
                parameter.copy_(0.3 * torch.randn_like(parameter))
        return self.sender.stage(self.version)

    def prepare(self, ticket: dict[str, Any]) -> None:
        self.weights.prepare(ticket)
        while not self.weights.prepared():
            time.sleep(0.001)

    def publish(self, how: Interruption = "continue") -> None:
        ticket = self.change()
        self.prepare(ticket)
        self.engine.swap(self.version, self.weights.apply, how)
        self.sender.release(ticket)

    def finish(self) -> dict[Any, Completion]:
        found = {}
        while self.engine.busy:
            found.update(self.engine.step())
        return found

    def drew(self, completion: Completion) -> bool:
        """Whether the adapters as they are now drew this."""
        ids = torch.tensor([completion.prompt_ids + completion.token_ids[:-1]])
        with torch.no_grad():
            logits = self.policy(ids).logits[0, len(completion.prompt_ids) - 1 :]
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        return bool((wanted - torch.tensor(completion.logprobs)).abs().max() < BOUND)


@pytest.fixture(scope="module")
def served(patient: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(patient, tmp_path_factory.mktemp("adapters"))
    yield one
    one.sender.close()


def test_the_engine_draws_while_an_adapter_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes. Who is in flight then ends on the old adapter, who starts after the swap on the new."""
    from slipstream.generators import vllm_loader

    served.publish()
    served.engine.submit("old", [5, 6, 7], Sampling(max_tokens=LONG))
    going_on, read = threading.Event(), vllm_loader.AdapterFile.is_of

    def slow(*arguments: Any) -> Any:
        assert going_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(vllm_loader.AdapterFile, "is_of", slow)
    old = {name: p.clone() for name, p in trained_parameters(served.policy).items()}
    ticket = served.change()
    served.weights.prepare(ticket)
    for drawn in range(20):
        assert not served.weights.prepared()
        assert served.engine.drawn() == drawn, "a step draws a token"
        served.engine.step()
    going_on.set()
    while not served.weights.prepared():
        served.engine.step()
    served.engine.swap(served.version, served.weights.apply)
    served.sender.release(ticket)
    served.engine.submit("new", [5, 6, 7], Sampling(max_tokens=LONG))
    found = served.finish()
    assert served.drew(found["new"]) and not served.drew(found["old"])
    assert (found["old"].versions, found["new"].versions) == ((served.version - 1,) * 2, (served.version,) * 2)
    with torch.no_grad():
        for name, parameter in trained_parameters(served.policy).items():
            parameter.copy_(old[name])
    assert served.drew(found["old"])


def test_an_adapter_that_can_not_be_read_is_told_and_the_old_one_serves_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.generators import vllm_loader

    def fails(*_: Any) -> Any:
        raise OSError("no memory to read from")

    served.publish()
    served.engine.submit("before", [5, 6, 7], Sampling(max_tokens=LONG))
    old = {name: p.clone() for name, p in trained_parameters(served.policy).items()}
    ticket = served.change()
    with monkeypatch.context() as broken:
        broken.setattr(vllm_loader.AdapterFile, "is_of", fails)
        with pytest.raises(OSError, match="no memory to read from"):
            served.prepare(ticket)
    served.engine.submit("after", [5, 6, 8], Sampling(max_tokens=LONG))
    found = served.finish()
    with torch.no_grad():
        for name, parameter in trained_parameters(served.policy).items():
            parameter.copy_(old[name])
    assert served.drew(found["before"]) and served.drew(found["after"])
    served.publish()
    served.engine.submit("next", [5, 6, 7], Sampling(max_tokens=LONG))
    assert served.drew(served.finish()["next"])


def test_a_version_that_was_loaded_and_not_taken_may_come_again_with_other_values(served: Served) -> None:
    """As after a publish that failed at another generator."""
    served.prepare(served.change())
    served.version -= 1
    torch.manual_seed(0)
    served.publish()
    served.engine.submit("next", [5, 6, 7], Sampling(max_tokens=LONG))
    assert served.drew(served.finish()["next"])


def loader_of(served: Served) -> Any:
    return served.engine._llm.model_executor.driver_worker.worker._slipstream


def test_no_adapter_but_one_by_chance_goes_by_vllms_own_way(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies that it made are made again, into every slot, and leave there what it would have left."""
    from slipstream.generators import vllm_loader

    served.publish()
    monkeypatch.setattr(vllm_loader.AdapterLoader, "_own_way", None)
    for _ in range(loader_of(served)._slots.lora_slots + 1):
        served.publish()
        served.engine.submit("one", [5, 6, 7], Sampling(max_tokens=20))
        assert served.drew(served.finish()["one"])


def forget_to_scale(copies: Any, slot: int) -> None:
    torch._foreach_copy_(copies._places[slot], copies._sources)


def forget_a_copy(copies: Any, slot: int) -> None:
    torch._foreach_copy_(copies._places[slot][1:], copies._sources[1:])
    for number, factor in copies._factors.items():
        copies._places[slot][number].mul_(factor)


@pytest.mark.parametrize("broken", [None, forget_to_scale, forget_a_copy])
def test_what_does_not_come_out_the_same_goes_by_vllms_own_way(
    broken: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every version, and the first as well, though its adapters are zeros still."""
    from slipstream.generators import vllm_loader

    served.publish()
    loader = loader_of(served)
    if broken:
        monkeypatch.setattr(vllm_loader.Copies, "make", broken)
        loader._opened = None
    else:  # as where vLLM casts on the way
        loader._copies = None
    for number in range(3):
        ticket = served.change()
        if not number:
            with torch.no_grad():
                for name, parameter in trained_parameters(served.policy).items():
                    parameter.mul_("lora_A" in name)
            ticket = served.sender.stage(served.version)
        served.prepare(ticket)
        served.engine.swap(served.version, served.weights.apply)
        served.engine.submit(number, [5, 6, 7], Sampling(max_tokens=LONG))
        served.engine.step()
        assert loader._copies is None
        assert check(served) == published(served)
    found = served.finish()
    assert served.drew(found[2]) and not served.drew(found[1])
    monkeypatch.undo()
    loader._opened = None
    served.publish()
    assert loader._copies


def check(served: Served) -> dict[str, int]:
    """The checksums that the engine tells of all that is published."""
    served.weights.check(list(trained_parameters(served.policy)))
    while (found := served.weights.checked()) is None:
        time.sleep(0.001)
    return found


def published(served: Served) -> dict[str, int]:
    from slipstream.sync.checksum import checksum

    return {name: checksum(parameter.detach()) for name, parameter in trained_parameters(served.policy).items()}


def test_checksums_are_those_of_what_is_served(served: Served) -> None:
    """What came to the worker is added up, and its slot has the same values; else that is told."""
    served.publish()
    assert check(served) == published(served)
    loader = loader_of(served)
    _, slot = loader._coming
    loader._copies._places[slot][-1][0, 0] += 1
    with pytest.raises(RuntimeError, match="other values in its slot"):
        check(served)
    loader._copies.make(slot)
    loader._opened[1][0] += 1
    with pytest.raises(RuntimeError, match="other values in its slot"):
        check(served)
    loader._copies.make(slot)
    assert check(served) != published(served)


def test_adapters_in_other_memory_are_refused(served: Served, tmp_path: Path) -> None:
    from slipstream.sync.adapters import AdapterSender

    served.publish()
    flags = [f"--model.path={tmp_path}", "--environment.name=addition", "--generator.kind=vllm", "--sync.link=lora"]
    other = AdapterSender(trained_parameters(served.policy), load_config(None, [*flags, "--lora.rank=4"]), tmp_path, 1)
    with pytest.raises(RuntimeError, match="other memory than before"):
        served.prepare(other.stage(served.version + 1))
    other.close()
    served.publish()
    served.engine.submit("next", [5, 6, 7], Sampling(max_tokens=20))
    assert served.drew(served.finish()["next"])


def test_what_verify_compares_with_vllm_has_read_itself(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.generators import vllm_loader

    served.publish()
    served.change()
    served.policy.save_pretrained(tmp_path / "B")
    monkeypatch.setattr(vllm_loader, "AdapterLoader", None)
    served.engine.load_adapter(str(tmp_path / "B"))
    served.engine.submit("next", [5, 6, 7], Sampling(max_tokens=20))
    assert served.drew(served.finish()["next"])


def test_no_adapter_in_use_is_moved(served: Served) -> None:
    """There is a slot for the one that comes, as many as are in use; they are read once, and never from their files."""
    manager: Any = served.engine._llm.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
    slots: list[set[tuple[int, int]]] = []
    for number in range(5):
        served.publish()
        served.engine.submit(number, [5, 6, 7 + number], Sampling(max_tokens=LONG))
        served.engine.step()
        slots.append({(i, adapter) for i, adapter in enumerate(manager.lora_index_to_id) if adapter})
    assert all(len({adapter for _, adapter in now}) == len(now) == 3 for now in slots[2:])
    assert all(len(before & after) == 2 for before, after in itertools.pairwise(slots[2:]))
    served.finish()


@pytest.mark.parametrize("how", ["retry", "continue"])
def test_tokens_of_sequences_that_begin_anew_are_wasted(how: Interruption, served: Served) -> None:
    """At the next version under `retry`, and else when there is no room any more for the one that they began with."""
    served.publish()
    before = served.engine.tokens_wasted
    served.engine.submit("one", [5, 6, 7], Sampling(max_tokens=LONG))
    for publishes in range(1, 5):
        while served.engine.drawn() < 5 * publishes:
            served.engine.step()
        served.publish(how)
        if served.engine.tokens_wasted > before:
            break
        served.engine.submit(publishes, [5, 6, 7], Sampling(max_tokens=LONG))  # it is one more adapter in use
    assert publishes == (1 if how == "retry" else 3)
    assert served.engine.tokens_wasted - before == 5 * publishes
    found = served.finish()
    assert found["one"].versions == (served.version, served.version) and served.drew(found["one"])
