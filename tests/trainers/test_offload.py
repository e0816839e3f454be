"""The trainer's state on the host: steps, checkpoints and shards are the same as without offloading.

With a GPU (`make test-gpu`) the state leaves that.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.sync.sharded_weights import full_tensor, local_part
from slipstream.trainers import offload
from slipstream.trainers.offload import Offloader
from slipstream.trainers.trainer import Trainer
from tests.trainers.test_trainer import make_trainer, random_batch

BF16 = "--model.dtype=bfloat16"
WAYS = {
    "float32": [],
    "masters and copies": [BF16],
    "shards of FSDP": [BF16, "--trainer.keep_compute_copy=false"],
    "adapters": ["--lora.rank=4"],
    "average": ["--algorithm.kl_coef=0.1", "--algorithm.reference=average"],
}


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [full_tensor(p.detach()).clone() for p in trainer.parameters.values()]


def held(trainer: Trainer) -> int:
    """Bytes of parameters and optimizer state on the device."""
    moments = [m for state in trainer._optimizer.state.values() for m in state.values()]
    weights = [*trainer.model.parameters(), *trainer.parameters.values(), *moments]
    return sum({(s := local_part(t).untyped_storage())._cdata: s.nbytes() for t in weights}.values())


@pytest.mark.parametrize("way", WAYS)
def test_offloading_changes_no_step_and_no_checkpoint(
    way: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1)  # a small model's storages
    first, second = (make_trainer(tiny, "--trainer.learning_rate=1e-2", *WAYS[way]) for _ in range(2))
    first._offloader = Offloader(first.device, 1.0)
    for parameter in (*first.model.parameters(), *first.parameters.values()):
        if not local_part(parameter).untyped_storage().resizable():  # it maps the model's file
            parameter.data = parameter.data.clone()
    for step in range(3):
        batch = random_batch(seed=step)
        first.step(batch)
        second.step(batch)
        full = held(first)
        first.offload()
        assert full > 0 == held(first)
        with pytest.raises(RuntimeError, match="this trainer is offloaded"):
            first.step(batch)
        for trainer, name in ((first, "first"), (second, "second")):
            trainer.save(tmp_path / name / str(step)).result()
        first.onload()
        assert held(first) == full
        assert all(map(torch.equal, weights(first), weights(second)))
    restored = make_trainer(tiny, "--trainer.learning_rate=1e-2", *WAYS[way])
    restored.restore(tmp_path / "first" / "2")
    for trainer in (restored, second):
        trainer.step(random_batch(seed=9))
    assert all(map(torch.equal, weights(restored), weights(second)))
