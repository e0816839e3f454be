"""`slipstream verify` with real trainers and engines: EXACT for exact links and modes, a failure for all others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from tests.conftest import VOCABULARY, build_model, build_tokenizer
from tests.e2e.test_runs import slipstream

TWO_ENGINES = ["--generator.replicas=2"]
FP8 = ["--generator.engine=vllm", "--generator.engine_args.quantization=fp8_per_channel", "--model.dtype=bfloat16"]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def save_ending_model(path: Path, vocabulary: int) -> Path:
    """A model all of whose tokens are end-of-sequence tokens."""
    sizes: dict[str, Any] = {"head_dim": 32, "max_position_embeddings": 2048, "vocab_size": vocabulary}
    build_model(**sizes, eos_token_id=[*range(vocabulary)]).save_pretrained(path)
    build_tokenizer(vocabulary).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ending_model(tmp_path_factory.mktemp("verify") / "model", VOCABULARY)


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 16 tokens, fewer than vLLM's kernels for adapters compute at a time."""
    return save_ending_model(tmp_path_factory.mktemp("verify") / "small", 16)


@pytest.mark.e2e
def test_the_command_prints_exact(model: Path) -> None:
    done = slipstream("verify", model)
    assert "\nlink           shared, in flight: recompute\n" in done.stdout, 'which sync.link = "auto" resolves to'
    assert done.stdout.strip().endswith("EXACT") and "NOT EXACT" not in done.stdout


@pytest.mark.e2e
def test_the_change_is_enlarged_for_a_model_that_repeats_its_last_token(tmp_path: Path) -> None:
    """As an untrained model with tied embeddings does."""
    model = build_model(hidden_size=128, eos_token_id=1, pad_token_id=0)
    for name, parameter in model.named_parameters():  # undo the scaling by `build_model`
        if parameter.ndim > 1:
            parameter.data.mul_(1 / 8 if "embed" in name else 1 / 4)
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    done = slipstream("verify", tmp_path, "--sync.link=shared")
    assert done.stderr == "A and B answer every prompt alike; once more with a larger change\n"
    assert done.stdout.endswith(" EXACT\n") and "NOT" not in done.stdout


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        pytest.param(["--generator.engine=vllm", "--sync.link=nccl", "--tokens=300"], 0, "EXACT", marks=needs_vllm),
        pytest.param([*FP8, "--sync.verify=full", "--prompts=4", "--tokens=200"], 0, "EXACT", marks=needs_vllm),
        pytest.param(
            [
                "--generator.engine=vllm",
                "--generator.engine_args.pipeline_parallel_size=2",
                "--sync.link=nccl",
                "--tokens=200",
            ],
            0,
            "tensor parallel 1, pipeline parallel 2, float32",
            marks=[needs_vllm, pytest.mark.slow, pytest.mark.timeout(600)],  # imports vLLM in nine processes
        ),
        pytest.param(
            [
                "--generator.engine=vllm",
                "--sync.link=checkpoint",
                "--sync.restart=true",
                "--sync.in_flight=retry",
                "--tokens=300",
            ],
            0,
            "EXACT",
            marks=needs_vllm,
        ),
        (["--sync.placement=colocated", "--generator.threads=1"], 0, "EXACT"),
        ([*TWO_ENGINES, "--sync.placement=colocated", "--trainer.ranks=2", "--tokens=300"], 0, "EXACT"),
        pytest.param(
            [*TWO_ENGINES, "--generator.engine=vllm", "--sync.placement=colocated", "--trainer.ranks=2"],
            0,
            "EXACT",
            marks=needs_vllm,
        ),
        ([*TWO_ENGINES, "--sync.in_flight=retry"], 0, "tokens were discarded"),
        *(([*TWO_ENGINES, f"--sync.link={link}"], 0, "EXACT") for link in ("shared", "checkpoint", "nccl", "delta")),
        pytest.param(
            [*TWO_ENGINES, "--generator.engine=vllm", "--sync.link=lora", "--lora.rank=8", "--trainer.ranks=2"],
            0,
            "EXACT",
            marks=needs_vllm,
        ),
        (["--lora.rank=8", "--trainer.ranks=2", "--trainer.parallel=ddp"], 0, "EXACT"),
        (["--sync.link=checkpoint", "--sync.in_flight=continue", "--tokens=200"], 1, "NOT EXACT"),
        (["--tokens", "4", "--after", "400"], 1, "NOT SEEN: nothing was in flight at the publish: raise --tokens"),
        (["--tokens", "0"], 2, "--tokens 0 --after 16 compares nothing"),
        (["--generator.max_model_len=6", "--sampling.max_tokens=1"], 1, "slipstream: "),
    ],
)
def test_verify(flags: list[str], status: int, said: str, request: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """With `continue`, sequences keep the keys of old weights, which differs from a fresh engine: the command fails."""
    model = request.getfixturevalue("small_vocabulary" if "--sync.link=lora" in flags else "model")
    found = main(["verify", str(model), *flags])
    shown = capfd.readouterr()
    if not status and "NOT SEEN" in shown.out + shown.err:  # a busy host may publish after the last token
        found = main(["verify", str(model), *flags, "--tokens=1000"])
        shown = capfd.readouterr()
    assert found == status, shown.out + shown.err
    assert said in shown.out + shown.err and "Traceback" not in shown.err
    assert shown.out.rstrip().endswith(" EXACT") == (not status or "NOT EXACT" in said)
