"""The protocol of a trainer worker: the methods that the controller calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from slipstream.rollout import Batch, Completion
from slipstream.runtime.worker import large_arguments
from slipstream.step_stats import StepStats
from slipstream.sync.link import ConnectionInfo, PublishHandle


class TrainerWorker(Protocol):
    """A trainer in one process, or one process for each rank.

    With several ranks every call runs on all ranks, and the caller gets the result of rank 0.
    """

    @large_arguments
    async def step(self, batch: Batch) -> StepStats:
        """One optimizer step."""

    async def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        """Log-probabilities of the sampled tokens, one row for each completion."""

    async def save(self, path: Path, last: bool) -> None:
        """Write a checkpoint. Steps may run meanwhile, except for the `last`."""

    async def restore(self, path: Path) -> None:
        """Continue from a checkpoint."""

    async def export(self, path: Path) -> None:
        """Write the policy as `from_pretrained` (or PEFT) loads it."""

    async def open_link(self, receivers: int) -> ConnectionInfo:
        """Open the trainer's end of the weight link for `receivers` engine processes that hold weights.

        Returns the `connection_info` of `EngineWorker.connect`: `shapes` by name, and what the link adds."""

    async def check_connection(self) -> None:
        """Called every second while the receivers of a collective link connect. Raises what prevents this end."""

    async def stage(self, version: int) -> PublishHandle:
        """Fix the weights of a version for sending."""

    async def send(self, handle: PublishHandle) -> PublishHandle | None:
        """Send the staged version while engines prepare. Returns keys to add to the handle, or None."""

    async def release(self, handle: PublishHandle) -> None:
        """Free what was staged; called when all engines have swapped."""

    async def checksums(self, names: Sequence[str]) -> dict[str, int]:
        """Checksums of these parameters in the published dtype, by name."""

    async def offload(self) -> bool:
        """Free GPU memory for engines: parameters and optimizer state move to host memory as far as they must.

        Returns whether the GPU holds a step and the engines together. Then nothing moves, and engines can stay awake.
        """

    async def onload(self) -> None:
        """Move back to the GPU what `offload` moved."""

    async def shapes(self) -> dict[str, list[int]]:
        """Shape of each trained parameter by name."""

    async def compute_on(self, handles: Sequence[dict[str, str]]) -> None:
        """Run forward and backward passes on the weights that an engine exported (`sync.link = "single_copy"`)."""
