"""One optimizer step: its gradient compared with plain formulas, its invariances, and restored state."""

from __future__ import annotations

import asyncio
import copy
import errno
import json
import math
import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slipstream.algorithms.advantages import group_mean, make_batch
from slipstream.config import loading as configuration
from slipstream.config.schema import ConfigError
from slipstream.model import logprobs as logprobs_module
from slipstream.model.loading import load_causal_lm
from slipstream.model.packing import forward_length, group_by_prefix, plan, prefix_group_length
from slipstream.model.policy import PackedPolicy
from slipstream.rollout import Batch, Completion, Group, Rollout, Sample, VersionSpan, float32_array, int32_array
from slipstream.runtime.disk import DiskFull
from slipstream.runtime.run_directory import RunDirectory
from slipstream.sync.sharded_weights import full_tensor, local_part
from slipstream.tools.export import merge_adapter
from slipstream.trainers.checkpoint import CheckpointFailed, _NoCopyStager
from slipstream.trainers.failures import NotFinite, OutOfMemory, explain_out_of_memory
from slipstream.trainers.trainer import Trainer
from slipstream.trainers.trainer_worker import PytorchTrainerWorker
from tests.families import FAMILIES


def make_trainer(path: Path, *flags: str) -> Trainer:
    named = [f"--model.path={path}", "--model.dtype=float32", "--environment.name=addition"]
    return Trainer(configuration.load_config(None, [*named, *flags]))


def random_batch(vocabulary: int = 40, groups: int = 3, seed: int = 0, kept: bool = False) -> Batch:
    """Groups of different sizes and lengths, off-policy enough for clipping and truncation."""
    rng = random.Random(seed)
    made = []
    for entry in range(groups):
        rollouts = []
        for _ in range(rng.randint(2, 5)):
            prompt = tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, 9)))
            tokens = tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, 12)))
            behaviour = tuple(-rng.uniform(1.0, 6.0) for _ in tokens)
            masks = tuple(
                np.array(sorted({t, *rng.sample(range(vocabulary), 9)}), dtype=np.int32) for t in tokens
            ) if kept else None  # fmt: skip
            completion = Completion(
                prompt,
                tokens,
                behaviour,
                (VersionSpan(0, 0, len(tokens)),),
                "stop",
                rng.choice([1.0, 0.7]),
                sampling_mask=masks,
            )
            rollouts.append(Rollout((completion,), rng.random()))
        made.append(Group(entry, str(entry), tuple(rollouts)))
    return make_batch(made)


def sequences(batch: Batch) -> list[tuple[Completion, float]]:
    """Pairs of each completion and the advantage of its rollout."""
    return [
        (c, a)
        for group, advantages in zip(batch.groups, batch.advantages, strict=True)
        for rollout, a in zip(group.rollouts, advantages, strict=True)
        for c in rollout.completions
    ]


def plain(model: Any) -> Any:
    """The model as Hugging Face runs it, in float64."""
    copied = copy.deepcopy(model).cpu().double()
    copied.set_attn_implementation("eager")
    copied.config.use_cache = False
    return copied


def reference_gradient(
    model: Any, batch: Batch, *, low: float, high: float, truncate: float, kl: float
) -> dict[str, Any]:
    """The same loss, one sequence at a time, with full logits and float64."""
    model = plain(model)
    start = copy.deepcopy(model)
    total = torch.zeros((), dtype=torch.float64)

    def logprobs_of(which: Any, completion: Completion) -> torch.Tensor:
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        logits = which(ids).logits[0, len(completion.prompt_ids) - 1 : -1] / completion.temperature
        if completion.sampling_mask:
            for row, ids_kept in enumerate(completion.sampling_mask):
                outside = [v for v in range(logits.shape[1]) if v not in set(ids_kept.tolist())]
                logits[row, outside] = -torch.inf
        return logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]

    for completion, advantage in sequences(batch):
        logp = logprobs_of(model, completion)
        ratio = torch.exp(logp - torch.tensor(completion.logprobs, dtype=torch.float64))
        weight = ratio.detach().clamp(max=truncate) * logp
        weight = weight - weight.detach() + ratio.detach().clamp(max=truncate)
        clipped = ratio.clamp(1 - low, 1 + high)
        total = total - torch.minimum(weight * advantage, clipped * advantage).sum()
        if kl:
            difference = logprobs_of(start, completion).detach() - logp
            total = total + kl * (difference.exp() - 1 - difference).sum()
    (total / batch.tokens).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def gradient(trainer: Trainer, batch: Batch) -> dict[str, Any]:
    """Gradients of a step, recorded before the update."""
    grads: dict[str, Any] = {}
    trainer.before_update = lambda: grads.update(
        {n: full_tensor(p.grad).cpu().clone() for n, p in trainer.parameters.items()}
    )
    trainer.step(batch)
    return grads


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("budget", [8, 64, 8192])
@pytest.mark.parametrize("kept", [False, True])
def test_gradient_is_that_of_the_plain_formula(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, kl: float, budget: int, kept: bool
) -> None:
    """The gradient is the same for any micro-batches and any chunks of the head."""
    monkeypatch.setattr(logprobs_module, "CHUNK", 64 * 38)  # several chunks of 64 tokens
    trainer = make_trainer(
        tiny, f"--algorithm.kl_coef={kl}", f"--trainer.tokens_per_microbatch={budget}", "--trainer.gradient_clip=0"
    )
    batch = random_batch(vocabulary=38, groups=9, kept=kept)
    wanted = reference_gradient(trainer.model, batch, low=0.2, high=0.2, truncate=3.0, kl=kl)
    got = gradient(trainer, batch)
    assert got.keys() == wanted.keys()
    for name, reference in wanted.items():
        assert (got[name] - reference).abs().max() <= 1e-5 * reference.abs().max(), name


def test_on_policy_gradient_is_reinforce(tiny: Path) -> None:
    """On-policy, the step's gradient is A grad(log p)."""
    trainer = make_trainer(tiny, "--trainer.gradient_clip=0")
    batch = random_batch(vocabulary=38, seed=4)
    scored = trainer.score([c for c, _ in sequences(batch)])
    rest = iter(scored)
    groups = [
        Group(g.visit_id, g.task_id, tuple(
            Rollout(tuple(Completion(c.prompt_ids, c.token_ids, tuple(next(rest)), c.spans, "stop", c.temperature)
                          for c in r.completions), r.reward) for r in g.rollouts))
        for g in batch.groups
    ]  # fmt: skip
    batch = make_batch(groups)
    model = plain(trainer.model)
    total = torch.zeros((), dtype=torch.float64)
    for completion, advantage in sequences(batch):
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        logits = model(ids).logits[0, len(completion.prompt_ids) - 1 : -1] / completion.temperature
        total -= advantage * logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None]).sum()
    (total / batch.tokens).backward()
    got = gradient(trainer, batch)
    for name, parameter in model.named_parameters():
        assert (got[name] - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max(), name


def test_scores_are_those_of_a_full_forward_pass(tiny: Path) -> None:
    trainer = make_trainer(tiny, "--trainer.tokens_per_microbatch=16")
    completions = [c for c, _ in sequences(random_batch(vocabulary=38))]
    for completion, scored in zip(completions, trainer.score(completions), strict=True):
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        with torch.no_grad():
            logits = plain(trainer.model)(ids).logits[0, len(completion.prompt_ids) - 1 : -1] / completion.temperature
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert scored == pytest.approx(wanted.tolist(), abs=1e-5)


def test_samples_without_advantage_cost_no_pass(tiny: Path) -> None:
    signal = random_batch(vocabulary=38)
    silent = Group(9, "9", tuple(Rollout(r.completions, 1.0) for r in random_batch(38, seed=3).groups[0].rollouts))
    both = make_batch([*signal.groups, silent])
    alone = gradient(make_trainer(tiny, "--trainer.gradient_clip=0"), signal)
    together = gradient(make_trainer(tiny, "--trainer.gradient_clip=0"), both)
    for name, grad in alone.items():
        torch.testing.assert_close(together[name] * both.tokens, grad * signal.tokens)


def test_a_batch_without_advantages_updates_nothing(tiny: Path) -> None:
    trainer = make_trainer(tiny)
    before = {n: p.clone() for n, p in trainer.parameters.items()}
    silent = [Group(g.visit_id, g.task_id, tuple(Rollout(r.completions, 0.5) for r in g.rollouts))
              for g in random_batch(38).groups]  # fmt: skip
    stats = trainer.step(make_batch(silent, partial(group_mean, normalize=True)))
    assert stats.grad_norm == 0 and not stats.skipped_steps
    assert all(torch.equal(p, before[n]) for n, p in trainer.parameters.items())


def test_a_gradient_that_is_not_finite_updates_nothing(tiny: Path) -> None:
    trainer = make_trainer(tiny)
    before = {n: p.clone() for n, p in trainer.parameters.items()}
    batch = random_batch(38)
    broken = Batch(batch.groups, tuple((math.inf,) * len(a) for a in batch.advantages))
    stats = trainer.step(broken)
    assert stats.skipped_steps == 1
    assert all(torch.equal(p, before[n]) for n, p in trainer.parameters.items())
    assert trainer.step(batch).skipped_steps == 1
    assert not all(torch.equal(p, before[n]) for n, p in trainer.parameters.items())


def test_gradients_that_are_never_finite_end_the_run(tiny: Path) -> None:
    trainer = make_trainer(tiny, "--trainer.max_consecutive_nonfinite=3")
    batch = random_batch(38)
    broken = Batch(batch.groups, tuple((math.inf,) * len(a) for a in batch.advantages))
    for wrong in (broken, broken, batch, broken, broken):
        trainer.step(wrong)
    with pytest.raises(NotFinite, match=r"trainer\.max_consecutive_nonfinite = 3"):
        trainer.step(broken)


def test_a_resumed_run_remembers_steps_skipped_in_a_row(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny, "--trainer.max_consecutive_nonfinite=3")
    batch = random_batch(38)
    broken = Batch(batch.groups, tuple((math.inf,) * len(a) for a in batch.advantages))
    trainer.step(broken)
    trainer.step(broken)
    trainer.save(tmp_path / "saved").result()
    again = make_trainer(tiny, "--trainer.max_consecutive_nonfinite=3")
    again.restore(tmp_path / "saved")
    with pytest.raises(NotFinite):
        again.step(broken)


def test_out_of_memory_errors_name_options_that_help(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names options that help and are not set yet."""

    def exhausted(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def service(*flags: str) -> PytorchTrainerWorker:
        named = [f"--model.path={tiny}", "--environment.name=addition", "--trainer.tokens_per_microbatch=77", *flags]
        return PytorchTrainerWorker(configuration.load_config(None, named), str(tmp_path))

    full, adapted = service("--algorithm.kl_coef=0.1"), service("--lora.rank=4", "--algorithm.kl_coef=0.1")
    monkeypatch.setattr(PackedPolicy, "forward", exhausted)
    with pytest.raises(OutOfMemory, match=r"to step: .*tokens_per_microbatch = 77.*activation_checkpointing") as error:
        asyncio.run(full.step(random_batch(38)))
    assert "algorithm.kl_coef = 0" in str(error.value) and "lora.rank" in str(error.value)
    assert re.search(r"to step: lower trainer.tokens.*not enough: .*optimizer = \"adamw_8bit\"", str(error.value))
    drawn = random_batch(38).groups[0].rollouts[0].completions
    with pytest.raises(OutOfMemory, match=r"to score: .*lora.quantization") as error:
        asyncio.run(adapted.score(drawn))
    assert "algorithm.kl_coef" not in str(error.value) and "lora.rank" not in str(error.value)
    monkeypatch.setattr("slipstream.trainers.trainer.load_model", exhausted)
    with pytest.raises(OutOfMemory, match=r'has not enough memory to start: set trainer.optimizer = "adamw_8bit"'):
        service()


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
    ],
)
def test_out_of_memory_outside_torchs_allocator_is_reported(message: str) -> None:
    config = configuration.load_config(None, ["--model.path=m", "--environment.name=addition"])
    with pytest.raises(OutOfMemory, match="not enough memory to step"), explain_out_of_memory(config, "step"):
        raise RuntimeError(message)
    with pytest.raises(OutOfMemory), explain_out_of_memory(config, "step"):
        raise MemoryError
    with pytest.raises(RuntimeError, match="of another kind"), explain_out_of_memory(config, "step"):
        raise RuntimeError("a failure of another kind")


def test_dropout_changes_no_probability(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)).save_pretrained(tmp_path)
    trainer, batch = make_trainer(tmp_path), random_batch()
    drawn = [c for group in batch.groups for rollout in group.rollouts for c in rollout.completions]
    assert trainer.score(drawn) == trainer.score(drawn)
    assert trainer.model.transformer.drop.p > 0


@pytest.mark.parametrize(
    ("kind", "change", "refused"),
    [
        ("NanoChat", {}, ""),  # a soft cap alone
        ("OPT", {}, ""),
        ("HyperCLOVAX", {"logits_scaling": 0.5}, "scaled and capped"),  # it multiplies
    ],
)
def test_logits_that_are_not_the_heads_are_refused(kind: str, change: dict[str, Any], refused: str) -> None:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **change
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if not refused:
        PackedPolicy(model)
        return
    with pytest.raises(ValueError, match=f"can't train a {config.model_type}.*{refused}"):
        PackedPolicy(model)


def test_a_model_without_attention_is_trained(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=38, hidden_size=32, num_hidden_layers=2, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    trainer = make_trainer(tmp_path)
    before = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    stats = trainer.step(random_batch(38))
    assert math.isfinite(stats.loss) and not stats.skipped_steps
    assert any(not torch.equal(p, before[name]) for name, p in trainer.parameters.items())


def test_an_adapter_where_a_model_has_to_be_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Also with `lora.rank`: the adapters at model.path would be dropped silently. `lora.path` is for them."""
    make_trainer(tiny, "--lora.rank=4").export(tmp_path)
    for flags in ([], ["--lora.rank=4"]):
        with pytest.raises(ConfigError, match=r"is an adapter of .*give its directory as lora.path"):
            make_trainer(tmp_path, *flags)


@pytest.mark.parametrize("rank", [0, 4])
def test_resumed_is_bit_identical_to_uninterrupted(tiny: Path, tmp_path: Path, rank: int) -> None:
    flags = (f"--lora.rank={rank}", "--trainer.learning_rate=1e-2", "--trainer.warmup_steps=2", "--loop.steps=6")
    through = make_trainer(tiny, *flags)
    for step in range(6):
        if step == 3:
            saved = through.save(tmp_path / "saved")  # while the next steps go on
        through.step(random_batch(38, seed=step))
    saved.result()
    again = make_trainer(tiny, *flags)
    again.restore(tmp_path / "saved")
    for step in range(3, 6):
        again.step(random_batch(38, seed=step))
    assert all(torch.equal(p, again.parameters[n]) for n, p in through.parameters.items())


def test_adapters_of_the_head_are_refused_by_their_option(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora.targets = \[.*'lm_head'\] adapts the language-model head.*name"):
        make_trainer(tiny, "--lora.rank=4", "--lora.targets=['q_proj', 'lm_head']")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", r"lora.target_pattern = '\(': missing \)"),
        ("q_proj", "lora.target_pattern = 'q_proj': .*q_proj not found"),
        (".*(q_proj|lm_head)", "lora.target_pattern = .* adapts the language-model head"),
    ],
)
def test_a_pattern_that_names_no_layers_to_adapt_is_refused(tiny: Path, pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(tiny, "--lora.rank=4", f"--lora.target_pattern={pattern}")


def test_adapters_are_scaled_and_placed_by_their_options(tiny: Path) -> None:
    """A pattern matches whole names, and the rank-stabilised scale is alpha / sqrt(rank)."""
    flags = ("--lora.rank=4", "--lora.alpha=6", "--lora.use_rslora=true")
    trainer = make_trainer(tiny, *flags, r"--lora.target_pattern=.*\.layers\.[12]\..*\.(q|up)_proj")
    adapted = {name.partition(".lora_")[0].removeprefix("base_model.model.model.") for name in trainer.parameters}
    assert adapted == {f"layers.{i}.{name}" for i in (1, 2) for name in ("self_attn.q_proj", "mlp.up_proj")}
    scales = [getattr(module, "scaling", None) for module in trainer.model.modules()]
    assert [scale["default"] for scale in scales if isinstance(scale, dict)] == [3.0] * 4


def test_adapters_drop_inputs_in_training_passes_alone(tiny: Path, tmp_path: Path) -> None:
    """Scores are of the policy that engines serve. A resumed run, and layers that are computed again, drop the same."""
    flags = ("--lora.rank=4", "--trainer.learning_rate=1e-2", "--algorithm.kl_coef=0.1", "--trainer.warmup_steps=1")
    full = "--trainer.activation_checkpointing=full"
    ways = (("--lora.dropout=0",), ("--lora.dropout=0.5",), ("--lora.dropout=0.5",), ("--lora.dropout=0.5", full))
    plain, dropping, again, recomputing = (make_trainer(tiny, *flags, *way) for way in ways)
    batch = random_batch(38)
    drawn = [c for group in batch.groups for rollout in group.rollouts for c in rollout.completions]
    for trainer in (plain, dropping):
        trainer.step(batch)
    for name, parameter in plain.parameters.items():
        dropping.parameters[name].data.copy_(parameter.data)
    assert dropping.score(drawn) == plain.score(drawn)
    dropping.save(tmp_path / "saved").result()
    for trainer in (again, recomputing):
        trainer.restore(tmp_path / "saved")
    norms = [trainer.step(batch).grad_norm for trainer in (plain, dropping, again, recomputing)]
    assert norms[1] == norms[2] == pytest.approx(norms[3], rel=1e-5) != pytest.approx(norms[0], rel=0.01)
    assert all(torch.equal(p, again.parameters[n]) for n, p in dropping.parameters.items())


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_biases_are_trained_with_adapters_and_exported(bias: str, tmp_path: Path) -> None:
    """Whole, merged, and not in the start policy, which KL is measured to."""
    FAMILIES["Phi"].build().save_pretrained(tmp_path / "base")
    flags = ("--lora.rank=2", f"--lora.bias={bias}", "--trainer.learning_rate=0.01", "--trainer.warmup_steps=1")
    trainer = make_trainer(tmp_path / "base", *flags, "--algorithm.kl_coef=0.1", "--lora.targets=['q_proj', 'fc1']")
    names = {name.removeprefix("base_model.model.") for name in trainer.parameters if ".lora_" not in name}
    assert ("lm_head.bias" in names) == (bias == "all") and "model.layers.0.mlp.fc1.base_layer.bias" in names
    batch = random_batch(97)
    drawn = [c for group in batch.groups for rollout in group.rollouts for c in rollout.completions]
    start = trainer.score(drawn)
    for _ in range(2):
        trainer.step(batch)
    (micro,) = trainer._micro_batches(batch.samples())
    assert trainer._reference is not None
    by_reference = sorted(trainer._reference.logprobs(micro).tolist())
    assert by_reference == pytest.approx(sorted(v for values in start for v in values), abs=1e-5)
    trainer.export(tmp_path / "policy")
    merge_adapter(tmp_path / "policy", tmp_path / "merged")
    ids = torch.arange(12)[None]
    trainer.model.get_base_model().set_attn_implementation("eager")
    with torch.no_grad():
        wanted = trainer.model(ids).logits
        for name in ("policy", "merged"):
            loaded = load_causal_lm(str(tmp_path / name), device=torch.device("cpu"), dtype=torch.float32)
            torch.testing.assert_close(loaded(ids).logits, wanted, atol=1e-5, rtol=1e-4)
        base = load_causal_lm(str(tmp_path / "base"), device=torch.device("cpu"), dtype=torch.float32)
        assert (base(ids).logits - wanted).abs().max() > 0.01


def test_biases_of_a_model_without_any_are_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r'lora.bias = "all", but this model has no such biases'):
        make_trainer(tiny, "--lora.rank=2", "--lora.bias=all")


def test_lora_trains_adapters_only_and_exports_them(tiny: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(tiny, "--lora.rank=4", "--trainer.learning_rate=1e-2", "--algorithm.kl_coef=0.1")
    assert all("lora_" in name for name in trainer.parameters)
    for step in range(3):
        assert trainer.step(random_batch(38, seed=step)).kl >= 0
    trainer.export(tmp_path / "policy")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "policy")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        trained = plain(trainer.model).float()(ids).logits
        torch.testing.assert_close(loaded(ids).logits, trained)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(tiny)(ids).logits, trained)


def test_training_starts_from_an_adapter(tiny: Path, tmp_path: Path) -> None:
    """With its log-probabilities and its options, as the reference policy too; then it learns."""
    first = make_trainer(tiny, "--lora.rank=4", "--lora.alpha=8", "--trainer.learning_rate=1e-2")
    for step in range(2):
        first.step(random_batch(38, seed=step))
    first.export(tmp_path / "adapter")
    flags = (f"--lora.path={tmp_path / 'adapter'}", "--trainer.learning_rate=1e-2", "--algorithm.kl_coef=0.1")
    trainer = make_trainer(tiny, *flags)
    assert all(torch.equal(p, trainer.parameters[name]) for name, p in first.parameters.items())
    scored = [turn for group in random_batch(38).groups for rollout in group.rollouts for turn in rollout.completions]
    assert trainer.score(scored) == first.score(scored)
    assert trainer.step(random_batch(38)).kl == pytest.approx(0.0, abs=1e-9), "the reference is the start policy"
    assert trainer.step(random_batch(38)).kl > 1e-6
    assert any(not torch.equal(p, trainer.parameters[name]) for name, p in first.parameters.items())


def test_an_adapter_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    make_trainer(tiny, "--lora.rank=4").export(adapter := tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    stored = load_file(file)
    name = next(name for name in stored if "q_proj.lora_A" in name)
    for tensors, message in (
        ({n: t for n, t in stored.items() if n != name}, f"the files lack {name}"),
        (stored | {"base_model.model.other.lora_A.weight": torch.ones(1)}, "the files hold base_model.model.other"),
        (
            stored | {name: torch.zeros(4, 5)},
            r"q_proj.lora_A.weight is \[4, 5\] in the files and \[4, .*an adapter of '.*'; train it over",
        ),
        (stored | {name: stored[name] / 0}, f"{name} holds values that are not finite"),
    ):
        save_file(tensors, file)
        with pytest.raises(ConfigError, match=f"lora.path = .*{message}"):
            make_trainer(tiny, f"--lora.path={adapter}")
    described = adapter / "adapter_config.json"
    whole = described.read_text()
    described.write_text(json.dumps(json.loads(whole) | {"target_modules": ["embed_tokens"]}))
    with pytest.raises(
        ConfigError, match=r"targets = \['embed_tokens'\] of the adapter at lora.path = .* adapts the emb"
    ):
        make_trainer(tiny, f"--lora.path={adapter}")
    described.write_text(json.dumps(json.loads(whole) | {"exclude_modules": ["q_proj"]}))
    save_file({n: t for n, t in stored.items() if "q_proj" not in n}, file)
    with pytest.raises(ConfigError, match=r'has exclude_modules = \["q_proj"\], which a run can\'t train; merge it'):
        make_trainer(tiny, f"--lora.path={adapter}")


@pytest.mark.parametrize("size", [3, 8])
def test_heads_that_ranks_cannot_share_are_refused(tiny: Path, size: int) -> None:
    model = make_trainer(tiny).model
    context: Any = SimpleNamespace(size=size)
    with pytest.raises(ConfigError, match=f"context_parallel = {size} can't share out .* 4 heads and 2 of keys"):
        PackedPolicy(model, context=context)


def test_a_base_in_4_bits_needs_bitsandbytes(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"4bit.*pip install bitsandbytes"):
        make_trainer(tiny, "--lora.rank=4", "--lora.quantization=4bit")


def test_adapters_learn_over_a_base_in_4_bits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: on some CPUs bitsandbytes repacks layers before which nothing learns, in blocks of 64 columns."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False, raising=False)
    trainer = make_trainer(tiny, "--lora.rank=4", "--lora.quantization=4bit", "--model.dtype=bfloat16")
    assert {p.dtype for n, p in trainer.model.named_parameters() if "q_proj.base" in n} == {torch.uint8}
    before = {name: p.clone() for name, p in trainer.parameters.items()}
    stats = trainer.step(random_batch(38))
    assert math.isfinite(stats.loss) and stats.grad_norm > 0 and all("lora_" in name for name in before)
    assert any(not torch.equal(p, before[n]) for n, p in trainer.parameters.items())


@pytest.mark.parametrize("rank", [0, 8])
def test_other_parameters_are_refused(rank: int, tiny: Path, tmp_path: Path) -> None:
    """Restoring a checkpoint with other names or shapes is refused."""
    make_trainer(tiny, f"--lora.rank={rank}").save(tmp_path / "saved").result()
    with pytest.raises(ValueError, match="other parameters"):
        make_trainer(tiny, "--lora.rank=4").restore(tmp_path / "saved")


SHARDED = ["--model.dtype=bfloat16", "--trainer.keep_compute_copy=false"]


@pytest.mark.parametrize(
    "flags", [[], ["--lora.rank=4"], SHARDED, ["--algorithm.kl_coef=0.1", "--algorithm.reference=average"]]
)
@pytest.mark.parametrize("where", ["parameters", "moments", "average"])
def test_a_broken_policy_leaves_the_last_checkpoint(tiny: Path, tmp_path: Path, flags: list[str], where: str) -> None:
    trainer, directory = make_trainer(tiny, *flags), RunDirectory(tmp_path)

    async def checkpoint(step: int) -> None:
        async with directory.new_checkpoint(step, keep=1) as path:
            trainer.save(path / "trainer").result()

    asyncio.run(checkpoint(1))
    name, parameter = list(trainer.parameters.items())[-1]
    state = trainer._checkpoint_state()
    broken = {
        "parameters": parameter.detach(),
        "moments": state["moments"][name]["exp_avg_sq"],
        "average": state["average"].get(name),
    }[where]
    if broken is None:
        return
    local_part(broken).view(-1)[-1] = float("nan")
    with pytest.raises(CheckpointFailed, match=rf"{re.escape(name)} holds values that are not finite. No checkpoint"):
        asyncio.run(checkpoint(2))
    assert [path.name for path in directory.checkpoints()] == ["step_1"]


def test_the_last_checkpoint_takes_no_copy_of_the_state(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny)
    trainer.step(random_batch(38))
    for last in (False, True):
        trainer.save(tmp_path / str(last), last).result()
        again = make_trainer(tiny)
        again.restore(tmp_path / str(last))
        assert again.step_count == 1
        assert all(torch.equal(p, again.parameters[n]) for n, p in trainer.parameters.items())
    state = trainer._checkpoint_state()
    assert _NoCopyStager().stage(state) is state


def test_a_failed_checkpoint_write_is_reported(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a failed read. Torch raises a `BaseException` for both."""
    trainer = make_trainer(tiny)
    trainer.save(tmp_path / "whole").result()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.distributed.checkpoint.filesystem, "_write_item", full)
    with pytest.raises(DiskFull, match=r"the disk is full: .*saved can't be written"):
        trainer.save(tmp_path / "saved").result()
    (written,) = (tmp_path / "whole").glob("*.distcp")
    written.write_bytes(written.read_bytes()[:100])
    with pytest.raises(CheckpointFailed, match=r"whole could not be read by rank 0: \w"):
        trainer.restore(tmp_path / "whole")
    with pytest.raises(DiskFull):  # over one that was whole, of which a part may be left
        trainer.save(tmp_path / "whole").result()
    with pytest.raises(ValueError, match=r"whole holds no whole checkpoint: there is no .metadata"):
        trainer.restore(tmp_path / "whole")


ITEMS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 10**15)), max_size=40)


@given(ITEMS, st.integers(1, 120), st.integers(1, 4), st.booleans())
def test_micro_batches_hold_every_item_once_within_the_budget(
    items: list[tuple[int, int]], budget: int, ranks: int, dear: bool
) -> None:
    sizes, costs = [size for size, _ in items], [cost for _, cost in items]
    planned = plan(sizes, budget, ranks, costs if dear else None)
    assert len(planned) == ranks and len({len(batches) for batches in planned}) == 1
    assert sorted(i for batches in planned for b in batches for i in b) == list(range(len(sizes)))
    for batches in planned:
        for batch in batches:
            assert len(batch) <= 1 or sum(sizes[i] for i in batch) <= budget


@pytest.mark.parametrize("longest", [[], [15_500]])
@pytest.mark.parametrize("seed", [0, 1, 2, 4])
def test_micro_batches_balance_cost_between_ranks(longest: list[int], seed: int) -> None:
    """Groups of 8 completions of log-normal lengths, without or with one that nearly fills a micro-batch of its own.

    If each group_by_prefix stayed in the micro-batch that was the emptiest when its turn came, ranks would wait for 7
    to 23 tokens in a thousand.
    """
    draw, ranks = random.Random(seed), 4
    sizes = [sum(round(draw.lognormvariate(6, 0.6)) for _ in range(8)) for _ in range(18 * ranks)]
    sizes += longest
    planned = plan(sizes, 16384, ranks)
    rounds = [[sum(sizes[i] for i in batch) for batch in batches] for batches in zip(*planned, strict=True)]
    without = rounds[len(longest) :]  # micro-batches that can be alike
    assert sum(map(max, without)) < 1.002 * sum(map(sum, without)) / ranks


@pytest.mark.parametrize(("groups", "size", "ranks"), [(8, 8, 8), (8, 8, 16), (4, 16, 8), (2, 32, 4), (16, 8, 16)])
def test_a_few_groups_leave_no_rank_without_work(groups: int, size: int, ranks: int) -> None:
    """Groups are divided among ranks, which costs little more than completions with a prompt each.
    Undivided, 8 long groups on 16 ranks would take twice as long."""
    draw = random.Random(0)
    samples = [
        Sample(
            int32_array(prompt + drawn),
            int32_array(range(len(prompt), len(prompt + drawn))),
            float32_array(()),
            int32_array(()),
            float32_array(()),
            float32_array(()),
            (),
        )
        for prompt in (tuple(draw.choices(range(99), k=128)) for _ in range(groups))
        for drawn in ((1,) * min(2000, round(draw.lognormvariate(6, 0.6))) for _ in range(size))
    ]
    alone = plan([forward_length(sample) for sample in samples], 16384, ranks)

    def longest(planned: list[list[list[int]]], sizes: Sequence[int]) -> int:
        return sum(max(sum(sizes[i] for i in b) for b in batches) for batches in zip(*planned, strict=True))

    prefix_groups = group_by_prefix(samples, 16384, ranks=ranks)
    sizes = [prefix_group_length(samples, members) for members in prefix_groups]
    assert sorted(i for members in prefix_groups for i in members) == list(range(len(samples)))
    assert longest(plan(sizes, 16384, ranks), sizes) <= 1.05 * longest(
        alone, [forward_length(sample) for sample in samples]
    )


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(("longest", "lost"), [(16384, 0.025), (32768, 0.085)])
def test_long_sequences_balance_between_ranks(longest: int, lost: float, ranks: int) -> None:
    """At the costs of a Qwen3 of 1.7 B: a token of a long sequence takes up to twice what one of a short sequence does.

    Evened out by tokens, ranks would wait 7 to 22 % of a step. Some of that is left where a sequence alone is dearer
    than a micro-batch of others.
    """
    waits = []
    for seed in range(6):
        draw, sizes = random.Random(seed), list[int]()
        while sum(sizes) < 2**17 * ranks:
            sizes.append(min(longest, max(8, int(draw.lognormvariate(math.log(longest / 8), 1.0)))))
        costs = [10_320 * size + 688 * size * (size + 1) // 2000 for size in sizes]
        planned = plan(sizes, longest, ranks, costs)
        rounds = [[sum(costs[i] for i in batch) for batch in batches] for batches in zip(*planned, strict=True)]
        waits.append(sum(map(max, rounds)) / (sum(map(sum, rounds)) / ranks) - 1)
    assert sum(waits) / len(waits) < lost


def test_a_restored_trainer_continues_its_token_count(tiny: Path, tmp_path: Path) -> None:
    flags = ("--loop.max_tokens=1000", "--loop.steps=1000", "--trainer.learning_rate=1.0")
    trainer = make_trainer(tiny, *flags)
    tokens = trainer.step(random_batch(38, seed=0)).tokens
    trainer.save(tmp_path / "saved").result()
    again = make_trainer(tiny, *flags)
    again.restore(tmp_path / "saved")
    assert tokens > 10
    assert again.step(random_batch(38, seed=1)).learning_rate == pytest.approx(1 - tokens / 1000)
