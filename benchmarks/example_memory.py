"""Memory and time of `examples/gsm8k.toml` on a CPU: the peak over all processes of the run, and seconds by phase.

    python benchmarks/example_memory.py [--model models/gemma-3-270m] [--json FILE] [flags]

Memory is the sum of the proportional set sizes (PSS) of the command and its descendants, sampled ten times a second: a
page that several processes share counts once. Needs Linux.

Without `--model` the model has the shape of Gemma 3 270M, random float32 weights, and a tokenizer of as many tokens.
Its completions never earn the example's reward, and groups without signal cost no forward pass of the trainer, so
rewards are pseudo-random then.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast
from work import conditions, reward

from slipstream.environments.base import Policy, Task
from slipstream.environments.gsm8k import Gsm8k
from slipstream.rollout import Rollout

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
EXAMPLE = ROOT / "examples" / "gsm8k.toml"
INTERVAL_S = 0.1
SPECIAL = ["<pad>", "<eos>", "<bos>"]  # tokens 0, 1 and 2, as in Gemma
VOCABULARY, TRAINED = 262144, 8192


class RandomRewards(Gsm8k):
    """GSM8K with pseudo-random rewards, for a model that can't earn any."""

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        rollout = await super().rollout(task, policy)
        return policy.rollout(reward(rollout.completions[-1].token_ids))


def save_model(path: Path) -> None:
    """A model of Gemma 3 270M's shape with random weights, and its tokenizer."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512, pad_token_id=0, eos_token_id=1, bos_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).save_pretrained(path)
    names = dict(zip(("pad_token", "eos_token", "bos_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(), **names).save_pretrained(path)


def build_tokenizer() -> Tokenizer:
    """A BPE tokenizer trained on the example's problems, filled up with pairs of its rarest tokens.

    The filling gives it the memory of a large vocabulary, and changes the tokens of few texts.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(ROOT / "examples" / "data" / "gsm8k" / "train.jsonl")], trainer)
    described = json.loads(tokenizer.to_str())
    vocabulary, merges = described["model"]["vocab"], described["model"]["merges"]
    rarest = sorted(vocabulary, key=vocabulary.__getitem__)[-1024:]
    for first, second in itertools.product(rarest, rarest):
        if len(vocabulary) < VOCABULARY and first + second not in vocabulary:
            vocabulary[first + second] = len(vocabulary)
            merges.append([first, second])
    return Tokenizer.from_str(json.dumps(described))


def tree(root: int) -> list[int]:
    """A process and its descendants."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def pss_bytes(processes: list[int]) -> int:
    """Sum of the proportional set sizes; processes that have ended count as 0."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def measure(command: list[str]) -> dict[str, float]:
    """Run the command to its end. Returns its peak memory and seconds. Raises `CalledProcessError` if it fails."""
    peak, began = 0, time.monotonic()
    with subprocess.Popen(command, cwd=ROOT) as process:
        while process.poll() is None:
            peak = max(peak, pss_bytes(tree(process.pid)))
            time.sleep(INTERVAL_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"peak_gib": peak / 2**30, "seconds": time.monotonic() - began}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", type=Path, help="model directory (default: random weights of Gemma 3 270M's shape)")
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options, flags = parser().parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        own = [f"--run.dir={run}", f"--model.path={options.model or Path(folder) / 'model'}"]
        if not options.model:
            save_model(Path(folder) / "model")
            own += [f"--environment.name={HERE}:RandomRewards"]
        command = [sys.executable, "-m", "slipstream", "train", str(EXAMPLE), "--quiet", *own, *flags]
        found = measure(command)
        summary = json.loads((run / "summary.json").read_text())
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    model = str(options.model or "random weights of Gemma 3 270M's shape")
    described = {"model": model, **found, "steps": summary["steps"], "tokens_trained": summary["tokens_trained"]}
    described["groups_with_signal"] = [line["reward/frac_groups_with_signal"] for line in metrics]
    print(f"{found['peak_gib']:.2f} GiB for all processes, {found['seconds']:.0f} s for {summary['steps']} steps")
    if options.json:
        options.json.write_text(json.dumps({**conditions(), **described}, indent=1) + "\n")


if __name__ == "__main__":
    main()
