"""Saves and restores a trainer's state, and exports the policy.

Every rank writes its shards with `torch.distributed.checkpoint`, in a thread, from a copy; any number of ranks can read
them. `.metadata` marks a complete checkpoint: it is deleted first, written last, and required to read. The controller
renames the directory of a complete checkpoint to its final name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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

from slipstream.errors import InvalidInput, UserError
from slipstream.model.inspection import first_not_finite
from slipstream.model.loading import save_policy
from slipstream.runtime import disk
from slipstream.sync.sharded_weights import full_tensor, local_part
from slipstream.trainers.parallel import TrainerRanks

State = dict[str, Any]
ANOTHER = "resume with the trainer.optimizer that the run had, or start a new run from its policy"
METADATA = ".metadata"


def state_of(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, average: Mapping[str, Tensor],
    counts: dict[str, int],
) -> State:  # fmt: skip
    """The trainer's state, by reference, to be written or read in place: parameters, the optimizer's moments, the
    reference's average, counters, and random state. Creates missing moments of torch's AdamW."""
    create_moments(parameters.values(), optimizer)
    return {
        "parameters": {name: p.detach() for name, p in parameters.items()},
        "moments": {name: optimizer.state[p] for name, p in parameters.items()},
        "average": dict(average),
        "counts": counts,
        "random": torch.get_rng_state(),
        **({"random_cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}),
    }


def create_moments(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Create the missing moments of AdamW, with its initial values."""
    for parameter in parameters:
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }


def map_tensors(state: State, mapped: Callable[[Tensor], Tensor]) -> State:
    """The state with each parameter, moment and average replaced by `mapped` of it."""
    return state | {
        "parameters": {name: mapped(value) for name, value in state["parameters"].items()},
        "moments": {name: {k: mapped(v) for k, v in each.items()} for name, each in state["moments"].items()},
        "average": {name: mapped(value) for name, value in state["average"].items()},
    }


class _NoCopyStager(AsyncStager):
    """Passes the state to the writer thread without a copy; no step may change it until it is written."""

    def stage(self, state_dict: State) -> State:
        return state_dict

    def synchronize_staging(self) -> None: ...
    def close(self) -> None: ...


class CheckpointFailed(UserError):
    """A checkpoint, or a rank's part of it, was not written or read."""


def save(path: Path, state: State, ranks: TrainerRanks, last: bool = False) -> Future[None]:
    """Copy the state and write it into `path`. The result is set when the checkpoint is complete.

    The `last` checkpoint is written without a copy, since no step follows. Raises `CheckpointFailed` if writing fails,
    also for values that are not finite.
    """
    _validate_finite(state)
    saved: Future[None] = Future()

    def settle(writing: Any) -> None:
        try:
            with disk.writing(path), raising_checkpoint_failed(f"{path} could not be written"):
                writing.result()
            saved.set_result(None)
        except Exception as error:
            saved.set_exception(error)

    with disk.writing(path), raising_checkpoint_failed(f"{path} could not be written"):
        path.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:  # the other ranks start to write after rank 0
            (path / METADATA).unlink(missing_ok=True)
        alone, stager = ranks.checkpoint_group is None, _NoCopyStager() if last else None
        writing: Any = async_save(
            state, checkpoint_id=path, process_group=ranks.checkpoint_group, no_dist=alone, async_stager=stager
        )
    writing.add_done_callback(settle)
    return saved


def _validate_finite(state: State) -> None:
    moments = {
        f"{kind} of {name}": value
        for name, each in state["moments"].items()
        for kind, value in each.items()
        if value.is_floating_point()
    }
    averages = {f"average of {name}": value for name, value in state["average"].items()}
    for tensors in (state["parameters"], moments, averages):
        if name := first_not_finite({name: local_part(value) for name, value in tensors.items()}):
            raise CheckpointFailed(
                f"the policy is broken: {name} holds values that are not finite. No checkpoint was written; resume "
                "from the last one with a lower trainer.learning_rate, or trainer.gradient_clip"
            )


@contextmanager
def raising_checkpoint_failed(failure: str) -> Iterator[None]:
    """Convert torch's `CheckpointException`, a `BaseException`, to a `CheckpointFailed` with its first cause."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointFailed(f"{failure} by rank {rank}: {str(cause) or type(cause).__name__}") from cause


def restore(path: Path, state: State, ranks: TrainerRanks) -> dict[str, int]:
    """Load what `save` wrote into the tensors of `state`. Returns the counts.

    If the checkpoint has no average, the average starts from the restored parameters. Raises `InvalidInput` for the
    state of another model, and `CheckpointFailed` for files that can't be read.
    """
    if not (path / METADATA).exists():
        raise InvalidInput(f"{path} holds no whole checkpoint: there is no {METADATA}, which is written last")
    written: dict[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    _validate_parameters(path, written, state["parameters"])
    _validate_moments(path, written, state["moments"])
    counts = {n.removeprefix("counts."): 0 for n in written if n.startswith("counts.")}
    has_average = any(name.startswith("average.") for name in written)
    target = state | {"average": state["average"] if has_average else {}, "counts": counts}
    if "random_cuda" not in written:
        target.pop("random_cuda", None)
    with raising_checkpoint_failed(f"{path} could not be read"):
        load(target, checkpoint_id=path, process_group=ranks.checkpoint_group, no_dist=ranks.checkpoint_group is None)
    if not has_average:
        for name, value in state["average"].items():
            value.copy_(state["parameters"][name])
    torch.set_rng_state(target["random"])
    if "random_cuda" in target:
        torch.cuda.set_rng_state(target["random_cuda"])
    restored: dict[str, int] = target["counts"]
    return restored


def _validate_parameters(path: Path, written: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """Raise `InvalidInput` unless the checkpoint has parameters of these names and shapes."""
    saved = {n.removeprefix("parameters."): list(w.size) for n, w in written.items() if n.startswith("parameters.")}
    wanted = {name: list(parameter.shape) for name, parameter in parameters.items()}
    if difference := _first_difference(saved, wanted):
        name, found, wants = difference
        raise InvalidInput(
            f"{path} holds other parameters than the model: {name} is {found} there and {wants} in the model; "
            "was model.path or lora changed?"
        )


def _validate_moments(path: Path, written: Mapping[str, Any], moments: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise `InvalidInput` unless the optimizer that wrote the checkpoint had moments of these names and formats."""
    saved = {name: found.properties.dtype for name, found in written.items() if name.startswith("moments.")}
    wanted = {f"moments.{name}.{kind}": value.dtype for name, each in moments.items() for kind, value in each.items()}
    if difference := _first_difference(saved, wanted):
        name, found, wants = difference
        raise InvalidInput(f"{path} is of another optimizer: {name} is {found}, not {wants}; {ANOTHER}")


def _first_difference(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first name whose values differ, and both values: "missing" where a side lacks it. None for equal mappings."""
    for name in sorted(saved.keys() | wanted.keys()):
        found, wants = saved.get(name, "missing"), wanted.get(name, "missing")
        if found != wants:
            return name, found, wants
    return None


def export(path: Path, model: Any, parameters: Mapping[str, nn.Parameter], ranks: TrainerRanks) -> None:
    """Save `model` with the values of its trained `parameters`. Rank 0 writes.

    Sharded parameters are gathered one at a time; the frozen base model of adapters is not gathered.
    """
    state: dict[str, Tensor] = {}
    frozen = {} if hasattr(model, "get_base_model") else dict(model.named_parameters())  # such as a vision tower
    for name, parameter in {**{n: p for n, p in frozen.items() if not p.requires_grad}, **parameters}.items():
        gathered = full_tensor(parameter.detach())
        if ranks.rank == 0:
            state[name] = gathered.cpu()
    if ranks.rank == 0:
        with disk.writing(path):
            save_policy(model, state, path)
