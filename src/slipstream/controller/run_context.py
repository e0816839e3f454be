"""The objects and the state that all parts of a run share, and those of each environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from slipstream.config.environments import SamplingConfig
from slipstream.config.schema import Config, ConfigError
from slipstream.controller.launch import Cluster
from slipstream.controller.trackers import TrackerProcess
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.concurrency import EpisodeSlots
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.episode import reward_error_counter
from slipstream.environments.load import LoadedEnvironment, load_environments, takes_reward_workers, with_steps
from slipstream.environments.reward_workers import ScoringError
from slipstream.generators.pool import EngineReplica
from slipstream.model.inspection import has_experts, max_model_len
from slipstream.model.tokenizer import load_tokenizer
from slipstream.objective import load_objective
from slipstream.observe.events import CONTROLLER, SCORING
from slipstream.observe.health import Health, HealthWarning
from slipstream.observe.progress import Progress
from slipstream.observe.recorder import Recorder
from slipstream.observe.run_totals import RunTotals
from slipstream.rollout import Sampling
from slipstream.runtime.run_directory import RunDirectory
from slipstream.scheduling.curriculum import TaskStream
from slipstream.scheduling.loop_state import FailureStreak, LoopState
from slipstream.scoring.load import FunctionScorer, load_scoring
from slipstream.sync.link import PublishStats


class RunContext:
    """The state of one run, shared by all functions of the controller.

    A checkpoint holds `state` and `totals`; the processes are in `cluster`.
    """

    tasks: asyncio.TaskGroup  # all asyncio tasks of the training loop
    main: asyncio.Task[Any]  # the task of the training loop, and of the start before it

    def __init__(self, config: Config, directory: RunDirectory, quiet: bool) -> None:
        self.directory, self.objective = directory, load_objective(config)
        environments = load_environments(config, directory.path / "logs")
        self.config = config = with_steps(config, environments)
        self.policies = {policy.name: policy.name for policy in config.policies}  # as `Policy` takes them
        self.environments = [RunEnvironment(config, each, self.count_reward_error) for each in environments]
        self.tokenizer = load_tokenizer(config.model.path)
        self.chat_tokenizer = ChatTokenizer(self.tokenizer, max_model_len(config), config.model)
        self.endpoint = Endpoint(self.chat_tokenizer)
        self.sampling = training_sampling(config, config.sampling)
        self.progress = Progress(config.loop.steps, quiet=quiet)
        self.recorder = Recorder(directory.path, self.chat_tokenizer.decode_prompt, self.progress.warn)
        self.events = self.recorder.events
        self.reward_log = directory.path / "logs" / "rewards.log"
        self.scoring = load_scoring(config, self.chat_tokenizer, directory.path / "logs")
        if self.scoring:
            self.scoring.warn_by(self.warn_of_scoring)
        self._validate_reward_workers()
        self.started_cluster: Cluster | None = None
        self.trackers: list[TrackerProcess] = []

        self.stopped: str | None = None  # name of the signal that stopped the run, or "slipstream stop"
        self.paused = False  # no group starts and no step is taken
        self.paused_at = 0.0  # on the clock of the events
        self.stepping = False  # the trainer takes a step
        self.changed = asyncio.Event()  # a group ended, a version was published, or a signal or command arrived
        self.trainer_restarts = 0  # by this process
        self.requested_checkpoint: asyncio.Future[str] | None = None  # its path
        self.slow_episode_report: asyncio.Task[None] | None = None
        self.heap_frozen = False
        self.health: Health | None = None  # unless `observe.health` is false, from the first step on
        self.checkpoint_gb: float | None = None  # size of the last checkpoint that this process wrote
        self.engine_watches: dict[EngineReplica, asyncio.Task[None]] = {}  # tasks that replace engines which die
        self.waits_for_engines = False  # fewer than `generator.min_replicas` serve
        self.episode_slots = EpisodeSlots()
        self.warned_of_failure = self.warned_of_reward_error = False
        self.rewind()

    def _validate_reward_workers(self) -> None:
        """Raise `ConfigError` if `environment.reward_workers` is set and no reward function runs in processes."""
        count = max(environment.options.reward_workers for environment in self.environments)
        scorer = self.scoring and self.scoring.scorer
        scores = isinstance(scorer, FunctionScorer) and scorer.has_own_timeout
        works = scores or any(takes_reward_workers(environment.environment) for environment in self.environments)
        if count and not works:
            raise ConfigError(
                f"environment.reward_workers = {count} does nothing without a reward function that is not async; name "
                "one by environment.name or scoring.kind, or leave reward_workers at 0"
            )

    def rewind(self) -> None:
        """Go back to the state before the first step, from which a restart of the trainer loads a checkpoint.

        Called while no rollout is in flight.
        """
        for environment in self.environments:
            environment.rewind()
        streams = [environment.stream for environment in self.environments]
        self.state = LoopState(self.config.loop, self.config.sync.every, streams, list(self.policies))
        self.totals = RunTotals()
        self.running_groups: set[asyncio.Task[None]] = set()

        # Background tasks, at most one of each kind.
        self.admission: asyncio.Task[None] | None = None
        self.publishing: asyncio.Task[None] | None = None
        self.last_publish: PublishStats | None = None  # by this process
        self.evaluation: asyncio.Task[None] | None = None
        self.checkpoint: asyncio.Task[None] | None = None

    @property
    def cluster(self) -> Cluster:
        assert self.started_cluster is not None, "the processes are not started"
        return self.started_cluster

    @property
    def begun(self) -> bool:
        """Whether the run has started all processes and tried to take a step."""
        return hasattr(self, "tasks")

    @property
    def complete(self) -> bool:
        """Whether the run has taken `loop.steps` steps or trained on `loop.max_tokens` tokens."""
        tokens = self.config.loop.max_tokens
        return self.state.step >= self.config.loop.steps or 0 < tokens <= self.totals.tokens_trained

    @property
    def evaluates_snapshot(self) -> bool:
        """Whether an evaluation with `evaluation.snapshot` is in flight, during which no step is taken."""
        return self.config.evaluation.snapshot and self.evaluation is not None and not self.evaluation.done()

    @property
    def ending(self) -> bool:
        """Whether no further work starts, because the run is complete or was stopped."""
        return self.stopped is not None or self.complete

    def warn(self, warning: HealthWarning) -> None:
        """Show and record what a health rule has found."""
        self.progress.warn(str(warning))
        self.events.add("warning", CONTROLLER, **warning._asdict())

    def count_reward_error(self, error: ScoringError) -> None:
        """Count an exception of the reward function during training, and warn of the first."""
        counts = self.totals.reward_errors
        counts[error.reason] = counts.get(error.reason, 0) + 1
        self.warn_of_reward_error(error)

    def warn_of_scoring(self, text: str) -> None:
        """Warn that the process of teacher or reward model died or was restarted."""
        self.progress.warn(text)
        self.events.add("fault", SCORING, what=text.partition("\n")[0])

    def warn_of_reward_error(self, error: ScoringError) -> None:
        """Warn once per run that the reward function raised."""
        if not self.warned_of_reward_error:
            self.warned_of_reward_error = True
            self.progress.warn(
                f"the reward function raised {error.one_line}; the reward is 0 then, and reward/errors in "
                'metrics.jsonl counts it. Mend the function, or set environment.reward_error = "fail"'
            )


class RunEnvironment:
    """An environment with what its training rollouts need."""

    def __init__(
        self, config: Config, loaded: LoadedEnvironment, on_reward_error: Callable[[ScoringError], None]
    ) -> None:
        self.loaded, self.options, self.environment = loaded, loaded.options, loaded.environment
        self.sampling = training_sampling(config, config.sampling_of(loaded.options))
        self.reward_errors = reward_error_counter(loaded.options, on_reward_error)
        self.long_prompts: dict[int, str] = {}  # task index: length of a prompt that exceeds the context
        self.rewind()

    def rewind(self) -> None:
        """Go back to the state before the first step."""
        tasks, options = len(self.environment.train), self.options
        self.stream = TaskStream(options.label, tasks, options.weight, options.curriculum)
        self.retired: set[int] = set()  # indices of tasks whose every try failed
        self.failure_streak = FailureStreak(options.max_failures, tasks)


def training_sampling(config: Config, options: SamplingConfig) -> Sampling:
    """Sampling parameters of training rollouts."""
    return Sampling(
        **options.model_dump(exclude={"stop"}),
        stop_strings=tuple(options.stop),
        record_sampling_mask=config.algorithm.replay_sampling_mask,
        record_routing=config.algorithm.replay_routing and has_experts(config.model.path),
    )
