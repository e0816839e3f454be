"""Every option of a run, once: its name, type, default, bounds and meaning.

A configuration is a TOML file with dotted flags over it (`--trainer.learning_rate 1e-5`). It is validated before
anything is loaded; whatever is wrong is one `ConfigError` line that names the option and the remedy.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from slipstream import engine_options
from slipstream.rollout import Sampling

HIGHEST_RANK = 512  # of adapters, that vLLM makes room for
PATHS = ("model.path", "teacher.path")
LARGEST = 2**63 - 1  # whole number that a seed, a tensor or a TOML reader takes
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
NO_SYSTEM = "Slipstream runs on Linux, and on macOS on the CPU; on Windows use WSL 2"
NO_DEVICE = 'it must be "auto", "cpu", "cuda" or "cuda:N": Slipstream computes on CPUs and on CUDA GPUs'


class ConfigError(ValueError):
    """A configuration that can't be run. The message is one line for a person."""


class Section(BaseModel):
    """A part of the configuration. A value must have its option's type: no text for a number, no 1 for true."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("device", check_fields=False)
    @classmethod
    def _supported(cls, device: str) -> str:
        if not DEVICE.fullmatch(device):
            raise ConfigError(NO_DEVICE)
        return device


def option(default: Any, description: str, **bounds: Any) -> Any:
    if type(default) is int:
        bounds.setdefault("le", LARGEST)
    return Field(default, description=description, validate_default=True, **bounds)


class ModelConfig(Section):
    """The policy to fine-tune."""

    path: str = Field(description="Hugging Face model: a local directory or a name on the Hub.", min_length=1)
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", 'What both sides compute in; "auto" is "bfloat16" on GPUs, and "float32" if one of them is on a CPU.'
    )


class LoraConfig(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: int = option(0, "Rank of the adapters; 0 trains every weight.", ge=0, le=4096)
    alpha: float = option(32.0, "Scale of the adapters: their product is multiplied by alpha / rank.", gt=0)
    targets: list[str] = option([], "Module names to adapt; empty means every linear layer but the head.")
    base: Literal["whole", "4bit"] = option(
        "whole", "Weights below the adapters: in model.dtype, or in 4 bits by bitsandbytes, on both sides."
    )
    experts: bool = option(False, "Adapt the experts of a mixture, too, which are no linear layers.")


class EnvironmentConfig(Section):
    """Where tasks come from and how rollouts are rewarded."""

    name: str = Field(
        description='"gsm8k", "addition", "reasoning-gym:TASK", "verifiers:ENV", or your own as "module:thing" or '
        '"path/to/file.py:thing".',
        min_length=1,
    )
    options: dict[str, Any] = option({}, "Keyword arguments of the environment.")
    time_limit: float = option(
        300.0,
        "Seconds that one rollout may take, generation included, but not the time that engines sleep or that it waits "
        "for a slot of an engine.",
        gt=0,
    )
    max_concurrent: int = option(
        0,
        "Most episodes in flight; others wait to begin, outside of their time limit. 0 means twice the slots of all "
        "engines, and no bound with loop.max_lag = 0, where a bound makes results depend on timing.",
        ge=0,
    )
    turns: int = option(0, "Replies of the policy after which a conversation ends; 0: no limit.", ge=0)
    tokens: int = option(0, "Tokens drawn after which a conversation ends; 0: no limit.", ge=0)
    max_failures: int = option(
        10,
        "Different tasks of which rollouts may fail in a row before the run stops. As long as none has succeeded: "
        "rollouts, if all tasks in flight fail.",
        ge=1,
    )
    scorers: int = option(
        0, "Most processes for reward functions that are not async, started when needed; 0 is one a core.", ge=0
    )
    reward_error: Literal["zero", "fail"] = option(
        "zero", "A reward function that raises: the reward is 0, counted, with a warning; or the rollout fails."
    )


class ScoringConfig(Section):
    """How finished rollouts get their rewards, beside generation, where the environment does not give them."""

    kind: str = option(
        "",
        '"" (the environment\'s own rewards), "http" (a judge behind a URL), "model" (a reward or process-reward '
        'model), or your own function or class as "module:thing".',
    )
    options: dict[str, Any] = option({}, "Keyword arguments of the scorer.")
    weights: dict[str, float] = option(
        {}, 'Parts of the reward and their weights, such as { environment = 1.0, score = 0.5 }; empty means "score".'
    )
    concurrency: int = option(64, "Most rollouts in scoring at once; others queue.", ge=1)
    time_limit: float = option(60.0, "Seconds that scoring one rollout may take, the queue not included.", gt=0)


class TeacherConfig(Section):
    """A model whose log-probabilities of the drawn tokens go with every rollout, to distill from."""

    path: str = option("", "Hugging Face model with the policy's vocabulary; empty means no fixed teacher.")
    lag: int = option(
        0, "The teacher is the policy as it was this many versions ago; 0: it is the model at path.", ge=0
    )
    kind: Literal["torch", "vllm"] = option("torch", "What runs it.")
    memory: float = option(
        0.0,
        "Share of a GPU's memory (vllm), on a CPU of the host's; 0 means 0.4, there room for one sequence.",
        ge=0,
        le=1,
    )
    options: dict[str, Any] = option({}, "Further engine arguments, passed on as they are (vllm).")
    device: str = option("auto", '"auto", "cpu", "cuda" or "cuda:N".')
    threads: int = option(0, "CPU threads; 0 shares the cores out.", ge=0)


class SamplingConfig(Section):
    """How training completions are drawn."""

    temperature: float = option(1.0, "Softmax temperature of training rollouts, from 0.01 to 100.", gt=0)
    top_k: int = option(0, "Keep the k likeliest tokens; 0 keeps all.", ge=0)
    top_p: float = option(1.0, "Keep the likeliest tokens up to this probability mass.", gt=0, le=1)
    max_tokens: int = option(128, "Longest completion in tokens.", ge=1)
    stop: list[Annotated[str, Field(min_length=1)]] = option(
        [], "Strings that end a completion; the model's end-of-sequence token always does."
    )


class LoopConfig(Section):
    """How much work, and how far generation may run ahead of training."""

    steps: int = option(100, "Optimizer steps.", ge=1)
    tokens: int = option(
        0, "Trained tokens after which the run ends, if steps do not end it before; 0 is no end.", ge=0
    )
    groups_per_step: int = option(8, "Groups (tasks) that one step trains on.", ge=1)
    group_size: int = option(8, "Rollouts a task, scored against each other.", ge=2)
    max_lag: int = option(1, "Versions that a trained token may be behind: 0 is synchronous, 1 one ahead.", ge=0)
    hold_lag: bool = option(
        False, "Train only when the buffer is as full as max_lag allows, so that tokens are that old: for studies."
    )
    buffer: int = option(0, "Most groups in generation and in the buffer; 0 means what max_lag can use.", ge=0)
    retries: int = option(3, "Times that a failed or stale task is tried again.", ge=0)
    seed: int = option(0, "Seed of task order, sampling and initialisation.", ge=0)


class GeneratorConfig(Section):
    """The generator pool."""

    kind: str = option("torch", '"torch" (embedded), "vllm", or your own service as "module:Class" or "file.py:Class".')
    count: int = option(1, "Generators, each in its own process.", ge=1)
    servers: list[str] = option([], "URLs of vLLM servers that you started, to attach to instead (vllm).")
    tensor_parallel: int = option(1, "GPUs that one generator's weights are spread over (vllm).", ge=1)
    memory: float = option(
        0.0,
        "Share of a GPU's memory for one generator (vllm), on a CPU of the host's; 0 means 0.85, or 0.8 divided by "
        "the processes that use it, and on a CPU room for one whole sequence and some more.",
        ge=0,
        le=1,
    )
    options: dict[str, Any] = option({}, "Further engine arguments, passed on as they are (vllm).")
    slots: int = option(64, "Sequences that one generator decodes at once.", ge=1)
    context: int = option(0, "Longest prompt plus completion in tokens; 0 means the model's own limit.", ge=0)
    device: str = option("auto", '"auto", "cpu", "cuda" or "cuda:N".')
    threads: int = option(0, "CPU threads of each generator; 0 shares the cores out.", ge=0)

    @property
    def engines(self) -> int:
        """Those that the run starts: servers run by themselves."""
        return 0 if self.servers else self.count

    @property
    def remote(self) -> str:
        """Host and port of the first server on another host, or ""."""
        urls = [urlsplit(url) for url in self.servers]
        return next((u.netloc for u in urls if u.hostname not in ("localhost", "127.0.0.1", "::1")), "")

    @model_validator(mode="before")
    @classmethod
    def _count_servers(cls, values: Any) -> Any:
        servers = values.get("servers") if isinstance(values, dict) else None
        return {"count": len(servers)} | values if servers and isinstance(servers, list) else values


class TrainerConfig(Section):
    """The optimizer and its schedule."""

    kind: str = option("pytorch", '"pytorch", or your own service as "module:Class" or "file.py:Class".')
    ranks: int = option(1, "Processes that train together, each with a GPU of its own.", ge=1)
    parallel: Literal["fsdp", "ddp", "tensor"] = option(
        "fsdp",
        "What each of several ranks holds of weights and optimizer: a part (fsdp), all (ddp), or a part with "
        "which it takes part in all tokens (tensor).",
    )
    shards: int = option(0, "Ranks over which one copy of the weights is spread (fsdp); 0 is all of them.", ge=0)
    context_parallel: int = option(1, "Ranks that share the tokens of each micro-batch, for long sequences.", ge=1)
    expert_parallel: int = option(1, "Ranks over which each layer's experts are spread (fsdp, mixtures).", ge=1)
    learning_rate: float = option(1e-5, "Peak learning rate of AdamW.", gt=0)
    betas: tuple[float, ...] = option((0.9, 0.99), "Decay rates of AdamW's two moments.", strict=False)
    weight_decay: float = option(0.0, "Decoupled weight decay.", ge=0)
    warmup_steps: int = option(0, "Steps over which the learning rate rises from 0.", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = option(
        "linear", "Decay to 0 after warm-up, over loop.steps or loop.tokens, whichever ends first."
    )
    gradient_clip: float = option(1.0, "Largest norm of the gradient; 0 does not clip.", ge=0)
    max_skipped: int = option(
        10, "Steps in a row whose loss or gradient is not finite that end the run; 0 is no end.", ge=0
    )
    tokens_per_microbatch: int = option(16384, "Most tokens in one forward and backward pass.", ge=1)
    activation_checkpointing: Literal["none", "selective", "full"] = option(
        "selective", "What the backward pass computes again: nothing, all but matrix products, or whole layers."
    )
    compute_copy: bool = option(
        True, "Keep a copy of the weights in model.dtype; false makes it layer by layer, for less memory (one rank)."
    )
    compile: bool = option(True, "Compile the layers on a GPU: faster after the first steps.")
    attention: Literal["auto", "torch", "FA3", "FA4"] = option(
        "auto", "Attention on a GPU: FlashAttention 3 or 4, by default if one is installed and right, else torch's own."
    )
    probe_bound: float = option(
        0.0, "Largest log-probability difference to the generator at start; 0 means 1e-3 (float32) or 0.5.", ge=0
    )
    device: str = option("auto", '"auto", "cpu", "cuda" or "cuda:N".')
    threads: int = option(0, "CPU threads of the trainer; 0 shares the cores out.", ge=0)


class AlgorithmConfig(Section):
    """The learning rule; see docs/algorithms.md. What has options is a name, or a table of a name and its options."""

    advantage: dict[str, Any] = option(
        {"name": "group_mean"},
        'Baseline of a group: "group_mean", "leave_one_out", "pass_at_k", "reward", or your own.',
    )
    whiten: bool = option(False, "Give the advantages of a step mean 0 and standard deviation 1.")
    parts: dict[str, float] = option(
        {}, "Weights of parts of the reward, by the metrics that hold them; each has its own baseline."
    )
    process: float = option(
        0.0, "Weight of the rewards that a scorer gives to steps, added token by token; 0 leaves them out.", ge=0
    )
    overlong: Literal["train", "filter", "penalty"] = option(
        "train",
        "Rollouts that were cut off at sampling.max_tokens: train on them, leave them out, or punish their length.",
    )
    overlong_soft: int = option(0, "Tokens before sampling.max_tokens over which the penalty rises from 0 to 1.", ge=0)
    loss: dict[str, Any] = option(
        {"name": "grpo"},
        'Loss of a token: "grpo", "ppo", "gspo", "cispo", "topr", "reinforce", "decoupled", "dppo_tv", "dppo_kl", '
        '"sapo", or your own as "module:function".',
    )
    corrections: list[dict[str, Any]] = option(
        [],
        'Weights of off-policy tokens, multiplied: "truncate_tokens", "icepop", "mask_tokens", "opsm", and more.',
    )
    aggregation: dict[str, Any] = option(
        {"name": "token_mean"},
        'What the step averages over: "token_mean", "sequence_mean", or "constant" with a length.',
    )
    kl: float = option(0.0, "Weight of the KL divergence to the reference policy; 0 needs no second model.", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = option("k3", "Estimate of that divergence from sampled tokens.")
    kl_weighted: bool = option(False, "Weigh that estimate by the ratio to the behaviour policy (k1 and k3).")
    reference: str = option(
        "start", 'Reference policy: "start", "average" of the policy over the steps, or a model\'s path.'
    )
    reference_decay: float = option(0.99, "Share of itself that the average keeps at each step.", ge=0, lt=1)
    keep_sampling_mask: bool = option(
        True, "Train on the distribution that top_k and top_p left, recorded at generation; false trains on all of it."
    )
    keep_routing: bool = option(
        True, "Train through the experts that generation chose, recorded there (mixtures of experts)."
    )
    filter_equal: bool = option(False, "Replace groups whose advantages are all 0 instead of skipping their gradient.")
    filter_most: int = option(
        0, "Groups to replace in a row before they are trained on as they are; 0 means 20 steps' worth.", ge=0
    )

    @field_validator("advantage", "loss", "aggregation", "corrections", mode="before")
    @classmethod
    def _named(cls, value: Any, info: ValidationInfo) -> Any:
        """A name alone is a table without options; a table without a name is of the default."""
        if info.field_name == "corrections":
            values = [value] if isinstance(value, str | dict) else value
            return [{"name": v} if isinstance(v, str) else v for v in values] if isinstance(values, list) else values
        if isinstance(value, str):
            return {"name": value}
        return cls.model_fields[info.field_name or ""].default | value if isinstance(value, dict) else value


class SyncConfig(Section):
    """How new weights reach the generators."""

    link: str = option(
        "auto",
        '"auto" (by placement), "shared" (memory of this host), "single_copy" (of one GPU), "nccl" (broadcast beside '
        'the running engine), "nccl_direct" (by vLLM, held), "lora" (adapters alone), "checkpoint" (files), or '
        '"module:Class" or "file.py:Class".',
    )
    placement: Literal["disaggregated", "colocated"] = option(
        "disaggregated",
        '"disaggregated": generators and trainer work at the same time. "colocated": they use the same GPUs in turns, '
        "and each side leaves the memory to the other.",
    )
    every: int = option(1, "Steps between two publishes.", ge=1)
    interruption: Literal["continue", "recompute", "retry", "drain"] = option(
        "continue", "Sequences in flight: keep their keys and values, recompute them, start again, or finish first."
    )
    restart: bool = option(
        False, "Start engines anew on each version's files, for those that can't reload (checkpoint)."
    )
    keep: int = option(0, "Newest published files that outlive the run; 0 keeps none (checkpoint).", ge=0)
    verify: Literal["sampled", "full", "off"] = option(
        "sampled", "Parameters whose checksums are compared after each publish, as served and as trained."
    )


class EvaluationConfig(Section):
    """Held-out tasks, measured while training goes on."""

    every: int = option(0, "Steps between evaluations; 0 evaluates at the start and the end only.", ge=0)
    every_tokens: int = option(0, "Trained tokens between evaluations, beside those by steps; 0 is never.", ge=0)
    tasks: int = option(100, "Held-out tasks to evaluate on; 0 turns evaluation off.", ge=0)
    temperature: float = option(0.0, "Softmax temperature of evaluation, from 0.01 to 100; 0 is greedy.", ge=0)


class CheckpointConfig(Section):
    """What a run can go on from."""

    every: int = option(
        50, "Steps between checkpoints, a multiple of sync.every; one is always written at the end.", ge=1
    )
    keep: int = option(2, "Newest checkpoints to keep.", ge=1)


class RunConfig(Section):
    """Where results go."""

    dir: str = option("", "Run directory; empty means runs/ENVIRONMENT-DATE.")


class RuntimeConfig(Section):
    """The processes of a run."""

    progress_timeout: float = option(
        600.0,
        "Seconds after which a trainer, generator, teacher or reward model that owes an answer and makes no progress "
        "(steps of an engine, micro-batches, bytes of a checkpoint) is ended as hung. Must outlast the first step of a "
        "large model, which compiles it.",
        gt=0,
    )


class Config(Section):
    """A whole run."""

    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    environment: EnvironmentConfig
    scoring: ScoringConfig = ScoringConfig()
    teacher: TeacherConfig = TeacherConfig()
    sampling: SamplingConfig = SamplingConfig()
    loop: LoopConfig = LoopConfig()
    generator: GeneratorConfig = GeneratorConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    sync: SyncConfig = SyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _possible(self) -> Config:
        loop = self.loop
        self._refuse_sampling()
        for name, value, known in (
            ("generator.kind", self.generator.kind, ("torch", "vllm")),
            ("trainer.kind", self.trainer.kind, ("pytorch",)),
            (
                "sync.link",
                self.sync.link,
                ("auto", "shared", "single_copy", "nccl", "nccl_direct", "lora", "checkpoint"),
            ),
        ):
            if value not in known and ":" not in value:
                names = ", ".join(f'"{k}"' for k in known)
                raise ConfigError(
                    f'{name} = "{value}" is unknown; give {names} or your own as "module:Class" or "file.py:Class"'
                )
        if self.sync.link == "single_copy":
            needs: tuple[tuple[str, Any, Any], ...] = (
                ("generator.count", self.generator.count, 1),
                ("sync.every", self.sync.every, 1),
                ("lora.rank", self.lora.rank, 0),
                ("model.dtype", self.model.dtype, "bfloat16"),
            )
            for name, value, needed in needs:
                if value not in (needed, "auto"):
                    raise ConfigError(f'sync.link = "single_copy" needs {name} = {json.dumps(needed)}, not {value!r}')
        if self.sync.link == "lora" and not self.serves_adapters:
            raise ConfigError(
                f'sync.link = "lora" is for lora.rank above 0 with generator.kind = "vllm", not for lora.rank = '
                f'{self.lora.rank} with "{self.generator.kind}"; leave sync.link out'
            )
        if self.serves_adapters and self.sync.link not in ("lora", "auto"):
            raise ConfigError(
                f'sync.link = "{self.sync.link}" can\'t bring adapters (lora.rank = {self.lora.rank}) to vLLM; '
                "leave sync.link out"
            )
        if self.serves_adapters and self.lora.experts:
            raise ConfigError('lora.experts = true can\'t be with vLLM; set it to false, or generator.kind = "torch"')
        if self.serves_adapters and self.sync.interruption == "recompute":
            raise ConfigError(
                'sync.interruption = "recompute" can\'t be with adapters in vLLM, where keys and values belong to one; '
                'use "continue" (finish on it), "retry" or "drain"'
            )
        if self.sync.link == "nccl_direct" and self.generator.kind == "torch":
            raise ConfigError('sync.link = "nccl_direct" is vLLM\'s own; set generator.kind = "vllm", or use "nccl"')
        if 0 < loop.buffer < loop.groups_per_step:
            raise ConfigError(
                f"loop.buffer = {loop.buffer} can't hold the {loop.groups_per_step} groups of one step; "
                f"raise it to at least {loop.groups_per_step}, or set it to 0"
            )
        untold = self.sampling.top_p < 1 and not self.sampling.top_k and self.generator.kind == "vllm"
        if untold and self.algorithm.keep_sampling_mask:
            raise ConfigError(
                f"sampling.top_p = {self.sampling.top_p} alone can't be replayed with vLLM, which does not tell which "
                "tokens it left; set sampling.top_k too, to 64 for example, or algorithm.keep_sampling_mask = false"
            )
        if self.trainer.warmup_steps >= loop.steps:
            raise ConfigError(
                f"trainer.warmup_steps = {self.trainer.warmup_steps} leaves nothing of loop.steps = {loop.steps}; "
                f"lower it below {loop.steps}"
            )
        self._refuse_ranks()
        if len(self.trainer.betas) != 2 or not all(0 <= beta < 1 for beta in self.trainer.betas):
            found = list(self.trainer.betas)
            raise ConfigError(f"trainer.betas = {found} must be two numbers in [0, 1); try [0.9, 0.99]")
        self._refuse_turns()
        self._refuse_restart()
        self._refuse_servers()
        context = self.generator.context
        if context and context <= self.sampling.max_tokens:
            raise ConfigError(
                f"generator.context = {context} leaves no room for a prompt beside sampling.max_tokens = "
                f"{self.sampling.max_tokens}; raise generator.context or lower sampling.max_tokens"
            )
        if self.checkpoint.every % self.sync.every:
            raise ConfigError(
                f"checkpoint.every = {self.checkpoint.every} is no multiple of sync.every = {self.sync.every}; make it "
                "one, so that a checkpoint holds the weights of a version"
            )
        self._refuse_rule()
        self._refuse_scoring()
        rule = self.algorithm
        tables = {"environment.options": self.environment.options, "scoring.options": self.scoring.options,
                  "teacher.options": self.teacher.options, "generator.options": self.generator.options,
                  "algorithm.advantage": rule.advantage,
                  "algorithm.loss": rule.loss, "algorithm.aggregation": rule.aggregation,
                  **{f"algorithm.corrections.{i}": table for i, table in enumerate(rule.corrections)}}  # fmt: skip
        for table, values in tables.items():
            for name, value in values.items():
                if not _writable(value):
                    raise ConfigError(
                        f"{table}.{name} = {value!r} is no text, finite number, true, false, or list or table of "
                        "these; give it as text"
                    )
        self._refuse_idle()
        for fault in engine_options.faults(self):
            raise ConfigError(fault)
        return self

    def _refuse_turns(self) -> None:
        """Raise `ConfigError` for what can't be where engines sleep while the trainer works."""
        sync = self.sync
        if sync.placement != "colocated":
            return
        _refuse_beside('sync.placement = "colocated"', (
            (sync.restart, "sync.restart", "leave it out"),
            (sync.interruption == "continue", 'sync.interruption = "continue": keys and values are lost in sleep',
             'set it to "recompute", "retry" or "drain"'),
            (sync.link in ("single_copy", "nccl", "nccl_direct"), f'sync.link = "{sync.link}", whose ends run at once',
             'use "shared"'),
            (bool(self.generator.servers), "generator.servers, which can't be put to sleep", "leave them out"),
        ))  # fmt: skip

    def _refuse_restart(self) -> None:
        """Raise `ConfigError` for what can't be where engines are started anew on each version."""
        sync = self.sync
        if not sync.restart:
            return
        _refuse_beside("sync.restart = true", (
            (sync.link not in ("auto", "checkpoint"), f'sync.link = "{sync.link}"', 'set it to "checkpoint"'),
            (sync.interruption not in ("retry", "drain"),
             f'sync.interruption = "{sync.interruption}": sequences go with an engine', 'set it to "retry" or "drain"'),
            (sync.verify == "full", 'sync.verify = "full": engines serve what they load, and no checksums are compared',
             "leave it out"),
            (bool(self.lora.rank), f"lora.rank = {self.lora.rank}, of which files are no model", "set it to 0"),
            (bool(self.generator.servers), "generator.servers, which are yours to start", "leave them out"),
        ))  # fmt: skip

    def _refuse_rule(self) -> None:
        """Raise `ConfigError` for parts of the learning rule that don't go together."""
        rule = self.algorithm
        if rule.kl and rule.kl_estimator == "k1" and not rule.kl_weighted:
            raise ConfigError(
                'algorithm.kl_estimator = "k1" has no gradient on average; set algorithm.kl_weighted, or use "k3"'
            )
        if rule.filter_equal:
            _refuse_beside("algorithm.filter_equal = true", (
                (bool(rule.kl), f"algorithm.kl = {rule.kl:g}, from which tokens without an advantage learn, too",
                 "drop one of them"),
                (rule.whiten and rule.advantage["name"] not in ("group_mean", "leave_one_out"),
                 "algorithm.whiten = true where a group has no baseline of its own: equal rewards teach then, too",
                 'drop one of them, or set algorithm.advantage to "group_mean" or "leave_one_out"'),
            ))  # fmt: skip
        if rule.kl and rule.kl_estimator == "k2" and rule.kl_weighted:
            raise ConfigError(
                'algorithm.kl_weighted does not go with kl_estimator = "k2"; use "k3", or set it to false'
            )

    def _refuse_sampling(self) -> None:
        """Raise `ConfigError` for values that no engine can draw by."""
        drawn = self.sampling
        for section, changes in (
            ("sampling", drawn.model_dump(exclude={"stop"}) | {"stop_strings": tuple(drawn.stop)}),
            ("evaluation", {"temperature": self.evaluation.temperature}),
        ):
            try:
                Sampling(**changes)
            except ValueError as error:
                raise ConfigError(f"{section}.{error}".replace("stop_strings", "stop")) from None

    def _refuse_scoring(self) -> None:
        """Raise `ConfigError` for a scorer or a teacher that can't be."""
        scoring, teacher = self.scoring, self.teacher
        if scoring.kind not in ("", "http", "model") and ":" not in scoring.kind:
            raise ConfigError(
                f'scoring.kind = "{scoring.kind}" is unknown; give "http", "model" or your own as "module:thing"'
            )
        if teacher.path and teacher.lag:
            raise ConfigError(f"teacher.lag = {teacher.lag} makes the policy its own teacher; leave teacher.path out")
        drawn = self.sampling
        if (teacher.path or teacher.lag) and teacher.kind == "vllm":
            if drawn.temperature != 1 or drawn.top_k or drawn.top_p < 1:
                raise ConfigError(
                    'teacher.kind = "vllm" scores the unmodified distribution alone, and sampling.temperature, top_k '
                    'or top_p change it; leave them out, or use teacher.kind = "torch"'
                )
            if teacher.lag:
                raise ConfigError('teacher.lag needs teacher.kind = "torch"')

    def _refuse_idle(self) -> None:
        """Raise `ConfigError` for an option that is set and would do nothing, since another is not."""
        rule, teacher, place = self.algorithm, self.teacher, self.environment.name.partition(":")
        own = bool(place[1]) and place[0] not in ("reasoning-gym", "verifiers")  # may reward steps itself
        sync, drawn = self.sync, self.sampling
        drains = sync.interruption == "drain" and sync.placement == "disaggregated" and not sync.restart
        flies = self.loop.max_lag or not drains  # a synchronous run has nothing in flight at a swap
        for works, needed, section, names in (
            (self.lora.rank, "lora.rank", "lora", ("alpha", "targets", "experts")),
            (self.scoring.kind, "scoring.kind", "scoring", ("options", "weights", "concurrency", "time_limit")),
            (teacher.path or teacher.lag, "teacher.path or teacher.lag", "teacher", TeacherConfig.model_fields),
            (teacher.kind == "vllm", 'teacher.kind = "vllm"', "teacher", ("memory", "options")),
            (self.scoring.kind or own, "scoring.kind, a scorer that rewards steps", "algorithm", ("process",)),
            (rule.overlong == "penalty", 'algorithm.overlong = "penalty"', "algorithm", ("overlong_soft",)),
            (self.generator.kind != "torch", 'generator.kind = "vllm"', "generator",
             ("tensor_parallel", "memory", "options")),
            (sync.link in ("auto", "checkpoint"), 'sync.link = "checkpoint"', "sync", ("keep",)),
            (rule.filter_equal, "algorithm.filter_equal = true", "algorithm", ("filter_most",)),
            (rule.kl, "algorithm.kl", "algorithm", ("reference", "reference_decay", "kl_estimator", "kl_weighted")),
            (rule.reference == "average", 'algorithm.reference = "average"', "algorithm", ("reference_decay",)),
            (drawn.top_k or drawn.top_p < 1, "sampling.top_k or top_p", "algorithm", ("keep_sampling_mask",)),
            (self.trainer.ranks > 1, "trainer.ranks above 1", "trainer", ("parallel",)),
            (self.evaluation.tasks, "evaluation.tasks above 0", "evaluation", ("every", "every_tokens")),
            (flies, "loop.max_lag above 0", "sync", ("interruption",)),
        ):  # fmt: skip
            if not works and (idle := [name for name in names if self._changed(section, name)]):
                value = _toml(getattr(getattr(self, section), idle[0]))
                default = _toml(SECTIONS[section].model_fields[idle[0]].default)
                raise ConfigError(
                    f"{section}.{idle[0]} = {value} does nothing without {needed}; set that, or leave {idle[0]} at "
                    f"{default}"
                )

    def _refuse_ranks(self) -> None:
        """Raise `ConfigError` for ranks of the trainer that can't be, or not with these other options."""
        trainer, sync = self.trainer, self.sync
        if trainer.shards == 1:
            raise ConfigError(
                'trainer.shards = 1 leaves each rank all weights, which is trainer.parallel = "ddp"; set that'
            )
        if trainer.shards and (trainer.ranks % trainer.shards or trainer.parallel != "fsdp"):
            raise ConfigError(
                f"trainer.shards = {trainer.shards} must divide trainer.ranks = {trainer.ranks}, with trainer.parallel "
                '= "fsdp"; change it, or set it to 0'
            )
        if sync.placement == "colocated" and trainer.ranks > 1:
            raise ConfigError(
                f'sync.placement = "colocated" needs trainer.ranks = 1, not {trainer.ranks}; use one rank, or '
                '"disaggregated"'
            )
        if not trainer.compute_copy:
            _refuse_beside("trainer.compute_copy = false", self._wrong_without_copy())
        if trainer.parallel == "tensor" and trainer.ranks > 1 and self.lora.rank:
            raise ConfigError('trainer.parallel = "tensor" can\'t train adapters; use "fsdp", or set lora.rank = 0')
        for name in ("context_parallel", "expert_parallel"):
            if trainer.ranks % getattr(trainer, name):
                raise ConfigError(
                    f"trainer.{name} = {getattr(trainer, name)} must divide trainer.ranks = {trainer.ranks}; "
                    "change one of them"
                )
        if trainer.context_parallel > 1 and trainer.parallel == "tensor":
            raise ConfigError('trainer.context_parallel does not go with trainer.parallel = "tensor"; use "fsdp"')
        if trainer.expert_parallel > 1:
            _refuse_beside(f"trainer.expert_parallel = {trainer.expert_parallel}", (
                (trainer.parallel != "fsdp", f'trainer.parallel = "{trainer.parallel}"', 'set it to "fsdp"'),
                (trainer.shards > 0, f"trainer.shards = {trainer.shards}", "set it to 0"),
                (self.lora.experts, "lora.experts", "set it to false"),
            ))  # fmt: skip
        if self.serves_adapters and self.lora.rank > HIGHEST_RANK:
            raise ConfigError(
                f"lora.rank = {self.lora.rank} is more than the {HIGHEST_RANK} that vLLM serves; lower it"
            )
        if self.lora.base == "4bit":
            _refuse_beside('lora.base = "4bit"', (
                (self.lora.rank == 0, "lora.rank = 0, which trains every weight", "set it to 16, for example"),
                (trainer.ranks > 1 and trainer.parallel != "ddp", f'trainer.parallel = "{trainer.parallel}"',
                 'set it to "ddp"'),
                (self.generator.kind == "vllm" and "quantization" not in self.generator.options,
                 "a vLLM that has the whole base", 'give generator.options.quantization = "bitsandbytes"'),
                (sync.placement == "colocated", 'sync.placement = "colocated"', 'use "disaggregated"'),
            ))  # fmt: skip
        if sync.link == "single_copy":
            spread = self.generator.tensor_parallel
            if trainer.ranks != spread or (spread > 1 and trainer.parallel != "tensor"):
                needed = f"trainer.ranks = {spread}" + (' and trainer.parallel = "tensor"' if spread > 1 else "")
                raise ConfigError(
                    f'sync.link = "single_copy" with generator.tensor_parallel = {spread} needs {needed}: a rank of '
                    "the trainer computes on the weights of a rank of the engine"
                )

    @property
    def serves_adapters(self) -> bool:
        """Whether vLLM serves adapters over the weights that it has loaded."""
        return bool(self.lora.rank) and self.generator.kind == "vllm"

    @property
    def spare_copy(self) -> bool:
        """Whether there is a copy of the weights that `trainer.compute_copy = false` would save."""
        return self.trainer.compute_copy and not any(wrong for wrong, *_ in self._wrong_without_copy())

    def _wrong_without_copy(self) -> tuple[tuple[bool, str, str], ...]:
        """What `trainer.compute_copy = false` does not go with, for `_refuse_beside`."""
        trainer, sync, rank = self.trainer, self.sync, self.lora.rank
        return (
            (trainer.ranks > 1, f'trainer.ranks = {trainer.ranks}, which keep none with "fsdp"', "leave it out"),
            (trainer.parallel != "fsdp", f'trainer.parallel = "{trainer.parallel}"', "leave that out"),
            (self.model.dtype == "float32", 'model.dtype = "float32", which needs none', "leave it out"),
            (rank > 0, f"lora.rank = {rank}, whose base has no other copy", "leave it out"),
            (sync.link == "single_copy", 'sync.link = "single_copy", which is that copy', "leave it out"),
            (sync.placement == "colocated", 'sync.placement = "colocated"', 'use "disaggregated"'),
        )

    def _refuse_servers(self) -> None:
        """Raise `ConfigError` for `generator.servers` that can't be, or not with these other options."""
        generator, link = self.generator, self.sync.link
        if not (servers := generator.servers):
            return
        urls, other = [urlsplit(url) for url in servers], generator.remote
        theirs = ("tensor_parallel", "memory", "options", "slots", "device")
        given = [name for name in theirs if self._changed("generator", name)]
        reach = '"checkpoint"' if other else '"shared", "nccl" or "checkpoint"'
        _refuse_beside("generator.servers", (
            (generator.kind != "vllm", f'generator.kind = "{generator.kind}"', 'set it to "vllm"'),
            (generator.count != len(servers), f"generator.count = {generator.count}", "leave it out"),
            (not all(u.scheme in ("http", "https") and u.netloc for u in urls), f"servers = {servers}",
             "each is a URL such as http://host:8000"),
            (len({u.netloc for u in urls}) < len(urls), f"servers = {servers}", "name each once"),
            (bool(given), "".join(f"generator.{n}" for n in given[:1]), "give it to `vllm serve` instead"),
            (link in ("nccl_direct", "single_copy"), f'sync.link = "{link}", which takes engines that the run starts',
             f"set it to {reach}, or leave servers out"),
            (self.lora.rank > 0, f"lora.rank = {self.lora.rank}: adapters take engines that the run starts",
             "set it to 0, or leave servers out"),
            (link in ("shared", "nccl") and bool(other), f'sync.link = "{link}", which does not reach {other}',
             'set it to "checkpoint", with run.dir on a file system that both hosts have'),
        ))  # fmt: skip

    def _changed(self, section: str, name: str) -> bool:
        """Whether this option has another value than its default."""
        return bool(getattr(getattr(self, section), name) != SECTIONS[section].model_fields[name].default)


def _refuse_beside(chosen: str, others: Iterable[tuple[bool, str, str]]) -> None:
    """Raise `ConfigError` for the first of the other choices that is wrong beside this one: (wrong, what, remedy)."""
    for wrong, what, remedy in others:
        if wrong:
            raise ConfigError(f"{chosen} does not go with {what}; {remedy}")


SECTIONS: dict[str, type[Section]] = {name: info.annotation for name, info in Config.model_fields.items()}  # type: ignore[misc]


def load_config(path: str | Path | None = None, flags: Sequence[str] = ()) -> Config:
    """Read a TOML file and lay dotted flags over it. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; give the path of a TOML file") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for name, value in parse_flags(flags):
        _set(values, name, value)
    return validate(values)


def validate(values: Mapping[str, Any]) -> Config:
    """Turn nested values into a `Config`. Raises `ConfigError` with one line a fault."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_explain(e) for e in error.errors()))) from None


def with_options(config: Config, **sections: dict[str, Any]) -> Config:
    """The configuration with these sections in the place of its own. Raises `ConfigError`."""
    return validate(config.model_dump() | sections)


def with_absolute_paths(config: Config) -> Config:
    """The configuration with relative paths of what exists here made absolute, so that it means the same elsewhere.

    Those are "path/to/file.py:thing" of any option, paths of models, and text in a table of options that names a file
    or directory and has a "/" or a suffix. A name without either may be a name of something else.
    """
    return validate({name: _anchored(name, values) for name, values in config.model_dump().items()})


def absolute_path(text: str) -> str:
    """ "path/to/file.py:thing", or the path of a file or directory that exists, made absolute; other text as it is."""
    place, colon, name = text.rpartition(":")
    file, rest = (place, colon + name) if place.endswith(".py") else (text, "")
    there = os.path.exists(file)  # noqa: PTH110, since Path.exists raises for a text that is too long for a path
    return f"{Path(file).absolute()}{rest}" if there else text


def _anchored(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _anchored(f"{name}.{key}", inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_anchored(name, inside) for inside in value]
    if not isinstance(value, str):
        return value
    chosen = (".options." in name or name == "algorithm.reference") and ("/" in value or Path(value).suffix)
    return absolute_path(value) if chosen or name in PATHS or value.rpartition(":")[0].endswith(".py") else value


def join_flags(arguments: Sequence[str]) -> list[str]:
    """Every `--a.b v` as `--a.b=v`, so that nobody takes the value for an argument of its own."""
    joined: list[str] = []
    for argument in arguments:
        waits = joined and joined[-1].startswith("--") and "." in joined[-1] and "=" not in joined[-1]
        if waits and not argument.startswith("--"):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def parse_flags(flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """`--a.b v` and `--a.b=v` as ("a.b", value); a value is read as TOML unless its option is text, else as text."""
    for flag in join_flags(flags):
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r} is not an option; options look like --section.option value")
        name, equals, text = flag[2:].partition("=")
        if "." not in name or not all(name.split(".")):
            near = suggest(name, option_names())
            raise ConfigError(f"unknown option --{name}{near}; see `slipstream config --help`")
        if not equals:
            raise ConfigError(f"--{name} has no value; give one: --{name} VALUE")
        yield name, _flag_value(name, text)


def option_names() -> list[str]:
    """Every dotted option name."""
    return [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]


def dump(config: Config) -> str:
    """The configuration as TOML with every default, each option under its description."""
    lines = []
    for name, section in SECTIONS.items():
        lines.append(f"[{name}]  # {section.__doc__}")
        for key, info in section.model_fields.items():
            lines += [f"# {info.description}", f"{key} = {_toml(getattr(getattr(config, name), key))}"]
        lines.append("")
    return "\n".join(lines)


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if isinstance(alone := values.get(parent), str) and name.startswith(f"algorithm.{parent}."):
            values[parent] = {"name": alone}  # the loss was named alone, and here comes an option of it
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--{name}: {parent} is a value, not a section")
    values[last] = value


def _flag_value(name: str, text: str) -> Any:
    section, _, key = name.partition(".")
    option = SECTIONS[section].model_fields.get(key) if section in SECTIONS else None
    if option and option.annotation is str:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _writable(value: Any) -> bool:
    """Whether `_toml` can write the value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _writable(v) for key, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(_writable, value))
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # as JSON, but TOML allows no raw DEL


EXPECTED = {  # by pydantic's name of an error
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_type": "it must be true or false",
    "string_type": "it must be text",
    "string_too_short": "it must not be empty",
    "list_type": 'it must be a list, such as ["a", "b"]',
    "tuple_type": "it must be a list, such as [0.9, 0.99]",
    "dict_type": "it must be a table, such as { name = 1 }",
    "model_type": "it must be a section of options, such as [loop]",
    "model_attributes_type": "it must be a section of options, such as [loop]",
}


def _explain(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError) and not name:
        return str(cause)
    if error["type"] == "extra_forbidden":
        known = option_names() if "." in name else list(SECTIONS)
        return f"unknown option {name}{suggest(name, known)}; `slipstream config` lists all"
    if error["type"] == "missing":
        if name in SECTIONS:
            name += "." + next(key for key, info in SECTIONS[name].model_fields.items() if info.is_required())
        return f"{name} is not set; add it to the file or give --{name} VALUE"
    expected = EXPECTED.get(error["type"]) or (str(cause) if isinstance(cause, ConfigError) else error["msg"])
    expected = expected[0].lower() + expected[1:]
    shown = _toml(error["input"]) if _writable(error["input"]) else repr(error["input"])
    return f"{name} = {shown}: {expected.replace('input should', 'it must')}"


def suggest(name: str, known: Sequence[str]) -> str:
    """ " (did you mean X?)" for the nearest of the known names, or nothing."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    close = close or difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    if not close:  # a right name in a wrong section is the commonest slip
        close = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    return f" (did you mean {close[0]}?)" if close else ""
