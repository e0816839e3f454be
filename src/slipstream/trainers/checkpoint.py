"""A trainer's state on disk, and the policy as others load it.

Every rank writes its part by `torch.distributed.checkpoint`, in a thread, from a copy; ranks of any other number can
read it. The caller makes a checkpoint atomic: its directory gets its name only when all of it is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, async_save, load  # type: ignore[attr-defined]

from slipstream.sync.gathered import whole
from slipstream.trainers.parallel import Ranks

Counts = dict[str, int]


def save(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, Tensor],
    counts: Counts,
    ranks: Ranks,
) -> Future[Any]:
    """Copy parameters, optimizer, their average over steps, counts and random state, and write them into `path`.

    All is there with the result.
    """
    state = {**_state(parameters, optimizer), "average": dict(average), "counts": counts}
    state["random"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["random_cuda"] = torch.cuda.get_rng_state()
    path.mkdir(parents=True, exist_ok=True)
    alone = ranks.size == 1
    writing = async_save(state, checkpoint_id=path, process_group=ranks.files, no_dist=alone)
    return cast(Future[Any], writing)


def restore(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, Tensor],
    ranks: Ranks,
) -> Counts:
    """Load what `save` wrote in place and return the counts. Raises `ValueError` for another model's state.

    An average that was not kept until now starts from the present parameters.
    """
    if not (path / ".metadata").exists():
        raise ValueError(f"{path} was written by another release of slipstream; start the run again")
    written = FileSystemReader(path).read_metadata().state_dict_metadata
    if {n.removeprefix("parameters.") for n in written if n.startswith("parameters.")} != parameters.keys():
        raise ValueError(f"{path} holds other parameters than the model; was model.path or lora changed?")
    state = {**_state(parameters, optimizer), "random": torch.get_rng_state()}
    kept = any(name.startswith("average.") for name in written)
    state["average"] = dict(average) if kept else {}
    state["counts"] = {n.removeprefix("counts."): 0 for n in written if n.startswith("counts.")}
    if torch.cuda.is_available() and "random_cuda" in written:
        state["random_cuda"] = torch.cuda.get_rng_state()
    load(state, checkpoint_id=path, process_group=ranks.files, no_dist=ranks.size == 1)
    if not kept:
        for name, value in average.items():
            value.copy_(parameters[name].detach())
    torch.set_rng_state(state["random"])
    if "random_cuda" in state:
        torch.cuda.set_rng_state(state["random_cuda"])
    counts: Counts = state["counts"]
    return counts


def _state(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and AdamW's moments by name, as they are, to be written or read in place."""
    fused = optimizer.defaults["fused"]
    moments: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        if not optimizer.state[parameter]:  # as the first step would begin
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
        moments[name] = optimizer.state[parameter]
    return {"parameters": {n: p.detach() for n, p in parameters.items()}, "moments": moments}


def export(path: Path, model: Any, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Save `model` with these values of its `parameters` as `from_pretrained` (or PEFT) loads it.

    What is spread over ranks is gathered one by one, a frozen base never; rank 0 writes.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        gathered = whole(parameter.detach())
        if ranks.rank == 0:
            state[name] = gathered.to("cpu", copy=True)
    if ranks.rank:
        return
    if not hasattr(model, "get_base_model"):
        first = {id(p): name for name, p in model.named_parameters()}
        tied = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        for name, tensor in model.state_dict().items():
            state[name] = state[tied[name]] if name in tied else tensor.cpu()
    model.save_pretrained(path, state_dict=state)
