"""Every option of a run, once: its name, type, default, bounds and description."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from slipstream.config.algorithm import AlgorithmConfig, PolicyConfig
from slipstream.config.environments import EnvironmentConfig, SamplingConfig
from slipstream.config.lora import LoraConfig as LoraConfig
from slipstream.config.section import DEVICE as DEVICE
from slipstream.config.section import MAX_INT, MAX_SEQUENCES, MAX_WORKERS, Section, option
from slipstream.config.section import ConfigError as ConfigError
from slipstream.config.trainer import TrainerConfig as TrainerConfig

AUTO = MAX_INT  # "auto" as a number


def _int_or_auto(value: Any) -> Any:
    if isinstance(value, str) and value != "auto":
        raise PydanticCustomError("int_or_auto", 'it must be a whole number or "auto"')
    return AUTO if value == "auto" else value


IntOrAuto = Annotated[int, BeforeValidator(_int_or_auto)]
NO_DEVICE = 'it must be "auto", "cpu", "cuda" or "cuda:N": Slipstream computes on CPUs and on CUDA GPUs'


# Parameters of `apply_chat_template` that Slipstream sets, or that change more than the rendered text.
NO_TEMPLATE_ARGUMENTS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools",
    "truncation",
}  # fmt: skip


def _validate_template_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    if reserved := sorted(NO_TEMPLATE_ARGUMENTS & arguments.keys()):
        raise PydanticCustomError("template_argument", f"{reserved[0]} is no argument of a chat template; leave it out")
    return arguments


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_validate_template_arguments)]


class ModelConfig(Section):
    """The policy to fine-tune."""

    path: str = Field(description="Hugging Face model: a local directory or a name on the Hub.", min_length=1)
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", 'Number format of engines and trainer; "auto" is "bfloat16" on GPUs, "float32" if any is on a CPU.'
    )
    chat_template_kwargs: TemplateArguments = option(
        {}, "Arguments of the chat template, such as { enable_thinking = false }."
    )
    tool_call_parser: str = option(
        "",
        'Format of tool calls: "hermes" (the default with a chat template), "plain" (the default without), or one of '
        "vLLM's parsers, such as llama3_json, which need vllm.",
    )


class ScoringConfig(Section):
    """Rewards of finished rollouts that the environment does not compute, scored while generation continues."""

    kind: str = option(
        "",
        '"" (the environment\'s own rewards), "http" (a judge behind a URL), "model" (a reward or process-reward '
        'model), or your own function or class as "module:thing".',
    )
    options: dict[str, Any] = option({}, "Keyword arguments of the scorer.")
    weights: dict[str, float] = option({}, 'Weights of reward parts, such as { environment = 1.0 }; empty: "score".')
    concurrency: int = option(64, "Most rollouts being scored at once.", ge=1)
    requests_per_second: float = option(0.0, "Most rollouts whose scoring starts each second; 0: no limit.", ge=0)
    timeout: float = option(60.0, "Seconds that scoring one rollout may take, without its time in the queue.", gt=0)


class TeacherConfig(Section):
    """A model whose log-probabilities of the sampled tokens are added to every rollout, for distillation."""

    path: str = option("", "Hugging Face model with the policy's vocabulary; empty means no fixed teacher.")
    lag: int = option(0, "Use the policy of this many versions ago as teacher; 0 uses the model at path.", ge=0)
    engine: Literal["torch", "vllm"] = option("torch", "Engine of the teacher.")
    gpu_memory_utilization: float = option(
        0.0,
        "Share of a GPU's memory, or of the host's on a CPU (vllm); 0 means 0.4, on a CPU space for one sequence.",
        ge=0,
        le=1,
    )
    engine_args: dict[str, Any] = option({}, "Further engine arguments, as vLLM names them (vllm).")
    device: str = option("auto", '"auto", "cpu", "cuda" or "cuda:N".', pattern=DEVICE.pattern)
    threads: int = option(0, "CPU threads; 0 divides the cores between processes.", ge=0, le=MAX_WORKERS)


class LoopConfig(Section):
    """Length of the run, size of a step, and how far generation may run ahead of training."""

    steps: int = option(100, "Optimizer steps.", ge=1)
    epochs: float = option(0.0, "Visits of each training task, from which loop.steps is computed; 0: loop.steps.", ge=0)
    max_tokens: int = option(0, "Trained tokens that end the run, unless loop.steps does; 0: no limit.", ge=0)
    groups_per_step: int = option(8, "Groups (tasks) that one step trains on.", ge=1)
    group_size: int = option(8, "Rollouts per task; advantages compare them with each other.", ge=2, le=MAX_SEQUENCES)
    max_lag: IntOrAuto = option(
        1,
        'Most versions between sampling and training of a token; 0 is synchronous. "auto": as `slipstream plan` says.',
        ge=0,
    )
    force_max_lag: bool = option(False, "Train only when the buffer holds all that max_lag allows, for studies of lag.")
    buffer_size: int = option(0, "Most groups in generation and in the buffer; 0 is as many as max_lag can use.", ge=0)
    retries: int = option(3, "Most retries of a failed or stale task.", ge=0)
    seed: int = option(0, "Seed of task order, sampling and initialisation.", ge=0)


class GeneratorConfig(Section):
    """Engines that sample, in number, kind and size."""

    engine: str = option("torch", '"torch" (embedded), "vllm", or your own class: "module:Class" or "file.py:Class".')
    replicas: IntOrAuto = option(
        1, 'Generators, each in its own process. "auto": as `slipstream plan` says, for trainer.ranks.', ge=1
    )
    servers: list[str] = option([], "URLs of running vLLM servers to attach to, instead of starting engines (vllm).")
    tensor_parallel_size: int = option(1, "GPUs over which the weights of one engine are sharded (vllm).", ge=1)
    gpu_memory_utilization: float = option(
        0.0,
        "Share of a GPU's memory for one engine, or of the host's on a CPU (vllm); 0 means 0.85, or 0.8 divided by "
        "the processes on the GPU, and on a CPU space for a little more than one sequence.",
        ge=0,
        le=1,
    )
    engine_args: dict[str, Any] = option({}, "Further engine arguments, as vLLM names them (vllm).")
    max_num_seqs: int = option(64, "Sequences that one engine decodes at once.", ge=1, le=MAX_SEQUENCES)
    max_restarts: int = option(
        3, "Restarts of an engine that dies again within 10 minutes of service; 0: none. Servers stay dead.", ge=0
    )
    min_replicas: int = option(1, "Generators that must be alive for the trainer to take steps.", ge=1)
    max_model_len: int = option(0, "Longest prompt plus completion in tokens; 0 means the model's own limit.", ge=0)
    device: str = option("auto", '"auto", "cpu", "cuda" or "cuda:N".', pattern=DEVICE.pattern)
    threads: int = option(0, "CPU threads of each engine; 0 divides the cores between processes.", ge=0, le=MAX_WORKERS)

    @property
    def engines(self) -> int:
        """Number of engines that the run starts: 0 if it attaches to servers, 1 for an unresolved "auto"."""
        return 0 if self.servers else 1 if self.replicas == AUTO else self.replicas

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of pipeline stages of one engine. Each has consecutive layers and `tensor_parallel_size` GPUs."""
        stages = self.engine_args.get("pipeline_parallel_size")
        return stages if isinstance(stages, int) else 1

    @property
    def gpus_per_engine(self) -> int:
        """GPUs of one engine, each with a worker of vLLM that is a rank of the weight link."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def engine_size(self) -> str:
        """The options that set `gpus_per_engine`, for error messages."""
        stages = self.pipeline_parallel_size
        pipeline = f" and generator.engine_args.pipeline_parallel_size = {stages}" if stages > 1 else ""
        return f"generator.tensor_parallel_size = {self.tensor_parallel_size}{pipeline}"

    @property
    def remote(self) -> str:
        """Host and port of the first server on another host, or ""."""
        urls = [urlsplit(url) for url in self.servers]
        return next((u.netloc for u in urls if u.hostname not in ("localhost", "127.0.0.1", "::1")), "")

    @model_validator(mode="before")
    @classmethod
    def _count_servers(cls, values: Any) -> Any:
        servers = values.get("servers") if isinstance(values, dict) else None
        return {"replicas": len(servers)} | values if servers and isinstance(servers, list) else values


class SyncConfig(Section):
    """How new weights reach the engines."""

    link: str = option(
        "auto",
        '"auto" (by placement and network), "shared" (host memory), "single_copy" (GPU memory), "nccl" (broadcast), '
        '"nccl_direct" (by a paused vLLM), "lora" (adapters only), "delta" (changed elements over TCP), "checkpoint" '
        '(files), or "module:Class" or "file.py:Class".',
    )
    placement: Literal["disaggregated", "colocated"] = option(
        "disaggregated",
        '"disaggregated": at the same time. "colocated": in turns on the same GPUs, whose memory each side frees.',
    )
    every: int = option(1, "Steps between two publishes.", ge=1)
    in_flight: Literal["continue", "recompute", "retry", "drain"] = option(
        "continue", "Sequences in flight at a swap: keep their KV cache, recompute it, start again, or finish first."
    )
    restart: bool = option(False, "Restart engines on each version's files, if they can't reload (checkpoint).")
    chosen: str = option("", 'Written by a run: the link that "auto" means, and why.')
    interface: str = option("", 'Network interface of the link on each host ("eth0"); empty: by node or route.')
    max_mb_per_s: float = option(0.0, "Bandwidth limit of the trainer, in MB/s; 0 is none (delta, lora).", ge=0)
    keep_versions: int = option(0, "Versions whose published files are kept after the run (checkpoint).", ge=0)
    verify: Literal["sampled", "full", "off"] = option(
        "sampled", "Parameters whose checksums are compared between engines and trainer after each publish."
    )


class EvaluationConfig(Section):
    """Evaluation on held-out tasks, concurrent with training if `loop.max_lag` is above 0."""

    every: int = option(0, "Steps between evaluations; 0 evaluates at the start and the end only.", ge=0)
    every_tokens: int = option(0, "Trained tokens between evaluations, in addition to `every`; 0 is never.", ge=0)
    tasks: int = option(100, "Held-out tasks to evaluate on; 0 turns evaluation off.", ge=0)
    samples: int = option(1, "Samples of each task, for pass@k; above 1 needs a temperature above 0.", ge=1)
    temperature: float = option(0.0, "Softmax temperature of evaluation, from 0.01 to 100; 0 is greedy.", ge=0)
    against_start: bool = option(False, "Play also each of several policies with all others as at the start.")
    snapshot: bool = option(False, "Sample each evaluation by a single version: training takes no step meanwhile.")


class CheckpointConfig(Section):
    """Checkpoints that a run can resume from."""

    every: int = option(50, "Steps between checkpoints, a multiple of sync.every; the last step writes one, too.", ge=1)
    keep: int = option(2, "Newest checkpoints to keep.", ge=1)


HealthRule = Literal[
    "engine-lost", "stale-weights", "score-falls", "slow-rewards", "large-updates", "entropy-collapse",
    "reward-collapse", "mismatch", "sample-size", "no-signal", "lag-bound", "trainer-idle", "engines-idle",
    "engine-slow", "completions-cut", "identical-completions", "gradient-spikes", "nonfinite-steps", "disk-full",
    "memory-grows",
]  # fmt: skip


class RunConfig(Section):
    """The run directory."""

    dir: str = option("", "Run directory; empty means runs/ENVIRONMENT-DATE.")


class ObserveConfig(Section):
    """What is recorded and shown besides metrics and rollouts."""

    report: bool = option(True, "Write report.html into the run directory at the end of the run.")
    health: bool = option(True, "Warn, with a remedy, when the records show that something goes wrong.")
    ignore: list[HealthRule] = option([], "Health rules that are silent, by name; see docs/seeing-a-run.md.")
    trackers: list[str] = option(
        [],
        'Experiment trackers that get metrics and sampled rollouts: "wandb", "trackio", "tensorboard", "mlflow", or '
        'your own as "module:Class" or "file.py:Class".',
    )
    project: str = option(
        "", 'Project or experiment in each tracker; empty means that of its environment variable, else "slipstream".'
    )


class RuntimeConfig(Section):
    """Where the worker processes of a run start, and when they count as hung and are restarted."""

    kind: Literal["local", "ray"] = option(
        "local", '"local": child processes on this host. "ray": actors on a Ray cluster (needs slipstream-rl[ray]).'
    )
    address: str = option("", '"auto" or the address of a Ray cluster; empty starts Ray on this machine (ray).')
    placement: Literal["pack", "spread", "one_node"] = option(
        "pack", "Trainer ranks on as few nodes as possible, on as many as possible, or all workers on one node (ray)."
    )
    start_timeout: float = option(
        1800.0, "Seconds in which a worker must start: be placed on a node (ray), load its model and compile it.", gt=0
    )
    progress_timeout: float = option(
        600.0,
        "Seconds without progress (engine steps, micro-batches, checkpoint bytes) after which a worker with pending "
        "calls counts as hung and is terminated, and a run in which nothing ends is ended. "
        "Must exceed the first step of a large model, which compiles it.",
        gt=0,
    )
    max_restarts: int = option(
        3,
        "Restarts of the trainer, the teacher and the reward model after a death, each; 0: a death ends the run.",
        ge=0,
    )


class Config(Section):
    """A whole run."""

    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    environment: EnvironmentConfig
    environments: list[EnvironmentConfig] = option([], "Several environments; empty: the one of [environment].")
    policies: list[PolicyConfig] = option([], "Several policies, each an adapter or a model; empty: a single one.")
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
    observe: ObserveConfig = ObserveConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="before")
    @classmethod
    def _name_no_defaults(cls, values: Any) -> Any:
        """With `[[environments]]`, `[environment]` holds only their defaults and needs no name."""
        if not isinstance(values, dict) or not values.get("environments"):
            return values
        shared = values.get("environment", {})
        return values | {"environment": {"name": ""} | shared if isinstance(shared, dict) else shared}

    @property
    def each_environment(self) -> list[EnvironmentConfig]:
        """All environments of the run, each with a label and with all its options."""
        return [entry.within(self.environment) for entry in self.environments or [self.environment]]

    @property
    def each_policy(self) -> dict[str, Config]:
        """The configuration of each policy by name, as of a run of that policy alone; empty without `[[policies]]`.

        Model path, adapter path, objective and learning rate are the policy's own.
        """
        found = {}
        for policy in self.policies:
            algorithm = {name: getattr(policy.algorithm, name) for name in policy.algorithm.model_fields_set}
            rate = policy.learning_rate or self.trainer.learning_rate
            changes: dict[str, Any] = {
                "policies": [],
                "model": self.model.model_copy(update={"path": policy.model or self.model.path}),
                "lora": self.lora.model_copy(update={"path": policy.adapter}),
                "evaluation": self.evaluation.model_copy(update={"against_start": False}),
                "algorithm": self.algorithm.model_copy(update=algorithm),
                "trainer": self.trainer.model_copy(update={"learning_rate": rate}),
            }
            found[policy.name] = self.model_copy(update=changes)
        return found

    @property
    def each_model(self) -> list[Config]:
        """The configuration of each trained model, with the policies that it trains; `[self]` without `[[policies]]`.

        With `lora.rank` a model has an adapter for each policy with its `model.path`. Without, each policy is a model.
        """
        found: dict[tuple[str, str], list[PolicyConfig]] = {}
        for policy in self.policies:
            own = policy.model or self.model.path, "" if self.lora.rank else policy.name
            found.setdefault(own, []).append(policy)
        models = {key: self.model.model_copy(update={"path": key[0]}) for key in found}
        return [self.model_copy(update={"model": models[k], "policies": own}) for k, own in found.items()] or [self]

    def sampling_of(self, environment: EnvironmentConfig) -> SamplingConfig:
        """Sampling parameters of the training rollouts of one environment."""
        given = environment.sampling
        return self.sampling.model_copy(update={name: getattr(given, name) for name in given.model_fields_set})

    @property
    def longest_timeout(self) -> float:
        """The largest time limit of an episode, in seconds."""
        return max(environment.timeout for environment in self.each_environment)

    @property
    def each_sampling(self) -> list[SamplingConfig]:
        """Sampling parameters of `[sampling]` and of each environment."""
        return [self.sampling, *map(self.sampling_of, self.each_environment)]

    @property
    def largest_top_k(self) -> int:
        """The largest top_k of all samplings; 0 means that none has one."""
        return max(sampling.top_k for sampling in self.each_sampling)

    @property
    def longest_completion(self) -> int:
        """The largest max_tokens of all samplings."""
        return max(sampling.max_tokens for sampling in self.each_sampling)

    @property
    def serves_adapters(self) -> bool:
        """Whether vLLM serves LoRA adapters on the base weights that it has loaded."""
        return bool(self.lora.rank) and self.generator.engine == "vllm"


SECTIONS: dict[str, type[Section]] = {
    name: info.annotation  # type: ignore[misc]
    for name, info in Config.model_fields.items()
    if name not in ("environments", "policies")
}
