"""Matrix products in FP8, which a CPU emulates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.trainers import fp8
from slipstream.trainers.fp8 import MULTIPLE, Fp8Linear
from tests.conftest import run_kernel_cases, save_model
from tests.trainers.test_trainer import make_trainer, random_batch

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8")
    save_model(path, **SIZES)
    return path


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def test_products_err_by_the_rounding_of_their_formats() -> None:
    """e4m3 has 3 bits of mantissa, and e5m2, the format of gradients, has 2."""
    torch.manual_seed(0)
    plain = nn.Linear(256, 128)
    quantized = nn.Linear(256, 128)
    quantized.load_state_dict(plain.state_dict())
    quantized.__class__ = Fp8Linear
    results = []
    inputs, weights = torch.randn(2, 48, 256), torch.randn(2, 48, 128)
    for layer in (plain, quantized):
        rows = inputs.clone().requires_grad_()
        out = layer(rows)
        out.backward(weights)
        results.append([out.detach(), rows.grad, layer.weight.grad, layer.bias.grad])
    errors = [relative_error(found, exact) for exact, found in zip(*results, strict=True)]
    assert 0.01 < errors[0] < 0.05 and 0.01 < errors[1] < 0.1 and 0.01 < errors[2] < 0.1
    assert errors[3] < 1e-6


@pytest.mark.parametrize("dtype", [fp8.WEIGHT_DTYPE, fp8.GRADIENT_DTYPE])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e30])
def test_tensors_of_any_size_are_quantized(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    matrix = size * torch.randn(32, 48)
    rows, columns, scale = fp8.quantize(matrix, dtype)
    assert torch.equal(rows.float().T, columns.float())
    if size > fp8.LEAST_MAXIMUM:
        assert relative_error(scale * rows.float(), matrix) < (0.03 if dtype is fp8.WEIGHT_DTYPE else 0.06)
    else:
        assert not rows.float().any()


def test_what_is_not_finite_stays_so() -> None:
    matrix = torch.ones(16, 16)
    matrix[3, 4] = torch.nan
    rows, _, scale = fp8.quantize(matrix, fp8.WEIGHT_DTYPE)
    assert not (scale * rows.float()).isfinite().all()


def test_kernels_quantize_as_plain_operations_do() -> None:
    pytest.importorskip("triton")
    run_kernel_cases(Path(__file__).with_name("fp8_cases.py"))


@pytest.mark.parametrize("flags", [(), ("--lora.rank=4",), ("--trainer.activation_checkpointing=none",)])
def test_a_step_is_close_to_that_of_float32(model_path: Path, flags: tuple[str, ...]) -> None:
    plain, quantized = (make_trainer(model_path, *flags, *more) for more in ((), ("--trainer.fp8=true",)))
    exact, found = (trainer.step(random_batch(groups=6)) for trainer in (plain, quantized))
    assert found.loss == pytest.approx(exact.loss, rel=0.05) and found.loss != exact.loss
    assert found.grad_norm == pytest.approx(exact.grad_norm, rel=0.15)
    linear = [name for name, module in quantized.model.named_modules() if isinstance(module, Fp8Linear)]
    assert len(linear) == 7 * quantized.model.config.num_hidden_layers
    assert not [name for name in linear if "lora_" in name or "head" in name]


def test_numbers_of_tokens_are_those_that_products_take(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(model_path, "--trainer.fp8=true", "--trainer.tokens_per_microbatch=40")
    sizes, product = list[int](), fp8._product

    def record(left: Tensor, right: Tensor, *scales: Any, **ways: Any) -> Tensor:
        sizes.extend((*left.shape, *right.shape))
        return product(left, right, *scales, **ways)

    monkeypatch.setattr(fp8, "_product", record)
    trainer.step(random_batch(groups=3))
    assert sizes and not any(size % MULTIPLE for size in sizes)


@pytest.mark.parametrize(
    ("name", "fits"),
    [("mlp.gate_proj", True), ("mlp.router.gate", False), ("router.proj", False), ("mlp.gate", False),
     ("self_attn.q_proj.lora_A.default", False)],
)  # fmt: skip
def test_routers_and_adapters_keep_their_products(name: str, fits: bool) -> None:
    assert fp8._fits(name, nn.Linear(64, 16)) == fits
    assert not fp8._fits(name, nn.Linear(64, 24))


def test_a_model_without_fitting_layers_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, hidden_size=20, intermediate_size=28, head_dim=6)
    with pytest.raises(ConfigError, match=r"^trainer.fp8: this model has no linear layer whose sizes 16 divides"):
        make_trainer(tmp_path, "--trainer.fp8=true")


@pytest.mark.parametrize("flags", [("--trainer.parallel=tensor", "--trainer.ranks=2"), ("--lora.quantization=4bit",)])
def test_what_has_no_fp8_products_is_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.fp8 = true"):
        load_config(
            None, ["--model.path=a", "--environment.name=addition", "--trainer.fp8=true", "--lora.rank=4", *flags]
        )
