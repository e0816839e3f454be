"""Attention kernels that are installed beside torch: FlashAttention 3 and 4, in the place of the one that it ships.

Torch has a registry in which they take the place of its own kernel, for the whole process. Its side of it is young, so
a kernel is tried first: on heads like the model's it has to give what plain attention gives, forward and backward.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention as kernels

from slipstream.config import ConfigError
from slipstream.models import heads_of
from slipstream.packed.attention import HALVES, Segments, attend

OPTION = "trainer.attention"


class Kind(NamedTuple):
    """The module that brings a kernel, what installs it, and the GPUs that it is for, by compute capability."""

    module: str
    install: str
    generations: tuple[int, ...]


KINDS = {
    "FA3": Kind("flash_attn_interface", "build flash-attention's folder `hopper`", (9,)),
    # The last whose results torch 2.11 to 2.13 take.
    "FA4": Kind("flash_attn.cute", "pip install flash-attn-4==4.0.0b19", (9, 10)),
}
# Two prompts in the one row, of which two completions share the first: queries and keys as `packing` makes them.
RUNS = (
    (range(0, 40), (range(0, 40),)),
    (range(40, 140), (range(0, 40), range(40, 140))),
    (range(140, 147), (range(0, 40), range(140, 147))),
    (range(147, 400), (range(147, 400),)),
)
GPU = "cuda"
NEAR = 30  # tokens, as a sliding window
TOLERANCE = 0.02  # relative, of the whole tensor: some 5 roundings of bfloat16


def use_installed(wanted: str, device: torch.device, dtype: torch.dtype, model: Any) -> str:
    """Have this process attend by a kernel that is installed and right for `model`'s heads. Returns its name, or
    "torch".

    Raises `ConfigError` if one is asked for by name and not there, or not right; "auto" says so on stderr.
    """
    kernels.restore_flash_attention_impl(_raise_warn=False)
    if wanted == "torch" or device.type != GPU or dtype not in HALVES:
        if wanted in KINDS:
            here = f"{str(dtype).removeprefix('torch.')} on a {device.type}"
            raise ConfigError(
                f'{OPTION} = "{wanted}" is for GPUs and 16 bits, and the trainer computes in {here}; leave it out'
            )
        return "torch"
    for name in (wanted,) if wanted in KINDS else [kind for kind in KINDS if not _missing(kind, device)]:
        problem = _missing(name, device) or _wrong(name, device, dtype, model)
        if not problem:
            return name
        kernels.restore_flash_attention_impl(_raise_warn=False)
        if wanted == name:
            raise ConfigError(f'{OPTION} = "{name}": {problem}')
        print(f"{OPTION}: torch's own kernel, since {problem}", file=sys.stderr, flush=True)
    return "torch"


def _missing(name: str, device: torch.device) -> str:
    """Why a kernel can't be tried, or nothing."""
    kind, generation = KINDS[name], torch.cuda.get_device_capability(device)[0]
    if generation not in kind.generations:
        others = " or ".join(f"{g}.x" for g in kind.generations)
        return f"it is for GPUs of compute capability {others}, and this one has {generation}.x; leave it out"
    if not _installed(kind.module):
        return f"it is not installed; {kind.install}, or leave it out"
    if name not in kernels.list_flash_attention_impls():
        return f"torch {torch.__version__} does not know of it; take a newer one, or leave it out"
    return ""


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package that it would lie in
        return False


def _wrong(name: str, device: torch.device, dtype: torch.dtype, model: Any) -> str:
    """What is wrong with a kernel that is used from now on, or nothing."""
    try:
        kernels.activate_flash_attention_impl(name)
        off = _differences(device, dtype, model.config)
    except Exception as error:  # of which class depends on the kernel
        return f"{name} fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    worst = next((d for d in off if not d < TOLERANCE), 0.0)  # or is no number
    return f"{name} differs from plain attention by {worst:.1%}" if worst else ""


def _differences(device: torch.device, dtype: torch.dtype, config: Any) -> list[float]:
    """Of the attention's output and of the gradients of queries, keys and values, relative to plain attention's in
    float32."""
    (heads, keys, size), text = heads_of(config), config.get_text_config()
    size = getattr(text, "qk_head_dim", None) or size  # in latent attention
    draw = torch.Generator().manual_seed(0)
    tokens = RUNS[-1][0].stop
    tensors = [torch.randn(1, n, tokens, size, generator=draw).to(dtype) for n in (heads, keys, keys)]
    gradient = torch.randn(1, tokens, heads, size, generator=draw).to(dtype)
    found = []
    for window in (None, NEAR) if getattr(text, "sliding_window", None) else (None,):
        here = replace(Segments.of(RUNS, device), blocks=())  # which only plain attention needs
        tried = _attended([t.to(device) for t in tensors], gradient.to(device), here, window)
        plain = _attended([t.float() for t in tensors], gradient.float(), Segments.of(RUNS, gradient.device), window)
        found += [float((a.cpu().float() - b).norm() / b.norm()) for a, b in zip(tried, plain, strict=True)]
    return found


def _attended(tensors: Sequence[Tensor], gradient: Tensor, segments: Segments, window: int | None) -> list[Tensor]:
    q, k, v = leaves = [t.detach().requires_grad_() for t in tensors]
    out, _ = attend(torch.nn.Module(), q, k, v, None, sliding_window=window, **segments.arguments())
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
