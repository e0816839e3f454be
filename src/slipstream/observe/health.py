"""Health rules: find what goes wrong in a run from its records, and name a remedy.

A rule measures the recent steps. It warns once when its measure reaches `begins` for `steps` steps in a row, and again
only after the measure has fallen below `ends`. docs/seeing-a-run.md lists the rules.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from slipstream.config.schema import HealthRule
from slipstream.observe.formatting import annotate_options, is_finite, number
from slipstream.observe.history import KEPT, SHORT, History, Record
from slipstream.observe.run_data import Run
from slipstream.rollout import mean

FEW, LONG = 3, 20  # steps over which rules average; most of them over SHORT
ENGINE_DOWN_S = 180.0  # after which an engine that is being started counts as lost; vLLM starts in up to 120 s on H200s
LONG_COMPLETION = 16  # tokens; shorter completions may coincide by chance, or since they are right
MIN_ENTROPY = 3.0  # nats of a whole completion; samples with less coincide often
MIN_ANSWERS = 20
MIN_FREE_GB, MIN_GROWTH_GB = 2.0, 0.5
MIN_REWARD_S = 0.2  # shorter times after the last token are those of a busy controller
SLOW_REWARDS = 0.4  # share of the time in which neither side works
WHILE_RUNNING = ". While it runs: "  # before the part of a remedy that a run that ended has no use for
BEST_ROLLOUTS = "slipstream rollouts RUN"  # in a remedy; a link on the page


class HealthWarning(NamedTuple):
    """What a rule found at a step, and what to do."""

    rule: str
    step: int
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}. {self.remedy} ({self.rule})"


class Measure(NamedTuple):
    """How bad it is, in the unit of the rule's bounds, and the figures as text."""

    value: float
    text: str = ""
    remedy: str = ""  # that of the rule if empty


HEALTHY = Measure(0.0)
BOTH_IDLE = 0.5  # share of the time; above it neither the trainer nor the engines are slower than the other side


class Rule(NamedTuple):
    """A rule: its measure, the bounds of its hysteresis, and a remedy that names an option or a command.

    `follows` are rules whose warnings explain one of this rule.
    """

    name: HealthRule
    measure: Callable[[History], Measure]
    begins: float
    ends: float
    steps: int
    remedy: str
    follows: tuple[HealthRule, ...] = ()


def _entropy_collapse(h: History) -> Measure:
    """Share of the entropy that is lost, while rewards did not improve: a solved task has little entropy, too."""
    before, now = h.start("policy/entropy", 1), h.mean("policy/entropy")
    reward, gain = h.mean("reward/mean"), h.reward_gain
    solved = h.mean("reward/std") < 0.5 * h.start("reward/std") and reward >= h.start("reward/mean")
    if not before > 0 or gain > 0.25 * h.spread or solved:
        return HEALTHY
    found = f"entropy fell from {before:.3g} to {now:.3g} nats, while the mean reward changed by {gain:+.3g}"
    return Measure(1 - now / before, found)


def _reward_collapse(h: History) -> Measure:
    """Fall of the mean reward below its best, in units of the smallest fall that counts.

    That is 0.4 standard deviations of the rewards or 5 standard errors of the mean, whichever is more.
    """
    rewards, now = h.values("reward/mean", LONG), h.mean("reward/mean")
    if len(rewards) < LONG:
        return HEALTHY
    noise = statistics.pstdev(b - a for a, b in itertools.pairwise(rewards)) / math.sqrt(2 * SHORT)
    fall = h.best_reward - now
    text = f"the mean reward fell from {max(h.best_reward, h.first_reward):.3g} at its best to {now:.3g}"
    return Measure(fall / max(0.4 * h.spread, 5 * noise, 1e-9), text)


def _score_falls(h: History) -> Measure:
    """Fall of the held-out score below its best, divided by three standard errors; 0 unless the reward has risen."""
    scores = [(e["eval/score"], e.get("eval/tasks") or 1) for e in h.evaluations if is_finite(e.get("eval/score"))]
    gain = h.reward_gain
    if len(scores) < 2 or not gain > 0.2 * h.spread or scores[-1] > scores[-2]:
        return HEALTHY
    (best, tasks), (now, _) = max(scores), scores[-1]
    variance = max(best * (1 - best), now * (1 - now), 0.01)  # of one task, whose score is mostly 0 or 1
    text = f"the reward may be hacked: the held-out score fell from {best:.3f} to {now:.3f}, "
    text += f"while the training reward rose by {gain:.3g}{_changed_too(h)}"
    return Measure((best - now) / (3 * math.sqrt(2 * variance / tasks)), text)


def _changed_too(h: History) -> str:
    """Metrics of the environment that halved, and a completion length that changed by a fifth, since the start."""
    names = [name for name in h.last if name.startswith("env/") and h.mean(name) < 0.5 * h.start(name, FEW)]
    length = "completions/mean_length"
    names += [length] if abs(h.mean(length) / (h.start(length, FEW) or 1) - 1) > 0.2 else []
    found = [f"{name} went from {number(h.start(name, FEW), 2)} to {number(h.mean(name), 2)}" for name in names]
    return "".join(f"; {text}" for text in found)


def _stale_weights(h: History) -> Measure:
    """The mismatch KL, if greedy answers of the engines stay as they were at the start of the run."""
    if len(h.evaluations) < 2 or h.option("evaluation.temperature"):
        return HEALTHY
    (first, _), (last, version) = (_answers(h.evaluations[i]) for i in (0, -1))
    kl = h.mean("policy/mismatch_kl")
    found = f"engines serve old weights: after {version} publishes all {len(last)} held-out answers are identical to"
    same = len(last) >= MIN_ANSWERS and first == last and version > 0
    text = (
        f"{found} those of the start, yet the trainer's policy differs from the sampler's (mismatch KL {kl:.3g} nats)"
    )
    own = " and ".join(name for name in ("generator.engine", "sync.link") if ":" in h.option(name, ""))
    remedy = f'Check that {own} loads what it receives; set sync.verify to "full"' if own else ""
    return Measure(kl, text, remedy) if same else HEALTHY


def _answers(evaluation: Record) -> tuple[dict[str, Any], int]:
    """The recorded answers of an evaluation by task, and the oldest version that gave them."""
    answers = {sample["id"]: sample.get("completion") for sample in evaluation.get("samples") or ()}
    return answers, min(evaluation.get("versions") or [0])


def _mismatch(h: History) -> Measure:
    """The larger of the mismatch KL and the absolute logarithm of the mean ratio."""
    kl, ratio = h.mean("policy/mismatch_kl"), h.mean("policy/ratio_mean", default=1.0)
    text = f"the policy differs from the one that sampled: mismatch KL {kl:.3g} nats, mean ratio {ratio:.3g}, "
    text += f"with tokens of {number(h.mean('lag/mean'), 1)} versions ago"
    return Measure(max(kl, abs(math.log(max(ratio, 1e-9)))), text)


def _large_updates(h: History) -> Measure:
    """The larger of mismatch KL and clipped fraction in a few steps: an optimizer step changed the policy too much."""
    kl, clipped = (h.mean(f"policy/{name}", FEW, 0.0) for name in ("mismatch_kl", "clip_fraction"))
    found = f"mismatch KL {kl:.3g} nats, {clipped:.0%} of the tokens clipped (means of {FEW} steps)"
    return Measure(max(kl, clipped), f"updates are too large: {found}")


def _sample_size(h: History) -> Measure:
    size = h.mean("policy/effective_sample_size")
    return Measure(1 - size, f"importance ratios leave an effective sample size of {size:.0%} of the tokens")


def _no_signal(h: History) -> Measure:
    """Share of groups without an advantage, those included that `algorithm.filter_zero_advantage` replaced."""
    with_signal, trained = h.mean("reward/frac_groups_with_signal"), h.growth("rollout/trained", SHORT)
    filtered = h.growth("rollout/filtered", SHORT)
    if filtered > 0 and trained > 0:
        with_signal *= trained / (trained + filtered)
    found = f"{1 - with_signal:.0%} of the groups have equal rewards and teach nothing"
    raised = sum((h.last.get("reward/errors") or {}).values()) > 0.5 * (h.last.get("rollout/generated") or math.inf)
    remedy = "Mend the reward function, which raised for most rollouts" if raised else ""
    return Measure(1 - with_signal, f"{found} (mean reward {number(h.mean('reward/mean'), 3)})", remedy)


def _stale(h: History) -> Measure:
    """Share of the rollouts that became too old to be trained on; 0 in a run that is synchronous now."""
    dropped = h.growth("rollout/dropped_stale", LONG) if h.option("loop.max_lag") else 0.0
    share, older = dropped / max(h.growth("rollout/generated", LONG), 1), f"loop.max_lag = {h.option('loop.max_lag')}"
    return Measure(share, f"the lag is at its bound: {share:.0%} of the rollouts were dropped as older than {older}")


def _waits(h: History) -> tuple[float, float, str]:
    """Shares of the last `LONG` steps' time: the trainer waited for a batch; engines had no request. Both as text."""
    window, generated = h.growth("time/window_s", LONG), h.growth("gen/busy_s", LONG)
    share = h.mean("engines/alive", LONG, 1.0) / max(h.mean("engines/total", LONG, 1.0), 1e-9)  # dead ones not counted
    waited = LONG * h.mean("time/batch_wait_s", LONG) / max(window, 1e-9)
    idle = max(0.0, 1 - generated / max(window * share, 1e-9))
    text = f"in the last {LONG} steps, the trainer waited {waited:.0%} of the time for batches"
    return waited, idle, f"{text}, the engines {idle:.0%} for work"


def _slow_rewards(h: History) -> Measure:
    """The smaller of the shares of time in which the trainer and the engines wait.

    Less if the time from a rollout's last token to its reward is short, compared with a quarter of a step.
    """
    long_s = max(0.25 * h.growth("time/window_s", LONG) / LONG, MIN_REWARD_S)
    reward_s = h.mean("rollout/reward_s", LONG)
    if not reward_s > 0:
        return HEALTHY
    waits, idle, parts = _waits(h)
    score_s, queued_s = (h.mean(f"scoring/{name}", LONG, 0.0) for name in ("mean_s", "mean_wait_s"))
    split, remedy = "", ""
    if score_s:
        slots = f"{number(h.last.get('scoring/in_flight'))} of {h.option('scoring.concurrency')} slots busy"
        split = f" ({score_s:.2g} s scoring + {queued_s:.2g} s queued, {slots})"
        remedy = "Use a faster scorer"
        # The rate at which the slower side of trainer and engines would work without waiting.
        rate = h.growth("rollout/generated", LONG) / h.growth("time/window_s", LONG) / max(1 - min(waits, idle), 0.01)
        if queued_s > score_s and rate > 0:
            needed = f"{number(math.ceil(rate * score_s))}: trainer and engines can process {number(rate)} rollouts/s"
            remedy = f"Raise scoring.concurrency to {needed}. Or use a faster scorer"
    found = f"rewards are slow: {reward_s:.3g} s after a rollout's last token{split}; {parts}"
    # A single bound on the time of rewards would begin and end the warning at one value.
    return Measure(min(waits, idle, SLOW_REWARDS * reward_s / long_s), found, remedy)


def _trainer_idle(h: History) -> Measure:
    waits, idle, parts = _waits(h)
    if idle > BOTH_IDLE and _works_apart(h):  # engines and ranks are enough
        return Measure(waits, f"trainer and engines both wait, for tools or restarts: {parts}", "Raise loop.max_lag")
    return Measure(waits, f"generation is slower than training: {parts}") if _works_apart(h) else HEALTHY


def _engines_idle(h: History) -> Measure:
    waits, idle, parts = _waits(h)
    return Measure(idle * (waits <= BOTH_IDLE and _works_apart(h)), f"engines have too little work: {parts}")


def _works_apart(h: History) -> bool:
    """Whether trainer and engines may work at the same time, on GPUs of their own, and do not wait for rewards."""
    apart = h.option("loop.max_lag") and h.option("sync.placement") != "colocated"
    return bool(apart) and not _slow_rewards(h).value > SLOW_REWARDS


def _engine_lost(h: History) -> Measure:
    total, alive, lost = (h.last.get(f"engines/{name}") or 0 for name in ("total", "alive", "lost"))
    down_s = (h.last.get("time/wall_s") or 0.0) - h.engines_complete_at
    if not lost and down_s < ENGINE_DOWN_S:
        return HEALTHY
    why = "no restarts are left" if lost else f"for {down_s:.0f} s"
    return Measure(total - alive, f"{alive} of {total} engines serve: {why}")


def _engine_slow(h: History) -> Measure:
    """By how much the slowest engine's rate is below the fastest one's; engines that are hardly used do not count."""
    window, rates = h.growth("time/window_s", LONG), {}
    for name in (key.rpartition("/")[2] for key in h.last if key.startswith("engines/tokens/")):
        tokens, busy = (h.growth(f"engines/{total}/{name}", LONG) for total in ("tokens", "busy_s"))
        if busy > 0.2 * window:
            rates[name] = tokens / busy
    if len(rates) < 2:
        return HEALTHY
    slow, fast = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    found = f"engine {slow} generates {number(rates[slow])} tokens/s, engine {fast} {number(rates[fast])}"
    return Measure(1 - rates[slow] / max(rates[fast], 1e-9), found)


def _clipped(h: History) -> Measure:
    share, most = h.mean("completions/clipped_ratio"), h.option("sampling.max_tokens")
    return Measure(share, f"{share:.0%} of the completions were cut off at sampling.max_tokens = {most}")


def _identical(h: History) -> Measure:
    share, length = h.mean("completions/identical_fraction"), h.mean("completions/mean_length")
    if length < LONG_COMPLETION and h.mean("policy/entropy", default=0.0) * length < MIN_ENTROPY:
        return HEALTHY
    return Measure(share, f"{share:.0%} of the completions equal another one of their group, {length:.0f} tokens long")


def _gradient_spikes(h: History) -> Measure:
    """Number of recent gradient norms, without those of 0, above ten medians and the clipping bound."""
    norms = [norm for norm in h.values("train/grad_norm", 100) if norm]  # 0: no group had different rewards
    if len(norms) < 3 * SHORT:
        return HEALTHY
    usual, bound = statistics.median(norms), h.option("trainer.gradient_clip")
    spikes = [norm for norm in norms[-SHORT:] if norm > max(10 * usual, bound)]
    largest = max(norms[-SHORT:])
    return Measure(len(spikes), f"{len(spikes)} of {SHORT} gradient norms spiked, to {largest:.3g} from {usual:.3g}")


def _nonfinite(h: History) -> Measure:
    skipped = h.growth("train/skipped_steps", 1)
    return Measure(skipped, f"{skipped:.0f} step was skipped: its loss or gradient was not finite")


def _disk(h: History) -> Measure:
    """Space needed on the disk of the run, over free space."""
    free: float = h.mean("disk/free_gb", 1)
    checkpoint: float = h.last.get("checkpoint/size_gb") or 0.0
    needed = max(MIN_FREE_GB, 2 * checkpoint)
    size = f" (a checkpoint needs {checkpoint:.3g} GB)" if checkpoint else ""
    return Measure(needed / (free or 1e-9), f"the disk of the run has {free:.3g} GB free{size}")


def _memory(h: History) -> Measure:
    """Number of kinds of processes whose memory grows steadily: it rose over each quarter of the recent steps."""
    grown = []
    for name in (key for key in h.last if key.startswith("memory/")):
        values = h.values(name)
        size = len(values) // 4
        a, b, c, d = (mean(values[i * size : (i + 1) * size]) for i in range(4))
        levels_off = d - c < 0.3 * (b - a)
        if len(values) >= KEPT // 2 and a < b < c < d and d - a > max(MIN_GROWTH_GB, 0.2 * a) and not levels_off:
            process = name.removeprefix("memory/").removesuffix("_gb").replace("_", " ")
            grown.append(f"{process} from {a:.3g} to {d:.3g} GB in {len(values)} steps")
    return Measure(len(grown), f"memory keeps growing: {', '.join(grown)}")


RULES = (  # the worst first
    Rule("engine-lost", _engine_lost, 1, 1, 1,
         f"Read its log in logs/, and raise generator.max_restarts{WHILE_RUNNING}slipstream scale RUN N adds one"),
    Rule("stale-weights", _stale_weights, 0.05, 0.02, 3,
         'Set sync.verify to "full"'),
    Rule("score-falls", _score_falls, 1.0, 0.7, 1,
         f"Read the rollouts of highest reward ({BEST_ROLLOUTS}), mend the reward function, or set algorithm.kl_coef"),
    Rule("slow-rewards", _slow_rewards, SLOW_REWARDS, 0.3, SHORT,
         "Make the reward function faster or async, or raise environment.reward_workers"),
    Rule("large-updates", _large_updates, 0.5, 0.3, 1,
         "Lower trainer.learning_rate, raise trainer.warmup_steps, or set trainer.gradient_clip",
         follows=("stale-weights",)),
    Rule("entropy-collapse", _entropy_collapse, 0.9, 0.8, SHORT,
         "Lower trainer.learning_rate, raise sampling.temperature, or set algorithm.kl_coef",
         follows=("stale-weights", "large-updates")),
    Rule("reward-collapse", _reward_collapse, 1.0, 0.6, 3,
         "Resume from an earlier checkpoint with a lower trainer.learning_rate, or set algorithm.kl_coef",
         follows=("stale-weights", "score-falls", "large-updates", "entropy-collapse")),
    Rule("mismatch", _mismatch, 0.3, 0.15, SHORT,
         "If tokens are old, lower loop.max_lag or trainer.learning_rate, or set algorithm.corrections; if they are "
         'recent, check model.dtype and sync.verify = "full"',
         follows=("stale-weights", "large-updates")),
    Rule("sample-size", _sample_size, 0.7, 0.5, SHORT,
         "Lower loop.max_lag or trainer.learning_rate, or set algorithm.corrections",
         follows=("stale-weights", "large-updates")),
    Rule("no-signal", _no_signal, 0.9, 0.8, SHORT,
         "Give tasks that the policy solves sometimes, raise loop.group_size or sampling.temperature, or set "
         "algorithm.filter_zero_advantage = true",
         follows=("score-falls", "large-updates", "entropy-collapse")),
    Rule("lag-bound", _stale, 0.1, 0.05, 1,
         "Raise loop.max_lag or generator.replicas, or lower generator.max_num_seqs if fewer sequences then end sooner",
         follows=("engine-lost", "slow-rewards")),
    Rule("trainer-idle", _trainer_idle, 0.6, 0.5, SHORT,
         f"Raise generator.replicas or loop.max_lag{WHILE_RUNNING}slipstream scale RUN N adds engines",
         follows=("engine-lost", "slow-rewards")),
    Rule("engines-idle", _engines_idle, 0.7, 0.6, SHORT,
         "Use fewer engines (generator.replicas) or more trainer.ranks, or raise loop.max_lag",
         follows=("slow-rewards",)),
    Rule("engine-slow", _engine_slow, 0.5, 0.35, SHORT,
         f"Check its host and GPU (slipstream doctor){WHILE_RUNNING}slipstream scale replaces it"),
    Rule("completions-cut", _clipped, 0.5, 0.4, SHORT,
         'Raise sampling.max_tokens, or set algorithm.overlong = "penalty" or "filter"',
         follows=("score-falls", "large-updates", "entropy-collapse")),
    Rule("identical-completions", _identical, 0.5, 0.3, SHORT,
         "Raise sampling.temperature or sampling.top_p, or lower trainer.learning_rate",
         follows=("score-falls", "large-updates", "entropy-collapse")),
    Rule("gradient-spikes", _gradient_spikes, 2, 1, 1,
         "Lower trainer.learning_rate or trainer.gradient_clip, or set trainer.warmup_steps",
         follows=("large-updates",)),
    Rule("nonfinite-steps", _nonfinite, 1, 1, 1,
         "Lower trainer.learning_rate, check rewards, or set model.dtype = \"float32\""),
    Rule("disk-full", _disk, 1.0, 0.8, 1,
         "Free space, lower checkpoint.keep, or move run.dir"),
    Rule("memory-grows", _memory, 1, 1, 1,
         "Look for lists that grow in the environment or reward function; resume the run before the host kills it"),
)  # fmt: skip


class Health:
    """The rules over one run. `config` is its configuration by section; rules in `ignore` are silent."""

    def __init__(self, config: Mapping[str, Any], ignore: Collection[str] = ()) -> None:
        self._history = History(config)
        self._rules = [rule for rule in RULES if rule.name not in ignore]
        self._streaks: dict[str, int] = {}  # steps in a row at or beyond `begins`; `steps` until it falls below `ends`

    def step(self, record: Record, evaluations: Sequence[Record] = ()) -> list[HealthWarning]:
        """Add the record of the next step, with all evaluations so far. Returns the warnings that begin."""
        self._history.add(record, evaluations)
        found = []
        for rule in self._rules:
            measure, streak = rule.measure(self._history), self._streaks.get(rule.name, 0)
            if streak == rule.steps:
                self._streaks[rule.name] = 0 if measure.value < rule.ends else streak
                continue
            self._streaks[rule.name] = streak + 1 if measure.value >= rule.begins else 0
            if self._streaks[rule.name] == rule.steps:
                remedy = annotate_options(measure.remedy or rule.remedy, self._history.config)
                found.append(HealthWarning(rule.name, record.get("step") or 0, measure.text, remedy))
        return found


def check(run: Run) -> list[HealthWarning]:
    """Warnings for all records of a run, which may still be running. Today's rules also apply to older runs."""
    return replay(run.metrics, run.evaluations, Health(run.config))


def replay(metrics: Iterable[Record], evaluations: Sequence[Record], health: Health) -> list[HealthWarning]:
    """Add all records of a run to `health`. Returns the warnings that begin."""
    found = []
    for record in metrics:
        found += health.step(record, [e for e in evaluations if (e.get("step") or 0) < (record.get("step") or 0)])
    return found
