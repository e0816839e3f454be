"""The record of an evaluation, as in `evaluations.jsonl`: scores with intervals, failures, versions and samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from slipstream.environments.base import Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.episode import EpisodeOutcome, RolloutFailed
from slipstream.environments.images import content_text
from slipstream.environments.load import LoadedEnvironment
from slipstream.observe.estimates import Estimate, estimate_mean, pass_at_k
from slipstream.observe.run_totals import metric_means
from slipstream.rollout import Rollout, build_samples, mean
from slipstream.scheduling.curriculum import success_of

RECORDED_CHARACTERS = 500  # of a prompt or a completion


@dataclass(frozen=True)
class PlayedTask:
    """A held-out task and the outcomes of its samples."""

    environment: LoadedEnvironment
    task: Task
    outcomes: Sequence[EpisodeOutcome]

    @property
    def id(self) -> str:
        """The id of the task in records."""
        return self.environment.id_of(self.task)

    @property
    def category(self) -> str:
        """The task's category; "" without one, as for a user's own class of tasks."""
        return str(getattr(self.task, "category", ""))

    @property
    def episodes(self) -> list[tuple[Rollout, ...]]:
        """The rollouts of each sample that did not fail."""
        return [outcome for outcome in self.outcomes if not isinstance(outcome, RolloutFailed)]

    @property
    def failures(self) -> list[RolloutFailed]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, RolloutFailed)]

    @property
    def scores(self) -> list[float]:
        """The score of each sample; 0 if it failed."""
        return [0.0 if isinstance(outcome, RolloutFailed) else success_of(outcome) for outcome in self.outcomes]

    def rewards_of(self, policy: str) -> list[float]:
        """The rewards of all rollouts of one of several policies."""
        return [rollout.reward for episode in self.episodes for rollout in episode if rollout.policy == policy]

    def scores_of(self, policy: str) -> list[float]:
        """The score of one of several policies in each sample in which it has rollouts."""
        each = ([rollout for rollout in episode if rollout.policy == policy] for episode in self.episodes)
        return [success_of(own) for own in each if own]

    def describe(self, tokenizer: ChatTokenizer) -> dict[str, Any]:
        """The task's entry of `evaluations.jsonl`: the first sample, and scores.

        Of the sample's last rollout it has the reward and the beginning of the text. `score` is the mean of all
        samples, which are in `scores` if there are several. A single sample that failed has no score.
        """
        known: dict[str, Any] = {"id": self.id, "prompt": _prompt(self.task)}
        if len(self.outcomes) > 1:
            known |= {"scores": self.scores, "score": fmean(self.scores)}
        outcome = self.outcomes[0]
        if isinstance(outcome, RolloutFailed):
            return {**known, "failed": outcome.reason}
        first, *more = outcome[-1].completions
        last = build_samples(outcome[-1].completions)[-1:] if more else []  # the whole conversation
        text = tokenizer.decode(last[0].token_ids[last[0].sampled_positions[0] :]) if last else first.text
        return {**known, "completion": _shorten(text), "reward": outcome[-1].reward, "score": fmean(self.scores)}


def summarize(played: Sequence[PlayedTask], version: int) -> dict[str, Any]:
    """Scores with intervals, failures and versions. All tasks have the same number of samples.

    `version` stands for the versions if no token was sampled.
    """
    failures = [failure for each in played for failure in each.failures]
    completions = [c for each in played for episode in each.episodes for r in episode for c in r.completions]
    versions = [v for completion in completions for v in completion.versions] or [version]
    environments, categories = dict[str, list[PlayedTask]](), dict[str, list[PlayedTask]]()
    for each in played:
        environments.setdefault(each.environment.options.label, []).append(each)
        categories.setdefault(each.category, []).append(each)
    categories.pop("", None)
    figures, estimates = _figures(played), _estimates(played)
    for name, own in sorted(categories.items()):
        estimates[f"eval/category/{name}"] = estimate_mean([fmean(each.scores) for each in own])
    for label, own in environments.items():
        prefix = f"eval/environments/{label}/"
        figures |= {name.replace("eval/", prefix, 1): value for name, value in _figures(own).items()}
        estimates |= {name.replace("eval/", prefix, 1): estimate for name, estimate in _estimates(own).items()}
    return {
        "versions": [min(versions), max(versions)],
        **{name: estimate.value for name, estimate in estimates.items()},
        **figures,
        "eval/samples_per_task": len(played[0].outcomes),
        "eval/failures": dict(Counter(failure.reason for failure in failures)),
        "last_failure": failures[-1].one_line if failures else None,
        "intervals": {name: [estimate.low, estimate.high] for name, estimate in estimates.items()},
        "categories": {name: len(own) for name, own in sorted(categories.items())},
    }


def _figures(played: Sequence[PlayedTask]) -> dict[str, Any]:
    """Counts, and means that have no interval."""
    episodes = [episode for each in played for episode in each.episodes]
    rollouts = [rollout for episode in episodes for rollout in episode]
    ended = sum(len(each.outcomes) for each in played)
    return {
        "eval/reward": sum(mean([r.reward for r in episode]) for episode in episodes) / ended,
        "eval/tasks": len(played),
        **{f"eval/env/{name}": value for name, value in metric_means(rollouts).items()},
        "eval/mean_length": mean([float(r.tokens) for r in rollouts]),
        "eval/failed": ended - len(episodes),
    }


def _estimates(played: Sequence[PlayedTask]) -> dict[str, Estimate]:
    """The mean score, and pass@k for each k in 2, 4, 8, ... up to all samples."""
    scores = [each.scores for each in played]
    samples = len(scores[0])
    found = {"eval/score": estimate_mean([fmean(each) for each in scores])}
    for k in sample_counts(samples):
        found[f"eval/pass@{k}"] = estimate_mean([pass_at_k(each, k) for each in scores])
    return found


def sample_counts(samples: int) -> list[int]:
    """Each k of pass@k: 2, 4, 8, ... up to all samples."""
    return sorted({samples, *(2**i for i in range(samples.bit_length()))} - {1})


def add_policies(
    record: dict[str, Any], played: Sequence[PlayedTask], against_start: Mapping[str, Sequence[PlayedTask]]
) -> None:
    """Add the mean reward of each of several policies, its pass@k, and its reward `against_start`, with intervals.

    All ignore samples in which the policy has no rollout, such as failed ones; pass@k ignores tasks with fewer than k
    remaining samples. `against_start` has, by policy, the tasks that it played while the others were as at the start.
    """
    names = sorted({rollout.policy for each in played for episode in each.episodes for rollout in episode} - {""})
    found: dict[str, list[float]] = {}
    for name in names:
        found[f"{name}/reward"] = [fmean(own) for each in played if (own := each.rewards_of(name))]
        scores = [each.scores_of(name) for each in played]
        for k in sample_counts(len(played[0].outcomes)):
            found[f"{name}/pass@{k}"] = [pass_at_k(own, k) for own in scores if len(own) >= k]
        against = against_start.get(name, ())
        found[f"{name}/against_start"] = [fmean(own) for each in against if (own := each.rewards_of(name))]
    for figure, values in found.items():
        if values:
            estimate = estimate_mean(values)
            record[f"eval/policies/{figure}"] = estimate.value
            record["intervals"][f"eval/policies/{figure}"] = [estimate.low, estimate.high]


def all_failed(result: Mapping[str, Any]) -> bool:
    """Whether every episode of an evaluation failed."""
    return bool(result["eval/failed"] == result["eval/tasks"] * result["eval/samples_per_task"])


def describe_failures(result: Mapping[str, Any], when: str = "") -> str:
    """One line on the episodes that failed, at least one. `when`, such as " after step 5", follows the count."""
    failed, samples = result["eval/failed"], result["eval/samples_per_task"]
    episodes = result["eval/tasks"] * samples
    count = f"all {episodes}" if failed == episodes else f"{failed} of {episodes}"
    what = "held-out tasks" if samples == 1 else f"episodes of {result['eval/tasks']} held-out tasks"
    return f"{count} {what} failed{when}, the last with: {result['last_failure']}"


def _prompt(task: Task) -> str:
    """What a task asks, as text; "" for a prompt of token ids."""
    if question := task.data.get("question"):
        return _shorten(str(question))
    if isinstance(task.prompt, str):
        return _shorten(task.prompt)
    last: Any = task.prompt[-1] if task.prompt else None
    return _shorten(content_text(last.get("content"))) if isinstance(last, Mapping) else ""


def _shorten(text: str) -> str:
    half = RECORDED_CHARACTERS // 2
    return text if len(text) <= RECORDED_CHARACTERS else f"{text[:half]} … {text[-half:]}"
