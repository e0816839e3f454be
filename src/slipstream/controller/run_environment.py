"""One environment of a run: its tasks, its sampling, and the failures of its rollouts."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config.environments import SamplingConfig
from slipstream.config.schema import Config
from slipstream.environments.episode import reward_error_counter
from slipstream.environments.load import LoadedEnvironment
from slipstream.environments.reward_workers import ScoringError
from slipstream.model.inspection import has_experts
from slipstream.rollout import Sampling
from slipstream.scheduling.curriculum import TaskStream
from slipstream.scheduling.loop_state import FailureStreak


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
