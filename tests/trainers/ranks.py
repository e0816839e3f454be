"""Runs one trainer as one, two or four ranks, in each way of parallelism, and keeps what it found.

Ranks are real processes that talk over gloo. Each size is started once for all tests of a file.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM

from slipstream.config.loading import load_config
from slipstream.rollout import Batch, Rollout
from slipstream.sync.adapters import read_adapter
from slipstream.sync.sharded_weights import full_tensor
from slipstream.trainers import trainer_worker
from slipstream.trainers.trainer import Trainer
from tests.conftest import save_model
from tests.trainers.test_trainer import make_trainer, random_batch, sequences

FLAGS = ("--trainer.learning_rate=1e-3", "--trainer.warmup_steps=2", "--loop.steps=6", "--trainer.gradient_clip=0.5",
         "--trainer.tokens_per_microbatch=24")  # fmt: skip
DDP, CONTEXT, EXPERTS = "--trainer.parallel=ddp", "--trainer.context_parallel=", "--trainer.expert_parallel=2"
KL, LORA = "--algorithm.kl_coef=0.1", ("--lora.rank=4", "--algorithm.kl_coef=0.1")


class Way(NamedTuple):
    """A way to be some numbers of ranks, the way of one rank that trains the same, what is trained, and whether batches
    have what generation recorded: the tokens that sampling kept, and the experts of a mixture."""

    like: str
    sizes: tuple[int, ...]
    flags: tuple[str, ...] = ()
    model: str = "dense"
    recorded: bool = False


WAYS = {
    "fsdp": Way("fsdp", (1, 2, 4)),
    "kl": Way("kl", (1, 2), (KL, "--trainer.activation_checkpointing=full")),
    "copy": Way("copy", (1, 2), (KL, "--model.dtype=bfloat16")),
    "by layer": Way("copy", (1,), (KL, "--model.dtype=bfloat16", "--trainer.keep_compute_copy=false")),
    "lora": Way("lora", (1, 2), LORA),
    "lora ddp": Way("lora", (2,), (DDP, *LORA)),
    "bfloat16": Way("bfloat16", (1, 2), (*LORA, "--model.dtype=bfloat16")),
    "mixture": Way("mixture", (1, 2), (KL,), "mixture"),
    "mixture lora": Way("mixture lora", (1,), LORA, "mixture"),
    "ddp": Way("fsdp", (2, 4), (DDP,)),
    "tensor": Way("fsdp", (2,), ("--trainer.parallel=tensor",)),
    "average": Way("average", (1,), (KL, "--algorithm.reference=average")),
    "average tensor": Way("average", (2,), ("--trainer.parallel=tensor", KL, "--algorithm.reference=average")),
    "hybrid": Way("fsdp", (4,), ("--trainer.fsdp_shard_size=2",)),
    "context": Way("fsdp", (2, 4), (f"{CONTEXT}2",)),
    "context ddp": Way("fsdp", (2,), (f"{CONTEXT}2", DDP)),
    "context kl": Way("kl", (4,), (f"{CONTEXT}4", KL, "--trainer.activation_checkpointing=full")),
    "experts": Way("mixture", (2, 4), (EXPERTS, KL), "mixture"),
    "experts full": Way("mixture", (2,), (EXPERTS, KL, "--trainer.activation_checkpointing=full"), "mixture"),
    "experts context": Way("mixture", (4,), (EXPERTS, f"{CONTEXT}2", KL), "mixture"),
    "average mixture": Way("average mixture", (1,), (KL, "--algorithm.reference=average"), "mixture"),
    "experts average": Way("average mixture", (2,), (EXPERTS, KL, "--algorithm.reference=average"), "mixture"),
    "experts lora": Way("mixture lora", (2,), (EXPERTS, *LORA), "mixture"),
    "adapted experts": Way("adapted experts", (1, 2), ("--lora.rank=4", "--lora.experts=true"), "mixture"),
    "rounded": Way("rounded", (1,), (KL,), "rounded"),
    "half": Way("rounded", (1, 2), (KL,), "half"),
    "half tensor": Way("rounded", (2,), (KL, "--trainer.parallel=tensor"), "half"),
    "rounded mixture": Way("rounded mixture", (1,), (), "rounded mixture"),
    "half mixture": Way("rounded mixture", (2,), (EXPERTS,), "half mixture"),
    "recorded": Way("recorded", (1,), (KL,), recorded=True),
    "recorded tensor": Way("recorded", (2,), ("--trainer.parallel=tensor", KL), recorded=True),
    "recorded mixture": Way("recorded mixture", (1,), (), "mixture", recorded=True),
    "recorded experts context": Way("recorded mixture", (4,), (EXPERTS, f"{CONTEXT}2"), "mixture", recorded=True),
}
SIZES = (1, 2, 4)
# The way and size that saved what ranks of a size go on from.
RESUMED = {
    1: ("hybrid 4", "lora 2", "experts 4"),
    2: ("fsdp 1", "mixture 1"),
    4: ("fsdp 2", "ddp 2", "tensor 2"),
}
STEPS, SAVED, SILENT = 4, 1, 2
Found = dict[str, Any]


def batch_of(step: int, way: Way) -> Batch:
    """One batch has no advantages; the last is so small that one of four ranks has no micro-batch."""
    batch = random_batch(38, groups=1 if step == STEPS - 1 else 3, seed=step, kept=way.recorded)
    if way.recorded and way.model == "mixture":
        batch = with_experts(batch, np.random.default_rng(step))
    return replace(batch, advantages=tuple((0.0,) * len(a) for a in batch.advantages)) if step == SILENT else batch


def with_experts(batch: Batch, rng: np.random.Generator) -> Batch:
    """Random recorded experts: 2 of 4 in each of 2 layers."""

    def chosen(rollout: Rollout) -> Rollout:
        (c,) = rollout.completions
        order = rng.random((len(c.prompt_ids) + len(c.token_ids) - 1, 2, 4)).argsort(-1)
        return replace(rollout, completions=(replace(c, experts=order[..., :2].astype(np.uint8)),))

    return replace(batch, groups=tuple(replace(g, rollouts=tuple(map(chosen, g.rollouts))) for g in batch.groups))


def gathered(trainer: Trainer) -> dict[str, Tensor]:
    return {name: full_tensor(p.detach()).clone() for name, p in trainer.parameters.items()}


def run(trainer: Trainer, way: Way, first: int, save: Path | None = None) -> Found:
    """Take steps from `first` on; after step `SAVED` a checkpoint is written during the next steps."""
    steps, saving, gradients = [], None, {}

    def keep() -> None:
        gradients.update({n: full_tensor(p.grad).clone() for n, p in trainer.parameters.items() if p.grad is not None})

    trainer.before_update = keep
    for step in range(first, STEPS):
        if save and step == SAVED:
            saving = trainer.save(save)
        steps.append(asdict(trainer.step(batch_of(step, way))))
        trainer.before_update = lambda: None
    if saving:
        saving.result()
    scores = trainer.score([c for c, _ in sequences(batch_of(0, way))])
    return {"steps": steps, "gradients": gradients, "parameters": gathered(trainer), "scores": scores}


def published(trainer: Trainer, folder: Path) -> dict[str, Tensor]:
    """The tensors that an engine reads if these ranks publish their adapter by `lora`; empty on ranks other than 0."""
    sent_by_lora = ["--sync.link=lora", "--generator.engine=vllm", "--lora.rank=4"]
    config = load_config(None, ["--model.path=m", "--environment.name=e", "--model.dtype=float32", *sent_by_lora])
    with mock.patch.object(trainer_worker, "Trainer", lambda _: trainer):
        worker = trainer_worker.PytorchTrainerWorker(config, str(folder))

    async def publish() -> dict[str, Tensor]:
        await worker.open_link(1)
        handle = await worker.stage(1)
        await worker.send(handle or {})
        found = read_adapter(Path(handle["path"]), torch.device("cpu")) if handle else {}
        await worker.release(handle or {})
        return found

    found = asyncio.run(publish())
    worker.close()
    return found


def tried(size: int, plain: bool) -> list[str]:
    """Ways of parallelism of this size: that train what plain FSDP trains, or all others."""
    return [name for name, way in WAYS.items() if size in way.sizes and (way.like == "fsdp") == plain]


def resumed(size: int, plain: bool) -> list[str]:
    """What this number of ranks resumes, as `tried`."""
    return [saved for saved in RESUMED[size] if (WAYS[saved.rpartition(" ")[0]].like == "fsdp") == plain]


def measure(models: Path, folder: Path, size: int, plain: bool) -> Found:
    """Results of a rank for each way of parallelism of this size."""
    found: Found = {}
    for name in tried(size, plain):
        way = WAYS[name]
        trainer = make_trainer(models / way.model, *FLAGS, *way.flags, f"--trainer.ranks={size}")
        assert (trainer._compute_copies is None) == (name not in ("copy", "bfloat16") or trainer.ranks.is_fsdp)
        if size > 1:
            trainer.warm_up()  # as compiled trainers do, on a GPU
        if name == "experts":
            compile_as_a_whole(trainer)
        found[name] = run(trainer, way, 0, folder / f"{name} {size}")
        trainer.export(folder / f"{name} {size} exported")
        if way.like == "lora":
            found[name]["published"] = published(trainer, folder / f"{name} {size} published")
    return found


def compile_as_a_whole(trainer: Trainer) -> None:
    """The exchange of tokens has no part that can't be compiled, and is right for any number of tokens."""
    layer: Any = trainer.model.model.layers[0].mlp.experts
    exchange = torch.compile(layer.forward, backend="eager", fullgraph=True, dynamic=True)
    for count in (5, 7):
        inputs = torch.randn(count, 32), torch.randint(4, (count, 2)), torch.rand(count, 2)
        assert torch.equal(exchange(*inputs), layer(*inputs))


def go_on(models: Path, folder: Path, size: int, names: Sequence[str]) -> Found:
    """Results of a rank after resuming from checkpoints, with this number of ranks."""
    found: Found = {}
    for saved in names:
        way = WAYS[resumed_as(saved, size)]
        trainer = make_trainer(models / way.model, *FLAGS, *way.flags, f"--trainer.ranks={size}")
        trainer.restore(folder / saved)
        found[saved] = run(trainer, way, SAVED)
    return found


def resumed_as(saved: str, size: int) -> str:
    """The way of parallelism that resumes a checkpoint with this number of ranks."""
    way = saved.rpartition(" ")[0]
    if way == "mixture" and size > 1:
        return "experts"
    return way if size in WAYS[way].sizes else WAYS[way].like


def rank_of(rank: int, size: int, plain: bool, port: int, models: Path, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    torch.set_num_threads(1)
    try:
        found = measure(models, folder, size, plain)
        found |= go_on(models, folder, size, resumed(size, plain) if size > 1 else ["by layer 1"] * (not plain))
    except BaseException:
        (folder / f"rank {rank} of {size}.error").write_text(traceback.format_exc())
        os._exit(1)
    if rank == 0:
        torch.save(found, folder / f"{size}.pt")
    os._exit(0)


def start_ranks(size: int, plain: bool, models: Path, folder: Path) -> None:
    """Run ranks in forked processes with all modules imported; raises the first failure."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trainers.ranks", "peft"])
    ranks = [(rank, size, plain, store.port, models, folder) for rank in range(size)]
    started = [context.Process(target=rank_of, args=arguments) for arguments in ranks]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        process.kill()
    errors = [path.read_text() for path in folder.glob(f"*of {size}.error")]
    assert not errors, errors[0]


def find(tmp_path_factory: pytest.TempPathFactory, plain: bool) -> dict[int, Found]:
    """Results by number of ranks."""
    folder, models = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("models")
    save_model(models / "dense", vocab_size=38, num_hidden_layers=2)
    save_model(models / "mixture", family="qwen3_moe", vocab_size=38, num_hidden_layers=2)
    for name, as_half, rounded in (("dense", "half", "rounded"), ("mixture", "half mixture", "rounded mixture")):
        model: Any = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.bfloat16)
        model.save_pretrained(models / as_half)
        model.float().save_pretrained(models / rounded)
    for size in SIZES:
        start_ranks(size, plain, models, folder)
    by_size = {size: torch.load(folder / f"{size}.pt", weights_only=False) for size in SIZES}
    by_size[1] |= go_on(models, folder, 1, resumed(1, plain))
    return {0: {"folder": folder}, **by_size}


def agree(got: Found, wanted: Found) -> None:
    for step, other in zip(got["steps"], wanted["steps"][-len(got["steps"]) :], strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl", "mismatch_kl", "ratio_mean", "effective_sample_size",
                     "clip_fraction", "tokens", "learning_rate", "step", "expert_max_load"):  # fmt: skip
            if other[name] is not None or step[name] is not None:
                assert step[name] == pytest.approx(other[name], rel=2e-5, abs=1e-6), name
    # Adam divides a gradient by its size, and what is rounding in a small one is more in the step.
    for what, bound in (("gradients", 1e-5), ("parameters", 1e-4)):
        if what == "gradients" and len(got["steps"]) < STEPS:
            continue  # of another step
        for name, tensor in wanted[what].items():
            scale = tensor.abs().max().item()
            assert (got[what][name] - tensor).abs().max().item() <= bound * scale, (what, name)
    for one, other in zip(got["scores"], wanted["scores"], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
