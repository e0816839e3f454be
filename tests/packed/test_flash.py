"""Kernels of attention that are installed beside torch: taken only if they are right."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.library import Library
from torch.nn import attention as kernels
from torch.nn import functional

from slipstream.config import ConfigError
from slipstream.packed import flash
from slipstream.packed.flash import use_installed
from tests.trainers.test_trainer import make_trainer

HERE = torch.device("cpu")
MODEL = SimpleNamespace(
    config=SimpleNamespace(
        get_text_config=lambda: SimpleNamespace(
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64, sliding_window=64
        )
    )
)


class Kernel:
    """A stand-in for FlashAttention on a CPU, in the place in torch's dispatcher where the real ones are on a GPU."""

    def __init__(self) -> None:
        self.passes, self.blind, self.broken, self.lost = 0, False, False, False

    def __call__(self) -> Kernel:
        self._library: Library | None = Library("aten", "IMPL")
        self._library.impl("_flash_attention_forward", self._forward, "CPU")
        self._library.impl("_flash_attention_backward", self._backward, "CPU")
        return self

    def remove(self) -> None:
        self._library = None

    def _attend(self, q: Any, k: Any, v: Any, bounds: Any, left: int) -> Any:
        (queries, keys), parts = bounds, []
        for (a, b), (c, d) in zip(queries.unfold(0, 2, 1).tolist(), keys.unfold(0, 2, 1).tolist(), strict=True):
            at = torch.arange(b - a)[:, None] + (d - c) - (b - a)
            seen = torch.arange(d - c) <= at
            if left >= 0:
                seen &= torch.arange(d - c) >= at - left
            if self.blind:  # to whose turn it is
                seen = torch.ones_like(seen)
            one = (t[i:j].transpose(0, 1) for t, i, j in ((q, a, b), (k, c, d), (v, c, d)))
            parts.append(functional.scaled_dot_product_attention(*one, attn_mask=seen, enable_gqa=True).transpose(0, 1))
        return torch.cat(parts)

    def _forward(self, q: Any, k: Any, v: Any, *rest: Any, window_size_left: int = -1, **_: Any) -> Any:
        self.passes += 1
        if self.broken:
            raise RuntimeError("no kernel\nis there")
        nothing = torch.zeros((), dtype=torch.uint64)
        out = self._attend(q, k, v, rest[:2], window_size_left)
        return out, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64), nothing, torch.empty(0)

    def _backward(self, grad: Any, q: Any, k: Any, v: Any, *rest: Any, window_size_left: int = -1, **_: Any) -> Any:
        def by_autograd() -> Any:
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            return torch.autograd.grad(self._attend(*leaves, rest[2:4], window_size_left), leaves, grad)

        with ThreadPoolExecutor(1) as thread:  # this one is below autograd in torch's dispatcher
            of_q, of_k, of_v = thread.submit(by_autograd).result()
        return of_q, of_k * torch.nan if self.lost else of_k, of_v


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """FlashAttention 3 on a "GPU" of its generation, which is this CPU."""
    (tmp_path / "flash_attn_interface.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "GPU", "cpu")
    kernel = Kernel()
    monkeypatch.setitem(kernels._registry._FLASH_ATTENTION_IMPLS, "FA3", kernel)
    yield kernel
    kernels.restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.parametrize("wanted", ["auto", "FA3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_installed_kernel_that_is_right_is_used(wanted: Any, dtype: torch.dtype, kernel: Kernel) -> None:
    assert use_installed(wanted, HERE, dtype, MODEL) == "FA3"
    assert kernels.current_flash_attention_impl() == "FA3" and kernel.passes == 2, "with a window, and without"
    assert use_installed("torch", HERE, dtype, MODEL) == "torch"
    assert kernels.current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("lost", "FA3 differs from plain attention by nan%"),
        ("blind", r"FA3 differs from plain attention by [\d.]+%"),
        ("broken", "FA3 fails: RuntimeError: no kernel is there"),
    ],
)
def test_one_that_is_wrong_is_not(fault: str, why: str, kernel: Kernel, capfd: pytest.CaptureFixture[str]) -> None:
    setattr(kernel, fault, True)
    with pytest.raises(ConfigError, match=rf'trainer.attention = "FA3": {why}'):
        use_installed("FA3", HERE, torch.bfloat16, MODEL)
    assert kernels.current_flash_attention_impl() is None
    assert use_installed("auto", HERE, torch.bfloat16, MODEL) == "torch"
    assert kernels.current_flash_attention_impl() is None
    assert "trainer.attention: torch's own kernel, since FA3 " in capfd.readouterr().err


def test_one_that_is_not_there_is_refused_by_name_alone(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ConfigError, match=r'"FA4": it is not installed; pip install flash-attn-4==4.0.0b19, or leave it out'
    ):
        use_installed("FA4", HERE, torch.bfloat16, MODEL)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r'"FA3": it is for GPUs of compute capability 9.x, and this one has 8.x'):
        use_installed("FA3", HERE, torch.bfloat16, MODEL)
    assert use_installed("auto", HERE, torch.bfloat16, MODEL) == "torch" and kernel.passes == 0
    assert not capfd.readouterr().err


def test_on_a_cpu_there_is_torch_alone(tiny: Path) -> None:
    assert make_trainer(tiny).attention == "torch"
    with pytest.raises(ConfigError, match=r'trainer.attention = "FA3" is for GPUs and 16 bits, and the trainer comp'):
        make_trainer(tiny, "--trainer.attention=FA3")
