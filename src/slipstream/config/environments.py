"""Options of environments, and of sampling and curricula, which may differ between environments."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from slipstream.config.section import MAX_WORKERS, Section, option

BUILT_IN = {
    "addition": "slipstream.environments.addition:Addition",
    "code": "slipstream.environments.code:Code",
    "dataset": "slipstream.environments.dataset:Dataset",
    "gsm8k": "slipstream.environments.gsm8k:Gsm8k",
}

DATASET_OPTIONS = (  # which may be written next to the section's own
    "dataset", "prompt", "answer", "id", "reward", "system", "filter", "subset", "split", "test", "skip_malformed",
    "category", "images",
)  # fmt: skip


def reads_dataset(environment: Any) -> bool:
    """Whether the values of an environment's section name a dataset."""
    if not isinstance(environment, dict):
        return False
    options = environment.get("options")
    return "dataset" in environment or (isinstance(options, dict) and "dataset" in options)


class SamplingConfig(Section):
    """Sampling parameters of training rollouts."""

    temperature: float = option(1.0, "Softmax temperature, from 0.01 to 100.", gt=0)
    top_k: int = option(0, "Sample from the k most likely tokens; 0 means all.", ge=0)
    top_p: float = option(1.0, "Sample from the most likely tokens up to this probability mass.", gt=0, le=1)
    max_tokens: int = option(128, "Longest completion in tokens.", ge=1)
    stop: list[Annotated[str, Field(min_length=1)]] = option(
        [], "Strings that end a completion; the model's end-of-sequence token always does."
    )


class CurriculumConfig(Section):
    """Which tasks are visited again, by the mean of "correct", or of the reward, over their rollouts: their success."""

    drop_after: int = option(
        0,
        "Groups in a row of success 1, or of success 0, after which 9 of 10 visits to a task are skipped; 0: none.",
        ge=0,
    )
    focus: float = option(
        0.0,
        "Share of visits that are skipped at a success of 0 or 1; fewer are skipped in between, none at 0.5.",
        ge=0,
        le=0.95,
    )


class EnvironmentConfig(Section):
    """Where tasks come from and how rollouts are rewarded; with [[environments]], defaults of each of them."""

    name: str = Field(
        description='"dataset" (environment.dataset = "FILE or HUB NAME" means it, too), "gsm8k", "code", '
        '"addition", "reasoning-gym:TASK", "verifiers:ENV", "openenv:URL", or your own as "module:thing" or '
        '"path/to/file.py:thing".',
    )
    label: str = option("", "Name in metrics, and in task ids if there are several; empty: the end of the name.")
    weight: float = option(1.0, "Share of the groups, relative to the weights of the other environments.", gt=0)
    options: dict[str, Any] = option({}, "Keyword arguments of the environment.")
    sampling: SamplingConfig = option(SamplingConfig(), "Options of [sampling] that differ in this environment.")
    evaluation_tasks: int = option(-1, "Held-out tasks to evaluate on; -1: evaluation.tasks.", ge=-1)
    curriculum: CurriculumConfig = option(CurriculumConfig(), "Leave out tasks by how often they are solved.")
    timeout: float = option(
        300.0,
        "Seconds that one rollout may take, generation included; the time that engines sleep and the wait for a free "
        "engine slot don't count.",
        gt=0,
    )
    max_concurrent: int = option(
        0,
        "Most episodes in flight. 0 means twice the slots of all engines, and no bound with loop.max_lag = 0, where a "
        "bound makes results depend on timing.",
        ge=0,
    )
    max_turns: int = option(0, "Completions after which a conversation ends; 0: no limit.", ge=0)
    max_tokens: int = option(0, "Sampled tokens after which a conversation ends; 0: no limit.", ge=0)
    tool_calls_per_second: float = option(
        0.0,
        "Most calls of tools by conversations, each second; the wait counts towards no time limit, except that with "
        "workers it counts towards environment.timeout. 0: no limit.",
        ge=0,
    )
    rollout_retries: int = option(
        0, "Most further draws of a failed rollout, so that its group keeps its size; 0: the group is smaller.", ge=0
    )
    max_failures: int = option(
        10,
        "Tasks in a row with failed rollouts after which the run stops. Until the first rollout succeeds: failed "
        "rollouts, if all tasks in flight fail.",
        ge=1,
    )
    workers: int = option(
        0,
        "Processes that play the episodes, each with the whole environment; 0: the controller plays them.",
        ge=0,
        le=MAX_WORKERS,
    )
    worker_memory_gb: float = option(
        0.0, "Memory above which a worker gets no further episode and is replaced after its last; 0: no limit.", ge=0
    )
    reward_workers: int = option(
        0, "Most processes for reward functions that are not async; 0 is one per core.", ge=0, le=MAX_WORKERS
    )
    reward_error: Literal["zero", "fail"] = option(
        "zero", "If a reward function raises: reward 0, counted, with a warning; or a failed rollout."
    )

    @model_validator(mode="before")
    @classmethod
    def _move_dataset_options(cls, values: Any) -> Any:
        """The options of a dataset, which may be written next to the section's own, in `options`."""
        if not isinstance(values, dict) or not (reads_dataset(values) or values.get("name") == "dataset"):
            return values
        own = values.get("name", "dataset") != "dataset"  # whose options are known once it is loaded
        moved = {n: v for n, v in values.items() if n in DATASET_OPTIONS or (own and n not in cls.model_fields)}
        given = {name: value for name, value in values.items() if name not in moved}
        return {"name": "dataset"} | given | {"options": given.get("options", {}) | moved}

    def within(self, shared: EnvironmentConfig) -> EnvironmentConfig:
        """The options of this entry of `[[environments]]`, with those of `[environment]` for options that it lacks."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        end = str(self.options.get("dataset")) if self.name == "dataset" else self.name.rpartition(":")[2] or self.name
        label = self.label or re.sub(r"[^\w.-]+", "_", end.rstrip("/").rpartition("/")[2])
        return shared.model_copy(update={**given, "label": label})
