"""Real vLLM on a CPU, in this process: adapters that arrive while it decodes, and adapters that fail to load."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config.loading import load_config
from slipstream.generators.base import Interruption
from slipstream.model.inspection import trained_parameters
from slipstream.model.loading import load_model
from slipstream.rollout import Completion, Sampling

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(240),
]
BOUND = 1e-4
LONG = 200


class Served:
    """An engine and a trainer's adapters on some layers, without the processes around them."""

    def __init__(self, model: Path, directory: Path, *more: str) -> None:
        from slipstream.generators.vllm.engine import VllmEngine
        from slipstream.sync.adapters import AdapterSender

        flags = ["--sync.link=lora", "--lora.rank=4", "--generator.max_num_seqs=8", "--loop.max_lag=1",
                 "--lora.use_rslora=true", r"--lora.target_pattern=.*\.layers\.[02]\..*_proj"]  # fmt: skip
        named = [f"--model.path={model}", "--environment.name=addition", "--generator.engine=vllm"]
        config = load_config(None, [*named, *flags, *more])
        self.policy = load_model(config.model, config.lora, device=torch.device("cpu"), dtype=torch.float32)
        self.engine = VllmEngine(config)
        self.sender = AdapterSender(trained_parameters(self.policy), config, directory, 1)
        self.weights = self.engine.open_weights("lora", self.sender.connection_info(), 1)
        self.version = 0

    def change(self) -> dict[str, Any]:
        """Change the adapters. Returns the handle of their version."""
        self.version += 1
        torch.manual_seed(self.version)
        with torch.no_grad():
            for parameter in trained_parameters(self.policy).values():
                parameter.copy_(0.3 * torch.randn_like(parameter))
        return self.sender.stage(self.version)

    def prepare(self, handle: dict[str, Any]) -> None:
        self.weights.prepare(handle)
        while not self.weights.prepared():
            time.sleep(0.001)

    def publish(self, how: Interruption = "continue") -> None:
        handle = self.change()
        self.prepare(handle)
        self.engine.swap(self.version, self.weights.apply, how)
        self.sender.release(handle)

    def restore(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in trained_parameters(self.policy).items():
                parameter.copy_(values[name])

    def finish(self) -> dict[Any, Completion]:
        found = {}
        while self.engine.busy:
            found.update(self.engine.step())
        return found

    def drew(self, completion: Completion) -> bool:
        """Whether the current adapters sampled this completion."""
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


def test_the_engine_decodes_while_an_adapter_is_loaded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any loading time. Sequences in flight finish on the old adapter, later ones use the new adapter."""
    from slipstream.generators.vllm import lora_worker as vllm_loader

    served.publish()
    served.engine.submit("old", [5, 6, 7], Sampling(max_tokens=LONG))
    going_on, read = threading.Event(), vllm_loader.read_adapter

    def slow(*arguments: Any) -> Any:
        assert going_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(vllm_loader, "read_adapter", slow)
    old = {name: p.clone() for name, p in trained_parameters(served.policy).items()}
    handle = served.change()
    served.weights.prepare(handle)
    for drawn in range(20):
        assert not served.weights.prepared()
        assert served.engine.longest_in_flight() == drawn, "a step draws a token"
        served.engine.step()
    going_on.set()
    while not served.weights.prepared():
        served.engine.step()
    served.engine.swap(served.version, served.weights.apply)
    served.sender.release(handle)
    served.engine.submit("new", [5, 6, 7], Sampling(max_tokens=LONG))
    found = served.finish()
    assert served.drew(found["new"]) and not served.drew(found["old"])
    assert (found["old"].versions, found["new"].versions) == ((served.version - 1,) * 2, (served.version,) * 2)
    served.restore(old)
    assert served.drew(found["old"])


def test_sequences_that_sleep_across_a_swap_finish_on_their_adapter(served: Served) -> None:
    """As colocated ones do: their keys and values are lost, and recomputed after the wake-up."""
    served.publish()
    served.engine.submit("old", [5, 6, 7], Sampling(max_tokens=LONG))
    for _ in range(20):
        served.engine.step()
    served.engine.sleep(2)
    served.engine.wake(["weights"])
    old = {name: p.clone() for name, p in trained_parameters(served.policy).items()}
    served.publish()
    served.engine.wake(["kv_cache"])
    served.engine.submit("new", [5, 6, 7], Sampling(max_tokens=LONG))
    found = served.finish()
    assert served.drew(found["new"]) and not served.drew(found["old"])
    assert (found["old"].versions, found["new"].versions) == ((served.version - 1,) * 2, (served.version,) * 2)
    served.restore(old)
    assert served.drew(found["old"])


@pytest.mark.parametrize("how", ["continue", "retry"])
def test_queued_sequences_use_the_newest_adapter(how: Interruption, served: Served) -> None:
    """vLLM samples 8 sequences at a time; of 11 the last 3 have no token at the swap. Restarts keep the order."""
    served.publish()
    before = served.engine.tokens_discarded
    for number in range(11):
        served.engine.submit(number, [5, 6, 7 + number], Sampling(max_tokens=LONG))
    while served.engine.longest_in_flight() < 5:
        served.engine.step()
    served.publish(how)
    restarted = [*range(11)] if how == "retry" else [8, 9, 10]
    assert [request.key for request in served.engine._waiting] == restarted
    found = served.finish()
    old = served.version - 1
    assert [found[n].versions[0] for n in range(11)] == [old + (n in restarted) for n in range(11)]
    assert [served.drew(found[n]) for n in range(11)] == [n in restarted for n in range(11)]
    assert (served.engine.tokens_discarded == before) == (how == "continue")


def test_an_unreadable_adapter_is_reported_and_the_old_one_is_still_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.generators.vllm import lora_worker as vllm_loader

    def fails(*_: Any) -> Any:
        raise OSError("no memory to read from")

    served.publish()
    served.engine.submit("before", [5, 6, 7], Sampling(max_tokens=LONG))
    old = {name: p.clone() for name, p in trained_parameters(served.policy).items()}
    handle = served.change()
    with monkeypatch.context() as broken:
        broken.setattr(vllm_loader, "read_adapter", fails)
        with pytest.raises(OSError, match="no memory to read from"):
            served.prepare(handle)
    served.engine.submit("after", [5, 6, 8], Sampling(max_tokens=LONG))
    found = served.finish()
    served.restore(old)
    assert served.drew(found["before"]) and served.drew(found["after"])
    served.publish()
    served.engine.submit("next", [5, 6, 7], Sampling(max_tokens=LONG))
    assert served.drew(served.finish()["next"])


def test_a_version_prepared_but_not_swapped_may_be_sent_again_with_other_values(served: Served) -> None:
    """As after a publish that failed at another generator."""
    served.prepare(served.change())
    served.version -= 1
    torch.manual_seed(0)
    served.publish()
    served.engine.submit("next", [5, 6, 7], Sampling(max_tokens=LONG))
    assert served.drew(served.finish()["next"])


def test_every_slot_gets_the_published_values(served: Served) -> None:
    """Also of the first version, whose adapters are zeros."""
    for number in range(served.engine._llm.vllm_config.lora_config.max_loras + 1):
        handle = served.change()
        if not number:
            with torch.no_grad():
                for name, parameter in trained_parameters(served.policy).items():
                    parameter.mul_("lora_A" in name)
            handle = served.sender.stage(served.version)
        served.prepare(handle)
        served.engine.swap(served.version, served.weights.apply)
        assert check(served) == published(served)
        served.engine.submit("one", [5, 6, 7], Sampling(max_tokens=20))
        assert served.drew(served.finish()["one"])


def test_only_the_first_version_is_loaded_by_vllms_own_code(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thousands of operations would make later versions wait, into whichever slot they go, also after an error."""
    from slipstream.generators.vllm.lora_worker import AdapterLoader

    filled, fill, prepare = list[int](), AdapterLoader._fill, AdapterLoader.prepare

    def prepare_as_new(loader: AdapterLoader, handle: Any) -> None:
        if not filled:
            loader._filled, loader._all_filled = {}, False
        prepare(loader, handle)

    def fails(loader: AdapterLoader, slot: int, request: Any) -> Any:
        filled.append(slot)
        if len(filled) == 2:
            raise OSError("no memory")
        return fill(loader, slot, request)

    served.publish()
    monkeypatch.setattr(AdapterLoader, "_fill", fails)
    monkeypatch.setattr(AdapterLoader, "prepare", prepare_as_new)
    usable = served.engine._llm.vllm_config.lora_config.max_loras - 1  # the last slot stays empty on a CPU
    with pytest.raises(OSError, match="no memory"):
        served.publish()
    served.publish()
    assert len(filled) == usable, "one of them failed, and the version that was served has a slot"
    for key in range(usable - 1):
        served.engine.submit(key, [5, 6, 7 + key], Sampling(max_tokens=LONG))
        served.engine.step()  # the version stays in use
        served.publish()
    assert sorted(filled) == sorted([*range(usable), filled[1]])
    served.finish()


def test_stages_of_a_pipeline_serve_adapters(patient: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # as the engine sets both, for this test alone
    staged = Served(patient, tmp_path, "--generator.engine_args.pipeline_parallel_size=2")
    try:
        for key in ("first", "second"):
            staged.publish()
            assert check(staged) == published(staged)
            staged.engine.submit(key, [5, 6, 7], Sampling(max_tokens=20))
            assert staged.drew(staged.finish()[key])
    finally:
        staged.sender.close()
        staged.engine._llm.engine_core.shutdown()


def check(served: Served) -> dict[str, int]:
    """The engine's checksums of all published parameters."""
    served.weights.start_checksums(list(trained_parameters(served.policy)))
    while (found := served.weights.checksums()) is None:
        time.sleep(0.001)
    return found


def published(served: Served) -> dict[str, int]:
    from slipstream.sync.checksum import checksum

    return {name: checksum(parameter.detach()) for name, parameter in trained_parameters(served.policy).items()}


def test_checksums_are_those_of_the_values_received(served: Served) -> None:
    served.publish()
    assert check(served) == published(served)
    loader: Any = served.engine._llm.model_executor.driver_worker.worker._slipstream
    next(iter(loader._values.values()))[0] += 1
    assert check(served) != published(served)


def test_adapters_of_another_sender_are_served(served: Served, tmp_path: Path) -> None:
    """Which may have the same path for other memory."""
    from slipstream.sync.adapters import AdapterSender

    served.publish()
    flags = [f"--model.path={tmp_path}", "--environment.name=addition", "--generator.engine=vllm", "--sync.link=lora"]
    served.change()
    other = AdapterSender(
        trained_parameters(served.policy),
        load_config(None, [*flags, "--lora.rank=4", "--lora.use_rslora=true"]),
        tmp_path,
        1,
    )
    served.prepare(other.stage(served.version))
    served.engine.swap(served.version, served.weights.apply)
    other.close()
    served.engine.submit("next", [5, 6, 7], Sampling(max_tokens=20))
    assert served.drew(served.finish()["next"])


def test_verify_loads_its_reference_adapter_by_vllm(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.generators.vllm import lora_worker as vllm_loader

    served.publish()
    served.change()
    served.policy.save_pretrained(tmp_path / "B")
    monkeypatch.setattr(vllm_loader, "AdapterLoader", None)
    served.engine.load_adapters({"": str(tmp_path / "B")})
    served.engine.submit("next", [5, 6, 7], Sampling(max_tokens=20))
    assert served.drew(served.finish()["next"])


def test_adapters_in_use_keep_their_slots(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a slot for the next adapter in addition to those in use. vLLM's own code fills each slot only once."""
    from slipstream.generators.vllm.lora_worker import AdapterLoader

    fill, filled = AdapterLoader._fill, []
    monkeypatch.setattr(AdapterLoader, "_fill", lambda self, slot, *a: filled.append(slot) or fill(self, slot, *a))
    manager: Any = served.engine._llm.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
    slots: list[set[tuple[int, int]]] = []
    for number in range(5):
        served.publish()
        served.engine.submit(number, [5, 6, 7 + number], Sampling(max_tokens=LONG))
        served.engine.step()
        slots.append({(i, adapter) for i, adapter in enumerate(manager.lora_index_to_id) if adapter})
    assert all(len({adapter for _, adapter in now}) == len(now) == 3 for now in slots[2:])
    assert all(len(before & after) == 2 for before, after in itertools.pairwise(slots[2:]))
    assert len(filled) == len(set(filled))
    assert served.drew(served.finish()[4])


@pytest.mark.parametrize("how", ["retry", "continue"])
def test_tokens_of_restarted_sequences_are_counted_as_discarded(how: Interruption, served: Served) -> None:
    """At the next version under `retry`, else when the slot of their first adapter is needed."""
    served.publish()
    before = served.engine.tokens_discarded
    served.engine.submit("one", [5, 6, 7], Sampling(max_tokens=LONG))
    for publishes in range(1, 5):
        while served.engine.longest_in_flight() < 5 * publishes:
            served.engine.step()
        served.publish(how)
        if served.engine.tokens_discarded > before:
            break
        served.engine.submit(publishes, [5, 6, 7], Sampling(max_tokens=LONG))  # it is one more adapter in use
    assert publishes == (1 if how == "retry" else 3)
    assert served.engine.tokens_discarded - before == 5 * publishes
    found = served.finish()
    assert found["one"].versions == (served.version, served.version) and served.drew(found["one"])


def test_an_adapter_of_another_host_is_fetched(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a trainer whose address is not the loopback address of one host."""
    from slipstream.runtime.addresses import ADDRESS
    from slipstream.sync.adapters import AdapterSender
    from slipstream.sync.frames import Superseded

    monkeypatch.setenv(ADDRESS, "127.0.0.2")
    config = load_config(
        None,
        [
            "--model.path=m",
            "--environment.name=e",
            "--generator.engine=vllm",
            "--sync.link=lora",
            "--lora.rank=4",
            "--lora.use_rslora=true",
        ],
    )
    parameters = trained_parameters(served.policy)
    monkeypatch.setattr(served, "sender", AdapterSender(parameters, config, tmp_path, 1))
    for _ in range(2):
        handle = served.change()
        shutil.rmtree(handle["path"])  # which engines on other hosts do not have
        served.prepare(handle)
        served.engine.swap(served.version, served.weights.apply)
        served.sender.release(handle)
        served.engine.submit("new", [5, 6, 7], Sampling(max_tokens=20))
        assert served.drew(served.finish()["new"])
    old, new = served.change(), served.change()
    for _ in range(10):  # more often than there are slots
        with pytest.raises(Superseded, match=f"version {old['version']} of the adapter is not staged"):
            served.prepare(old)
    served.prepare(new)
    served.engine.swap(served.version, served.weights.apply)
    served.engine.submit("newest", [5, 6, 7], Sampling(max_tokens=20))
    assert served.drew(served.finish()["newest"])
    served.sender.close()
