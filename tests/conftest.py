"""Tiny models, built from a configuration in memory: no test needs a network."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("SLIPSTREAM_TEST_GPU"):  # most tests are of what a run does without any
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from hypothesis import settings

from slipstream.generators.pool import GeneratorPool
from slipstream.rollout import Completion, Sampling
from tests import warm

settings.register_profile("slipstream", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("slipstream")
torch.set_num_threads(1)

# The files that take longest, which workers are given first: the short ones fill up what time is left. Files that
# compute and files that wait alternate.
LONG = (
    "generators/vllm/test_remote_servers.py", "runtime/test_ray_ends.py", "e2e/test_runs.py", "runtime/test_ray.py",
    "generators/vllm/test_engine.py", "runtime/test_faults.py", "generators/vllm/test_servers.py", "e2e/test_verify.py",
    "generators/vllm/test_pipeline.py",
    "trainers/test_parallel_options.py", "e2e/test_two_hosts.py", "test_families.py", "runtime/test_ray_heal.py",
    "e2e/test_study.py", "runtime/test_node_network.py", "e2e/test_policies.py", "e2e/test_trainer_restart.py",
    "sync/test_hosts.py", "runtime/test_hung.py", "controller/test_engine_supervisor.py", "e2e/test_control.py",
    "trainers/test_trainer.py", "e2e/test_systems.py", "trainers/test_parallel.py", "controller/test_colocation.py",
    "generators/test_interruption.py", "controller/test_staggered_publisher.py", "generators/vllm/test_lora.py",
    "e2e/test_images.py", "e2e/test_scoring.py", "controller/test_engine_restart.py",
    "environments/test_sandbox.py", "observe/test_estimates.py", "trainers/test_step_objective.py",
    "e2e/test_several_environments.py",
)  # fmt: skip
VOCABULARY = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES = ("qwen3", "llama", "gemma3", "qwen3_moe")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.as_posix().rpartition("/tests/")[2]
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=place)


def _require_libraries(report: Any) -> Any:
    """Turn a skip for a missing library into a failure if SLIPSTREAM_TEST_LIBRARIES is "required", as in CI."""
    if report.skipped and os.environ.get("SLIPSTREAM_TEST_LIBRARIES") == "required":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if "could not import" in reason or "is not installed" in reason:
            report.outcome = "failed"
            report.longrepr = f"{reason}; every library has to be there with SLIPSTREAM_TEST_LIBRARIES=required"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    return _require_libraries((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Any:
    return _require_libraries((yield))


crashed: set[str] = set()  # tests in which a process of pytest-xdist died


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "???":  # what pytest-xdist reports for it
        crashed.add(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave crashed tests to `--last-failed`: pytest-xdist runs them again, and a pass there would remove them."""
    if crashed and session.config.cache:
        failed = session.config.cache.get("cache/lastfailed", {})
        session.config.cache.set("cache/lastfailed", failed | dict.fromkeys(crashed, True))


@pytest.fixture(autouse=True, scope="session")
def warm_servers(request: pytest.FixtureRequest) -> None:
    """Start fork servers before all tests, since some tests search for leftover processes."""
    warm.server_of("")
    if any("vllm" in item.nodeid for item in request.session.items):
        warm.server_of("vllm")


@pytest.fixture(autouse=True)
def warm_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork generators and trainers from a process that has imported their libraries."""
    monkeypatch.setattr("slipstream.runtime.process.LocalProcess._start", staticmethod(warm.start))


def build_model(family: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    """A random model of a family; weights are scaled up so that distributions are far from uniform."""
    import transformers as t

    torch.manual_seed(seed)
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config, {"tie_word_embeddings": True}),
        "llama": (t.LlamaForCausalLM, t.LlamaConfig, {"tie_word_embeddings": False}),
        "gemma3": (
            t.Gemma3ForCausalLM,
            t.Gemma3TextConfig,
            {"sliding_window": 7, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        ),
        "qwen3_moe": (
            t.Qwen3MoeForCausalLM,
            t.Qwen3MoeConfig,
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        ),
        "mixtral": (t.MixtralForCausalLM, t.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
        "olmoe": (t.OlmoeForCausalLM, t.OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    }
    model_class, config_class, more = kinds[family]
    model = model_class(config_class(**(COMMON | more | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0 if "embed" not in name and "lm_head" not in name else 8.0)
    return model.eval()


def build_tokenizer(most: int = VOCABULARY) -> Any:
    """One token a character, `most` in all, with `<pad>` 0 and `<eos>` 1."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "<eos>", *"0123456789+= .", *"abcdefghijklmnopqrstuvwxyz"][:most]
    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def save_model(path: Path, **changes: Any) -> None:
    """A model that ends completions at `<eos>`, with its tokenizer, as a run loads them."""
    build_model(eos_token_id=1, pad_token_id=0, **changes).save_pretrained(path)
    build_tokenizer().save_pretrained(path)


async def in_flight(
    pool: GeneratorPool, prompts: Sequence[Sequence[int]], sampling: Sampling, tokens: int = 10
) -> list[asyncio.Task[Completion]]:
    """Sequences in flight, one of which has sampled `tokens`. Starts again if all ended before they were checked."""
    running: list[asyncio.Task[Completion]] = []
    while not running or await pool.longest_in_flight() < tokens:
        if all(one.done() for one in running):
            await asyncio.gather(*running)  # raises what they raised
            running = [asyncio.create_task(pool.generate(prompt, sampling)) for prompt in prompts]
        await asyncio.sleep(0.001)
    return running


async def drawn_until(
    done: asyncio.Future[Any], pool: GeneratorPool, prompts: Sequence[Sequence[int]], longest: int
) -> list[Completion]:
    """Sample completions of each prompt repeatedly until `done` is done, so that one is in flight when it happens:
    completions of different prompts end at different times."""

    async def on_and_on(prompt: Sequence[int], sampling: Sampling) -> list[Completion]:
        drawn = []
        while not done.done():
            drawn.append(await pool.generate(prompt, sampling))
        return drawn

    lengths = [Sampling(max_tokens=longest - 7 * i) for i in range(len(prompts))]
    return list(itertools.chain(*await asyncio.gather(*map(on_and_on, prompts, lengths))))


def run_kernel_cases(program: Path, interpret: bool = True) -> None:
    """Run a program with Triton kernels, by default interpreted on this CPU; it prints that all cases are equal."""
    environment = os.environ | {"TRITON_INTERPRET": str(int(interpret))}
    ended = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "all cases are equal\n"), ended.stderr


def random_prompts(count: int, seed: int = 0, longest: int = 24) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model and tokenizer of 16 symbols, as a run loads it."""
    path = tmp_path_factory.mktemp("tiny")
    save_model(path, vocab_size=len(build_tokenizer()))
    return path


@pytest.fixture(scope="session")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an end-of-sequence token, whose sequences stay in flight up to their limit."""
    path = tmp_path_factory.mktemp("patient")
    build_model(head_dim=32, max_position_embeddings=2048).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path
