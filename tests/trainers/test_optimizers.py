"""Optimizers that save memory: their numerics against float64, and resumed state, on one rank and on two."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.config.schema import TrainerConfig
from slipstream.errors import InvalidInput
from slipstream.runtime.addresses import RENDEZVOUS_FILE
from slipstream.sync.sharded_weights import full_tensor
from slipstream.trainers.optimizer import PiecewiseOptimizer, adamw_update, newton_schulz
from slipstream.trainers.stochastic_rounding import (
    BLOCK,
    SIGNED,
    UNSIGNED,
    dequantize,
    quantize,
    random_bits,
    round_to_bfloat16,
)
from slipstream.trainers.trainer import Trainer
from tests.conftest import save_model
from tests.trainers.test_trainer import make_trainer, random_batch, sequences

FLAGS = ("--trainer.learning_rate=1e-3", "--trainer.warmup_steps=2", "--loop.steps=6",
         "--trainer.tokens_per_microbatch=64")  # fmt: skip
EIGHT, MUON, HOST = "--trainer.optimizer=adamw_8bit", "--trainer.optimizer=muon", "--trainer.offload_optimizer=true"
ROUNDED = ("--model.dtype=bfloat16", "--trainer.master_weights=bfloat16")
OPTIONS = {
    "host": (HOST,), "8bit": (EIGHT,), "8bit host": (EIGHT, HOST), "bfloat16": ROUNDED, "muon": (MUON,),
    "bfloat16 8bit host": (*ROUNDED, EIGHT, HOST), "bfloat16 muon host": (*ROUNDED, MUON, HOST),
}  # fmt: skip
DDP, TENSOR = "--trainer.parallel=ddp", "--trainer.parallel=tensor"
TWO_RANKS = {
    **{name: OPTIONS[name] for name in ("8bit", "bfloat16 8bit host", "bfloat16 muon host")},
    "ddp": (*ROUNDED, EIGHT, DDP), "tensor": (*ROUNDED, EIGHT, TENSOR), "tensor muon": (MUON, TENSOR),
}  # fmt: skip
STEPS, SAVED = 3, 1


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with rows of whole blocks."""
    path = tmp_path_factory.mktemp("wide")
    save_model(path, vocab_size=38, num_hidden_layers=2, hidden_size=BLOCK, intermediate_size=2 * BLOCK)
    return path


def numbers(rate: float, step: int, betas: tuple[float, float] = (0.9, 0.99)) -> Tensor:
    return torch.tensor([*betas, rate / (1 - betas[0] ** step), (1 - betas[1] ** step) ** 0.5, 1.0])


def noise(seed: int) -> Tensor:
    return torch.tensor([hash((seed, 7)) % 2**31, 0], dtype=torch.int32)


def bits(seed: int, shape: torch.Size) -> Tensor:
    index = torch.arange(shape.numel(), dtype=torch.int32).view(shape)
    return random_bits(index, noise(seed)[0])


def mean_of(rounded: Callable[[int], Tensor], times: int = 2000) -> Tensor:
    return torch.stack([rounded(seed).double() for seed in range(times)]).mean(0)


def test_roundings_to_bfloat16_are_neighbours_and_exact_on_average() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 500)
    step = values.abs().log2().floor().exp2().double() / 2**7
    for seed in range(20):
        assert ((round_to_bfloat16(values, bits(seed, values.shape)).double() - values.double()).abs() < step).all()
    mean = mean_of(lambda seed: round_to_bfloat16(values, bits(seed, values.shape)))
    error = (mean - values.double()) / step  # of deviation 0.5 / sqrt(2000) at most
    assert error.abs().max() < 5 * 0.5 / 2000**0.5
    assert error.mean().abs() < 4 * 0.5 / (2000 * 500) ** 0.5


@pytest.mark.parametrize("levels", [SIGNED, UNSIGNED])
def test_8bit_codes_are_close_and_exact_on_average(levels: int) -> None:
    sizes = torch.logspace(-4, 0, BLOCK)
    values = torch.randn(8, BLOCK, generator=torch.Generator().manual_seed(0)) * sizes
    values = values if levels == SIGNED else values.abs()

    def coded(seed: int) -> Tensor:
        codes, scale = quantize(values, bits(seed, values.shape), levels)
        assert (codes == codes.round()).all() and codes.abs().max() == levels
        return dequantize(codes, scale, levels)

    relative = ((coded(0) - values) / values).abs()
    assert relative[values.abs() > 1e-3 * values.abs().max()].max() < 0.25
    assert relative.mean() < 0.1
    mean, spread = mean_of(coded), (coded(1) - values).abs().double() + 0.02 * values.abs().double()
    assert ((mean - values.double()) / values.double()).mean().abs() < 2e-3
    assert (mean - values.double()).abs().mean() < 0.1 * spread.mean()


def test_a_rate_below_the_spacing_moves_bfloat16_weights_on_average() -> None:
    """Spacing below 1 is 2^-8; 100 steps of 1e-6 are 1e-4."""
    weight = torch.ones(200_000, dtype=torch.bfloat16)
    nearest, first, second = torch.ones(4, dtype=torch.bfloat16), torch.zeros(200_000), torch.zeros(200_000)
    for step in range(1, 101):
        adamw_update(weight, torch.ones(200_000), first, second, noise(step), numbers(1e-6, step))
        nearest -= torch.tensor(1e-6)
    assert (nearest == 1).all()
    moved = 1 - weight.double().mean().item()
    deviation = (1e-4 * 2**-8 / 200_000) ** 0.5
    assert moved == pytest.approx(1e-4, abs=5 * deviation)


def test_8bit_adamw_follows_adamw_in_float64() -> None:
    """Gradients whose columns differ in size by 1000, with noise: the distance is a small part of the way."""
    draw = torch.Generator().manual_seed(0)
    size = torch.logspace(-3, 0, 2 * BLOCK)
    target = torch.randn(16, 2 * BLOCK, generator=draw)
    exact = torch.zeros_like(target, dtype=torch.float64).requires_grad_()
    reference = torch.optim.AdamW([exact], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    options = TrainerConfig(optimizer="adamw_8bit", learning_rate=1e-2)
    ours = torch.nn.Parameter(torch.zeros_like(target))
    optimizer = PiecewiseOptimizer({"w": ours}, options, frozenset(), False, 0)
    for _ in range(100):
        jitter = torch.randn(target.shape, generator=draw)
        ours.grad = size * (ours.detach() - target + jitter)
        exact.grad = (size * (exact.detach() - target + jitter)).double()
        optimizer.step()
        reference.step()
    apart = (ours.detach().double() - exact.detach()).norm() / exact.detach().norm()
    assert 0 < apart < 0.04
    assert {n: v.dtype for n, v in optimizer.state[ours].items() if not n.endswith(("scale", "step"))} == {
        "exp_avg": torch.int8,
        "exp_avg_sq": torch.uint8,
    }


def test_pieces_and_shapes_do_not_change_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(piece: int) -> Tensor:
        monkeypatch.setattr("slipstream.trainers.optimizer.PIECE", piece)
        weight = torch.nn.Parameter(torch.ones(8, BLOCK, dtype=torch.bfloat16))
        weight.grad_dtype = None
        options = TrainerConfig(optimizer="adamw_8bit", master_weights="bfloat16", learning_rate=1e-3)
        optimizer = PiecewiseOptimizer({"w": weight}, options, frozenset(), False, 0)
        for seed in range(3):
            weight.grad = torch.randn(8, BLOCK, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
        return weight.detach()

    assert torch.equal(trained(2**20), trained(2 * BLOCK))


def test_a_rank_with_an_empty_shard_counts_its_steps() -> None:
    weight = torch.nn.Parameter(torch.zeros(0, BLOCK))
    optimizer = PiecewiseOptimizer({"w": weight}, TrainerConfig(optimizer="adamw_8bit"), frozenset(), False, 0)
    weight.grad = torch.zeros(0, BLOCK)
    optimizer.step()
    assert int(optimizer.state[weight]["step"]) == 1


@pytest.mark.parametrize("shape", [(48, 32), (32, 48)])
def test_muon_is_that_of_torch(shape: tuple[int, int]) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = TrainerConfig(optimizer="muon", learning_rate=1e-2, weight_decay=0.1)
    optimizer = PiecewiseOptimizer({"w": ours}, options, frozenset({"w"}), False, 0)
    other = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for seed in range(4):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        other.step()
    moved = (theirs.detach() - start).norm()
    assert (ours.detach() - theirs.detach()).norm() < 0.025 * moved  # both iterate in bfloat16
    values = torch.linalg.svdvals(newton_schulz(gradient).double())
    assert values.min() > 0.5 and values.max() < 1.3


def test_state_in_host_memory_changes_nothing(wide: Path) -> None:
    for flags in ((), (EIGHT,)):
        one, other = make_trainer(wide, *FLAGS, *flags), make_trainer(wide, *FLAGS, *flags, HOST)
        for seed in range(2):
            one.step(random_batch(38, seed=seed))
            other.step(random_batch(38, seed=seed))
        assert all(torch.equal(p, other.parameters[name]) for name, p in one.parameters.items())


def gain(path: Path, *flags: str) -> float:
    """By how much log-probabilities of completions rise, times their advantages, in five steps."""
    trainer, batch = make_trainer(path, *FLAGS, *flags, "--trainer.tokens_per_microbatch=999"), random_batch(38)
    completions, advantages = zip(*sequences(batch), strict=True)

    def value() -> float:
        return sum(a * sum(s) for a, s in zip(advantages, trainer.score(completions), strict=True))

    before = value()
    for _ in range(5):
        trainer.step(batch)
    return value() - before


@pytest.fixture(scope="module")
def plain_gain(wide: Path) -> float:
    return gain(wide)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_learns(wide: Path, plain_gain: float, name: str) -> None:
    """About as fast as plain AdamW; Muon's first steps are smaller."""
    assert plain_gain > 10
    assert gain(wide, *OPTIONS[name]) > (0.25 if MUON in OPTIONS[name] else 0.7) * plain_gain


def test_gradients_of_bfloat16_weights_are_summed_in_float32(wide: Path) -> None:
    trainer, whole = (make_trainer(wide, *FLAGS, *ROUNDED, f"--trainer.tokens_per_microbatch={n}") for n in (24, 999))
    for each in (trainer, whole):
        each.before_update = lambda each=each: grads.append({n: p.grad for n, p in each.parameters.items()})
    grads: list[dict[str, Any]] = []
    for each in (trainer, whole):
        each.step(random_batch(38))
    assert {g.dtype for g in grads[0].values()} == {torch.float32}
    parts, once = (torch.cat([g.flatten() for g in found.values()]) for found in grads)
    assert (parts - once).norm() < 0.02 * once.norm()


def resumed(path: Path, folder: Path, *flags: str) -> tuple[Trainer, Trainer]:
    """A trainer of some steps, and one that goes on from its checkpoint."""
    through, saving = make_trainer(path, *FLAGS, *flags), None
    for step in range(STEPS):
        if step == SAVED:
            saving = through.save(folder)  # while the next steps go on
        through.step(random_batch(38, seed=step))
    assert saving
    saving.result()
    again = make_trainer(path, *FLAGS, *flags)
    again.restore(folder)
    for step in range(SAVED, STEPS):
        again.step(random_batch(38, seed=step))
    return through, again


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters and optimizer state of all ranks."""
    found = {name: full_tensor(p.detach()).clone() for name, p in trainer.parameters.items()}
    state = trainer._checkpoint_state()["moments"]
    return found | {f"{n} {kind}": full_tensor(v).clone() for n, each in state.items() for kind, v in each.items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


@pytest.mark.parametrize("name", OPTIONS)
def test_resumed_is_bit_identical_to_uninterrupted(wide: Path, tmp_path: Path, name: str) -> None:
    through, again = resumed(wide, tmp_path / "saved", *OPTIONS[name])
    assert differing(whole_state(through), whole_state(again)) == []


def test_a_checkpoint_of_another_optimizer_is_refused(wide: Path, tmp_path: Path) -> None:
    make_trainer(wide, EIGHT).save(tmp_path / "8bit", last=True).result()
    with pytest.raises(InvalidInput, match=r"of another optimizer: moments\..* resume with the trainer.optimizer"):
        make_trainer(wide).restore(tmp_path / "8bit")


def rank_of(rank: int, model: Path, folder: Path) -> None:
    """On two ranks: resume each option, and keep what ranks hold in the end."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", RENDEZVOUS_FILE: str(folder / "ranks")}
    torch.set_num_threads(1)
    found = {}
    try:
        for name, flags in TWO_RANKS.items():
            through, again = resumed(model, folder / name, "--trainer.ranks=2", *flags)
            states = whole_state(through), whole_state(again)
            found[name] = {"differing": differing(*states), "state": states[0]}
        torch.save(found, folder / f"{rank}.pt")
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    os._exit(0)


@pytest.fixture(scope="module")
def two_ranks(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of their checkpoints, and what each of two ranks found."""
    folder = tmp_path_factory.mktemp("two")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trainers.ranks", "peft"])
    started = [context.Process(target=rank_of, args=(rank, wide, folder)) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(200)
        process.kill()
    errors = [path.read_text() for path in folder.glob("*.error")]
    assert not errors, errors[0]
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_resume_bit_identically_and_stay_alike(
    wide: Path, two_ranks: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    folder, ranks = two_ranks
    assert ranks[0][name]["differing"] == []
    assert differing(*(rank[name]["state"] for rank in ranks)) == []
    if name in OPTIONS:  # one rank goes on from what two have saved, to about the same place
        alone = make_trainer(wide, *FLAGS, *OPTIONS[name])
        start = {n: p.detach().double().clone() for n, p in alone.parameters.items()}
        alone.restore(folder / name)
        for step in range(SAVED, STEPS):
            alone.step(random_batch(38, seed=step))
        moved = sum((p.double() - start[n]).square().sum() for n, p in alone.parameters.items())
        apart = sum((p.double() - ranks[0][name]["state"][n]).square().sum() for n, p in alone.parameters.items())
        assert apart < (0.4 if ROUNDED[0] in OPTIONS[name] else 0.2) ** 2 * moved
