"""A trainer's state on disk, and the policy as others load it.

Every rank writes its part by `torch.distributed.checkpoint`, in a thread, from a copy; ranks of any other number can
read it. `.metadata` is written last and goes first, and nothing is read without. In a run a checkpoint also gets its
name only when all of it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import (  # type: ignore[attr-defined]
    CheckpointException,
    FileSystemReader,
    async_save,
    load,
)
from torch.distributed.checkpoint.staging import AsyncStager

from slipstream import disk
from slipstream.models import first_not_finite, save_policy
from slipstream.sync.gathered import part_here, whole
from slipstream.trainers.parallel import Ranks

State = dict[str, Any]
METADATA = ".metadata"


def state_of(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, Tensor],
    counts: dict[str, int],
) -> State:
    """What the next step depends on, as it is, to be written or read in place: parameters, AdamW's moments, the average
    of parameters over steps, counts and random state."""
    for parameter in parameters.values():
        if not optimizer.state[parameter]:  # as the first step would begin
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return {
        "parameters": {name: p.detach() for name, p in parameters.items()},
        "moments": {name: optimizer.state[p] for name, p in parameters.items()},
        "average": dict(average),
        "counts": counts,
        "random": torch.get_rng_state(),
        **({"random_cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}),
    }


class _Uncopied(AsyncStager):
    """Hands a state on to the thread that writes it, without the copy that a trainer needs that takes steps."""

    def stage(self, state_dict: State) -> State:
        return state_dict

    def synchronize_staging(self) -> None: ...
    def close(self) -> None: ...


class CheckpointFailed(RuntimeError):
    """A checkpoint, or a rank's part of it, was not written or read."""


def save(path: Path, state: State, ranks: Ranks, last: bool = False) -> Future[None]:
    """Copy the state and write it into `path`; all is there with the result. The `last` one is written uncopied, since
    it does not change any more.

    Raises `CheckpointFailed` if it is not written, also for values that are not finite: older checkpoints stay.
    """
    _refuse_not_finite(state)
    saved: Future[None] = Future()

    def settle(writing: Any) -> None:
        try:
            with disk.writing(path), telling_causes(f"{path} could not be written"):
                writing.result()
            saved.set_result(None)
        except Exception as error:
            saved.set_exception(error)

    with disk.writing(path), telling_causes(f"{path} could not be written"):
        path.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:  # without whom no other begins to write
            (path / METADATA).unlink(missing_ok=True)
        alone, stager = ranks.files is None, _Uncopied() if last else None
        writing: Any = async_save(
            state, checkpoint_id=path, process_group=ranks.files, no_dist=alone, async_stager=stager
        )
    writing.add_done_callback(settle)
    return saved


def _refuse_not_finite(state: State) -> None:
    moments = {
        f"{kind} of {name}": values[kind]
        for name, values in state["moments"].items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    kept = {f"average of {name}": value for name, value in state["average"].items()}
    for tensors in (state["parameters"], moments, kept):
        if name := first_not_finite({name: part_here(value) for name, value in tensors.items()}):
            raise CheckpointFailed(
                f"the policy is broken: {name} holds values that are not finite. No checkpoint was written; go on from "
                "the last one with a lower trainer.learning_rate, or trainer.gradient_clip"
            )


@contextmanager
def telling_causes(what: str) -> Iterator[None]:
    """Raise `CheckpointFailed` with the first cause for torch's `CheckpointException`, which is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointFailed(f"{what} by rank {rank}: {str(cause) or type(cause).__name__}") from cause


def restore(path: Path, state: State, ranks: Ranks) -> dict[str, int]:
    """Load what `save` wrote into the tensors of `state`, and return the counts. Raises `ValueError` for another
    model's state, and `CheckpointFailed` for files that can't be read.

    An average that was not kept until now starts from the present parameters.
    """
    if not (path / METADATA).exists():
        raise ValueError(f"{path} holds no whole checkpoint: there is no {METADATA}, which is written last")
    written: dict[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    shapes = {n.removeprefix("parameters."): tuple(written[n].size) for n in written if n.startswith("parameters.")}
    if shapes != {name: tuple(parameter.shape) for name, parameter in state["parameters"].items()}:
        raise ValueError(f"{path} holds other parameters than the model; was model.path or lora changed?")
    counts = {n.removeprefix("counts."): 0 for n in written if n.startswith("counts.")}
    kept = any(name.startswith("average.") for name in written)
    read = state | {"average": state["average"] if kept else {}, "counts": counts}
    if "random_cuda" not in written:
        read.pop("random_cuda", None)
    with telling_causes(f"{path} could not be read"):
        load(read, checkpoint_id=path, process_group=ranks.files, no_dist=ranks.files is None)
    for name, value in state["average"].items():
        if not kept:
            value.copy_(state["parameters"][name])
    torch.set_rng_state(read["random"])
    if "random_cuda" in read:
        torch.cuda.set_rng_state(read["random_cuda"])
    restored: dict[str, int] = read["counts"]
    return restored


def export(path: Path, model: Any, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Save `model` with these values of its `parameters`; what is spread over ranks is gathered one by one, a frozen
    base never, and rank 0 writes."""
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        gathered = whole(parameter.detach())
        if ranks.rank == 0:
            state[name] = gathered.cpu()
    if ranks.rank == 0:
        with disk.writing(path):
            save_policy(model, state, path)
