"""Updates of vLLM's FP8 weights: each worker quantizes the received rows as vLLM quantizes those of model files.

With `quantization = "fp8_per_channel"` vLLM stores the weights of linear layers and experts as 8-bit floats, and a
float32 scale for each row. The result for a row depends on no other row. So a worker can quantize any rows of a version
while the engine decodes; the swap copies them into the tensors that CUDA graphs read. Other parameters are not
quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.config.engine_args import QUANTIZATION, UNQUANTIZED_LINKS
from slipstream.errors import InvalidInput
from slipstream.generators.vllm.compat import quantize_rows, scales_span_ranks
from slipstream.sync.checksum import checksum
from slipstream.sync.link import ParameterShard


@dataclass(frozen=True, kw_only=True)
class QuantizedShard(ParameterShard):
    """`tensor` holds FP8 values `[..., columns]`, and `scale` the scale of each of their rows, `[..., 1]`."""

    scale: Tensor

    needs_received = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.tensor, self.scale

    def encode(self, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        rows = values.reshape(-1, values.shape[-1])  # of experts, too
        quantized, scale = quantize_rows(rows.to(self.tensor.device, torch.bfloat16).contiguous())
        return [(_bits(self.tensor), _bits(quantized.view(values.shape))),
                (_bits(self.scale), _bits(scale.view(self.scale.shape)))]  # fmt: skip

    def select(self, *index: int | slice) -> QuantizedShard:
        return replace(self, tensor=self.tensor[index], scale=self.scale[index])

    def checksum(self, received: Callable[[], Tensor]) -> int:
        """The checksum of the received values, plus 1 if the served tensors differ from these values quantized again.

        The trainer has no FP8 values to compare with.
        """
        values = received()
        return (checksum(values, self.index) + (not self.holds(values))) % 2**64

    def deferred_checksum(self, values: Tensor, new: Sequence[Tensor]) -> Callable[[], int]:
        received, wanted = checksum(values.to(self.tensor.device), self.index), _word_sums(new)
        return lambda: (received + (_word_sums([_bits(self.tensor), _bits(self.scale)]) != wanted)) % 2**64


def _word_sums(tensors: Sequence[Tensor]) -> list[int]:
    """Checksums of integers of 8 or 32 bits, of which rows have an even number of bytes."""
    return [checksum(tensor.contiguous().view(torch.int16)) for tensor in tensors]


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, which all operations support and which compare bit by bit."""
    return tensor.view(torch.int8 if tensor.element_size() == 1 else torch.int32)


def served_tensors(model: Any) -> dict[str, Tensor]:
    """The parameters of a vLLM model by name. Matrices of FP8 weights, which vLLM transposes, are `[rows, columns]`.

    Raises `InvalidInput` for FP8 weights without a scale for each row.
    """
    served = {name: parameter.data for name, parameter in model.named_parameters()}
    quantized = {name: tensor for name, tensor in served.items() if _is_fp8(tensor)}
    served |= {name: tensor.t() for name, tensor in quantized.items() if tensor.dim() == 2}
    for name in quantized:
        scale = served.get(f"{name}_scale")
        if scale is None or scale.shape != (*served[name].shape[:-1], 1):
            found = "no scale" if scale is None else f"a scale of shape {list(scale.shape)}"
            raise InvalidInput(
                f"vLLM has {found} for the FP8 values {list(served[name].shape)} of {name}, and a link needs one for "
                f'each row; set quantization = "{QUANTIZATION}" in vLLM\'s engine arguments'
            )
    return served


def quantized_shards(shards: Mapping[str, ParameterShard], served: Mapping[str, Tensor]) -> dict[str, ParameterShard]:
    """`shards`, with a `QuantizedShard` for each shard of FP8 weights; its scales are rows of those in `served`.

    Raises `InvalidInput` for a shard split by columns if vLLM computes row scales over the columns of all ranks.
    """
    wholes = {t.untyped_storage().data_ptr(): (t, served[f"{name}_scale"]) for name, t in served.items() if _is_fp8(t)}
    found = dict(shards)
    for name, shard in shards.items():
        if not _is_fp8(shard.tensor):
            continue
        if len(shard.index) > 1 and scales_span_ranks():
            raise InvalidInput(
                f"{name} is split by columns over GPUs, and this vLLM scales FP8 rows by the columns of all GPUs; "
                "set generator.tensor_parallel_size = 1"
            )
        whole, scale = wholes[shard.tensor.untyped_storage().data_ptr()]
        row = (shard.tensor.storage_offset() - whole.storage_offset()) // whole.stride(0)
        scale = scale[row : row + len(shard.tensor)]
        found[name] = QuantizedShard(shard.tensor, shard.shape, shard.index, shard.counted, scale=scale)
    return found


def validate_link(link: str, shards: Mapping[str, ParameterShard]) -> None:
    """Raise `InvalidInput` if `link` would write unquantized values into FP8 weights.

    Only servers that the user started can fail here: for engines of the run, `config.engine_args` rejects the options.
    """
    if link in UNQUANTIZED_LINKS and any(shard.needs_received for shard in shards.values()):
        raise InvalidInput(
            f'sync.link = "{link}" writes the trainer\'s own values, and this vLLM serves FP8 weights; '
            'use "nccl", "shared", "delta" or "checkpoint"'
        )


def _is_fp8(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 1
