"""Real vLLM on a CPU with two pipeline stages: all links publish into one engine while sequences are in flight."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config.loading import load_config
from slipstream.config.schema import Config
from slipstream.generators.base import Interruption
from slipstream.model.inspection import trained_parameters
from slipstream.model.loading import load_model
from slipstream.rollout import Completion, Sampling
from slipstream.sync.checksum import checksum
from slipstream.sync.link import find_link

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(900),
]
BOUND = 1e-4
AFTER, TOKENS = 8, 60
STAGES = 2
CASES: Sequence[tuple[str, Interruption]] = (
    ("nccl", "recompute"),
    ("delta", "recompute"),
    ("checkpoint", "retry"),
    ("shared", "continue"),
    ("delta", "continue"),
    ("shared", "drain"),
)


class Staged:
    """An engine of two stages and a trainer's parameters, without the processes around them.

    A batch has so few tokens that each stage computes another batch.
    """

    def __init__(self, model: Path, directory: Path) -> None:
        from slipstream.generators.vllm.engine import VllmEngine

        self._model, self._directory = model, directory
        config = self._config("shared")
        self.engine = VllmEngine(config)
        self.policy = load_model(config.model, config.lora, device=torch.device("cpu"), dtype=torch.float32)
        self.parameters = trained_parameters(self.policy)
        self.version = 0

    def _config(self, link: str) -> Config:
        return load_config(
            None,
            [
                f"--model.path={self._model}",
                "--environment.name=addition",
                "--generator.engine=vllm",
                "--generator.max_num_seqs=16",
                f"--generator.engine_args.pipeline_parallel_size={STAGES}",
                "--generator.engine_args.max_num_batched_tokens=16",
                f"--sync.link={link}",
            ],
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def publish(self, link: str, how: Interruption) -> dict[Any, Completion]:
        """Publish changed weights by a new sender while 12 sequences are in flight. Returns all that were sampled."""
        folder = self._directory / f"{link} {how}"
        folder.mkdir()
        sender = find_link(link)[0](self.parameters, self._config(link), folder, STAGES)
        weights = self.engine.open_weights(link, sender.connection_info(), 1)
        found: dict[Any, Completion] = {}
        for i in range(12):
            self.engine.submit(i, [5, 6, 7 + i], Sampling(max_tokens=TOKENS))
        while self.engine.longest_in_flight() < AFTER:
            found.update(self.engine.step())
        self.version += 1
        torch.manual_seed(self.version)
        sender.before_update()
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.add_(0.1 * torch.randn_like(parameter))
        handle = sender.stage(self.version)
        sending = threading.Thread(target=lambda: handle.update(sender.send(handle) or {}), daemon=True)
        sending.start()
        weights.prepare(handle)
        self.engine.draining = how == "drain"
        while not weights.prepared() or (how == "drain" and self.engine.running):
            found.update(self.engine.step())
        self.engine.swap(self.version, weights.apply, how)
        self.engine.submit("new", [5, 6, 7], Sampling(max_tokens=TOKENS))
        while self.engine.busy:
            found.update(self.engine.step())
        weights.start_checksums([*self.parameters])
        while (sums := weights.checksums()) is None:
            pass
        assert sums == {name: checksum(parameter.detach()) for name, parameter in self.parameters.items()}
        sending.join()
        sender.release(handle)
        weights.close()
        sender.close()
        return found

    def drew(self, weights: dict[str, torch.Tensor], completion: Completion, start: int, end: int) -> bool:
        """Whether these weights sampled these tokens."""
        ids = torch.tensor([completion.prompt_ids + completion.token_ids[:-1]])
        with torch.no_grad():
            output: Any = torch.func.functional_call(self.policy, weights, (ids,))
        logits = output.logits[0, len(completion.prompt_ids) - 1 :]
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        return bool((wanted - torch.tensor(completion.logprobs))[start:end].abs().max() < BOUND)


def test_every_link_publishes_exactly_into_the_stages(
    patient: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is sampled by the version that its completion names, in all stages. The embeddings are tied."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # as the engine sets both, for this test alone
    staged = Staged(patient, tmp_path)
    try:
        for link, how in CASES:
            before = staged.weights()
            found = staged.publish(link, how)
            after, old, new = staged.weights(), staged.version - 1, staged.version
            for completion in found.values():
                for span in completion.spans:
                    if span.start and how == "continue":
                        continue  # sampled with the keys of the old weights, unlike a plain forward pass
                    weights = {old: before, new: after}[span.version]
                    assert staged.drew(weights, completion, span.start, span.end), (link, how, span)
            changed = sum(len(completion.spans) > 1 for completion in found.values())
            assert (changed > 0) == (how in ("continue", "recompute")), (link, how, changed)
            assert found["new"].versions == (new, new)
            assert {c.versions for key, c in found.items() if key != "new"} <= {
                "drain": {(old, old)}, "retry": {(old, old), (new, new)}
            }.get(how, {(old, old), (old, new), (new, new)})  # fmt: skip
    finally:
        staged.engine._llm.engine_core.shutdown()
