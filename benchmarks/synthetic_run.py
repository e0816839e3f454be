"""Write a run directory with made-up records of any size, for measurements and tests of the views of a run.

    python benchmarks/synthetic_run.py runs/synthetic --steps 2000 --groups 5 --group-size 10

Engines sample groups, a trainer takes steps on them and publishes, and an evaluation and a checkpoint follow every
tenth of the steps. One engine fails and recovers. All numbers are functions of the seed.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.config.loading import dump, load_config
from slipstream.observe.recorder import SCHEMA

SLOTS = 8  # rollouts that an engine samples at a time
WORDS = [f"{a}{b}" for a in ("", "un", "re", "in") for b in ("sum", "step", "carry", "digit", "total", "check")]
SYMBOLS = ["<pad>", "<eos>", *"0123456789+= .\n<>/_", *sorted(WORDS)]
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b[0m \x00\x07 \u202eright to left\u202c",
    "</script><!-- <script>",
)


class SyntheticRun:
    """A run of `steps` with `groups` groups of `size` rollouts each, in `path`."""

    def __init__(self, path: Path, steps: int, groups: int, size: int, engines: int = 2, seed: int = 0) -> None:
        self.path, self.steps, self.groups, self.size, self.engines = path, steps, groups, size, engines
        self.rng = np.random.default_rng(seed)
        self.free = np.zeros((engines, SLOTS))  # the time at which each slot becomes free
        self.published = [0.0]  # the time of each version
        self.visits = 0
        self.trained = self.generated = 0

    def write(self, flags: tuple[str, ...] = ()) -> Path:
        (self.path / "rollouts").mkdir(parents=True)
        options = [f"--model.path={self.path / 'policy'}", "--environment.name=addition", f"--loop.steps={self.steps}"]
        options += [f"--loop.groups_per_step={self.groups}", f"--loop.group_size={self.size}", *flags]
        (self.path / "config.toml").write_text(dump(load_config(None, options)))
        build_tokenizer().save_pretrained(self.path / "policy")
        with (
            (self.path / "metrics.jsonl").open("w") as metrics,
            (self.path / "events.jsonl").open("w") as events,
            (self.path / "evaluations.jsonl").open("w") as evaluations,
        ):
            for step in range(1, self.steps + 1):
                record, found = self.step(step)
                found += self.every_tenth(step, record["time/wall_s"], evaluations)
                metrics.write(json.dumps(record) + "\n")
                events.writelines(json.dumps(event) + "\n" for event in found)
        summary = {
            "steps": self.steps,
            "stopped": None,
            "wall_s": self.published[-1],
            "engines_lost": ["engine 1: exit"],
        }
        (self.path / "summary.json").write_text(json.dumps(summary))
        return self.path

    def step(self, step: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The metrics of a step and its events; writes its rollouts."""
        version, progress = step - 1, step / self.steps
        before = self.published[-1]
        groups = [self.group(step, progress) for _ in range(self.groups)]
        start = max(before + 0.02, *(group["end"] for group in groups))
        end = start + self.rng.uniform(0.8, 1.2)
        self.published.append(end + 0.06)
        rollouts = [rollout[:8] for group in groups for rollout in group["rollouts"]]
        self.write_rollouts(step, groups, rollouts)
        pauses = [[f"engine {e}", end + 0.02, end + 0.025] for e in range(self.engines)]
        trainer = {"kind": "step", "track": "trainer", "start": start, "end": end, "step": step, "version": version}
        trainer |= {"wait_s": start - before, "visit_ids": [group["visit_id"] for group in groups]}
        publish = {"kind": "publish", "track": "controller", "start": end, "end": end + 0.06, "version": step}
        return self.metrics(step, progress, rollouts, end - start, start - before), [
            *groups, trainer, publish | {"pauses": pauses}, *self.engine_events(before, rollouts)
        ]  # fmt: skip

    def group(self, step: int, progress: float) -> dict[str, Any]:
        """The event of a group, with its rollouts as `docs/run-directory.md` describes them."""
        self.visits += 1
        skill = float(np.clip(self.rng.normal(0.2 + 0.6 * progress, 0.25), 0, 1))
        rollouts = [[*self.rollout(skill), number] for number in range(self.size)]
        start, end = min(r[1] for r in rollouts), max(r[2] for r in rollouts)
        return {
            "kind": "group", "track": "controller", "start": start, "end": end, "visit_id": self.visits,
            "task_id": f"task-{self.visits % 997}", "fate": "ready", "rollouts": rollouts,
        }  # fmt: skip

    def rollout(self, skill: float) -> list[Any]:
        engine, slot = divmod(int(self.free.argmin()), SLOTS)
        start = max(float(self.free[engine, slot]) + 0.001, self.published[-1] - 2.5)
        tokens = int(self.rng.lognormal(3.6, 0.6)) + 2
        end = start + tokens * 0.02 / max(1, self.size * self.groups / (SLOTS * self.engines))
        self.free[engine, slot] = end
        oldest = max(0, int(np.searchsorted(self.published, start, "right")) - 1)
        newest = max(oldest, int(np.searchsorted(self.published, end, "right")) - 1)
        reward = float(self.rng.random() < skill) - 0.1 * (tokens > 100)
        self.generated += tokens
        return [f"engine {engine}", start, end, tokens, oldest, newest, reward, None]

    def engine_events(self, before: float, rollouts: list[list[Any]]) -> list[dict[str, Any]]:
        """The event of each engine for one step, in nine tenths of which it has requests."""
        end = self.published[-1]
        busy = 0.9 * (end - before)
        event = {"kind": "engine", "start": before, "end": end, "requests": [[before, before + busy]], "asleep": []}
        names = [f"engine {engine}" for engine in range(self.engines)]
        tokens = {name: sum(r[3] for r in rollouts if r[0] == name) for name in names}
        return [event | {"track": name, "forward_s": busy, "tokens": tokens[name]} for name in names]

    def write_rollouts(self, step: int, groups: list[dict[str, Any]], rollouts: list[list[Any]]) -> None:
        rewards = np.array([r[6] for r in rollouts]).reshape(self.groups, self.size)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
        ids = [[*self.rng.integers(2, len(SYMBOLS), r[3]).tolist()[:-1], 1] for r in rollouts]
        prompts = [self.rng.integers(2, 12, 6).tolist() for _ in groups]
        rows = [
            {
                "step": step, **{key: groups[i // self.size][key] for key in ("visit_id", "task_id")},
                "rollout": i % self.size, "role": "", "turn": 0, "prompt": _text(prompts[i // self.size]),
                "completion": HOSTILE[i] if step == 1 and i < len(HOSTILE) else _text(ids[i][:-1]),
                "prompt_ids": prompts[i // self.size], "completion_ids": ids[i], "reward": r[6],
                "advantage": float(advantages.flat[i]), "spans": _spans(r),
                "logprobs": (-self.rng.exponential(0.4, r[3])).tolist(),
                "finish_reason": "length" if r[3] > 150 else "stop", "temperature": 1.0,
                "metrics": [("correct", float(r[6] > 0.5))], "steps": [], "teacher": [],
            }
            for i, r in enumerate(rollouts)
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), self.path / "rollouts" / f"step_{step:06d}.parquet")

    def metrics(
        self, step: int, progress: float, rollouts: list[list[Any]], took: float, wait: float
    ) -> dict[str, Any]:
        rewards, tokens = [r[6] for r in rollouts], sum(r[3] for r in rollouts)
        lags = [step - 1 - r[4] for r in rollouts]
        self.trained += tokens
        noise = float(self.rng.normal(0, 0.03))
        return {
            "step": step, "version": step, "time/wall_s": self.published[-1], "time/window_s": self.published[-1],
            "reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards)), "reward/errors": {},
            "reward/frac_groups_with_signal": 1 - abs(0.5 - progress) + noise, "lag/mean": float(np.mean(lags)),
            "lag/max": max(lags), "completions/mean_length": tokens / len(rollouts), "env/correct": max(0.0, progress),
            "completions/clipped_ratio": float(np.mean([r[3] > 150 for r in rollouts])),
            "policy/entropy": 1.2 * math.exp(-2 * progress) + noise, "policy/mismatch_kl": 0.001 + abs(noise) / 20,
            "policy/ratio_mean": 1 + noise / 10, "policy/effective_sample_size": 0.97 - abs(noise), "train/loss": noise,
            "train/grad_norm": 1 + abs(noise) * 10, "train/learning_rate": 1e-5 * (1 - progress),
            "train/tokens": tokens,
            "train/total_tokens": self.trained, "gen/total_tokens": self.generated, "time/step_s": took,
            "time/batch_wait_s": wait, "train/tokens_per_s": tokens / took, "engines/alive": self.engines,
            "sync/pause_ms": 5.0, "train/busy_s": 0.8 * self.published[-1], "gen/busy_s": 0.9 * self.published[-1],
            "experts/max_load": None, "rollout/failures": {}, "rollout/generated": step * len(rollouts),
            "rollout/trained": step * len(rollouts),
        }  # fmt: skip

    def every_tenth(self, step: int, wall: float, evaluations: Any) -> list[dict[str, Any]]:
        """Events of an evaluation, of a checkpoint and, half way, of a fault."""
        if step != 1 and step % max(1, self.steps // 10):
            return []
        outcomes = self.rng.random(100) < 0.3 + 0.4 * step / self.steps
        samples = [
            {"id": f"test-{i}", "prompt": "1+1=", "completion": "2" if right else "3", "reward": float(right)}
            for i, right in enumerate(outcomes)
        ]
        record = {"step": step, "versions": [step, step], "eval/score": float(outcomes.mean()), "eval/tasks": 100}
        evaluations.write(json.dumps(record | {"eval/duration_s": 0.9, "samples": samples}) + "\n")
        found: list[dict[str, Any]] = [
            {"kind": "evaluation", "track": "controller", "start": wall, "end": wall + 0.9, "step": step},
            {"kind": "checkpoint", "track": "controller", "start": wall, "end": wall + 0.4, "step": step},
        ]
        if step == self.steps // 2:
            engine = f"engine {self.engines - 1}"
            found += [
                {"kind": "fault", "track": engine, "start": wall, "end": None, "what": f"{engine} died: exit code 9"},
                {"kind": "recovery", "track": engine, "start": wall + 1, "end": None, "what": f"{engine} serves again"},
                {
                    "kind": "warning", "track": "controller", "start": wall, "end": None, "rule": "engine lost",
                    "step": step,
                    "text": f"{engine} died and was restarted.", "remedy": "Read the end of its log under logs/.",
                },
            ]  # fmt: skip
        return found


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each of `SYMBOLS`."""
    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(SYMBOLS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z]+|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def _text(ids: list[int]) -> str:
    return "".join(SYMBOLS[i] for i in ids)


def _spans(rollout: list[Any]) -> list[dict[str, int]]:
    """Equal shares of the tokens for all versions from the oldest to the newest."""
    versions = range(rollout[4], rollout[5] + 1)[: rollout[3]]
    ends = [round(rollout[3] * (i + 1) / len(versions)) for i in range(len(versions))]
    return [
        {"version": v, "start": start, "end": end}
        for v, start, end in zip(versions, [0, *ends[:-1]], ends, strict=True)
    ]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("path", type=Path)
    found.add_argument("--steps", type=int, default=2000)
    found.add_argument("--groups", type=int, default=5)
    found.add_argument("--group-size", type=int, default=10)
    found.add_argument("--engines", type=int, default=2)
    found.add_argument("--seed", type=int, default=0)
    return found


def main() -> None:
    options = parser().parse_args()
    sizes = options.steps, options.groups, options.group_size, options.engines, options.seed
    print(SyntheticRun(options.path, *sizes).write())


if __name__ == "__main__":
    main()
