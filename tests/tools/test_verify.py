"""Verdicts of `slipstream verify`: exact, not exact or not observed, for given completions."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config.loading import load_config, load_verify_config
from slipstream.config.schema import Config
from slipstream.generators.vllm.requests import VllmRequest
from slipstream.model.images import image_processor
from slipstream.rollout import Completion, Sampling, VersionSpan, int32_array
from slipstream.runtime import run_directory
from slipstream.runtime.run_directory import scratch_directory
from slipstream.tools import verify as verification
from slipstream.tools.verify import (
    RAISE_TOKENS,
    PerturbingTrainer,
    Verdict,
    _for_local_engines,
    _longer,
    _verdict,
    _with_one_engine,
)
from tests.conftest import build_model, build_tokenizer
from tests.vision import save_vision_model


def of_b(prompt: int, *token_ids: int) -> Completion:
    spans = (VersionSpan(1, 0, len(token_ids)),)
    return Completion((prompt,), token_ids, (0.0,) * len(token_ids), spans, "length")


def test_if_no_token_of_a_is_left_a_and_b_must_answer_differently() -> None:
    """As under `retry`. If A and B give equal answers, a missing swap would not be detected."""
    completions = [of_b(5, 7, 8), of_b(6, 9, 9), of_b(5, 7, 8), of_b(6, 9, 9)]
    by_b = [c.token_ids for c in completions]
    same = _verdict(completions, [[int32_array([7, 8]), int32_array([9, 9])], by_b], pause_s=0.0, met=2)
    assert not same.exact and same.differ == 0 and same.before == (0, 0) and same.after == (4, 4)
    other = _verdict(completions, [[int32_array([7, 8]), int32_array([9, 3])], by_b], pause_s=0.0, met=2)
    assert other.exact and other.differ == 1 and other.before == (0, 0)


def test_a_precomputed_change_equals_a_computed_one_and_only_adds(tiny: Path, tmp_path: Path) -> None:
    config = load_config(None, [f"--model.path={tiny}", "--environment.name=addition", "--trainer.threads=1"])
    at_once, foreseen = (PerturbingTrainer(config, str(tmp_path)) for _ in range(2))

    def no_more(seed: int, strength: float) -> Iterator[torch.Tensor]:
        raise AssertionError(f"noise of seed {seed} is computed while sequences are in flight")

    asyncio.run(foreseen.precompute_change(3))
    foreseen._noise = no_more  # type: ignore[method-assign]
    before = {name: p.detach().clone() for name, p in foreseen._trainer.parameters.items()}
    for trainer in (at_once, foreseen):
        asyncio.run(trainer.change(3))
    for name, parameter in foreseen._trainer.parameters.items():
        assert torch.equal(parameter, at_once._trainer.parameters[name]) and not torch.equal(parameter, before[name])
    with pytest.raises(AssertionError):
        asyncio.run(foreseen.change(3))


def test_the_change_is_enlarged_if_a_and_b_give_equal_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[tuple[int, float]] = []

    async def attempt(config: object, prompts: int, tokens: int, after: int, strength: float) -> Verdict:
        tried.append((tokens, strength))
        return Verdict(2, 1, 1, int(strength >= needed), (1, 1), (2, 2), (9, 9), 0.0, ())

    monkeypatch.setattr(verification, "validate_models", lambda config: None)
    monkeypatch.setattr(verification, "_verify", attempt)
    config, needed = load_config(None, ["--model.path=m", "--environment.name=addition"]), 64
    assert asyncio.run(verification.verify(config)).exact and tried == [(64, 1), (64, 64)]
    assert capsys.readouterr().err == "A and B answer every prompt alike; once more with a larger change\n"
    needed = 1000
    assert asyncio.run(verification.verify(config)).unseen.endswith("give a trained model")


def test_no_prompt_or_continued_completion_has_an_images_placeholder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines refuse placeholders without an image, and a fresh engine is asked with the start of a completion."""
    save_vision_model(tmp_path, "Qwen2_5_VL")
    placeholder = image_processor(str(tmp_path)).placeholder  # type: ignore[union-attr]
    asked: list[tuple[list[list[int]], Sampling]] = []

    async def publish(_: Config, folder: Path, prompts: list[list[int]], sampling: Sampling, *more: Any) -> Any:
        asked.append((prompts, sampling))
        return [of_b(5, 7, 8)] * 2 * len(prompts), {"met": 1, "pause_s": 0.0}

    async def generate(_: Config, store: Path, spans: Any, sampling: Sampling) -> Any:
        assert sampling == asked[0][1]
        return [c.token_ids for c, _ in spans]

    monkeypatch.setattr(verification, "_publish_midway", publish)
    monkeypatch.setattr(verification, "_generate_fresh", generate)
    config = load_verify_config(str(tmp_path), ["--generator.engine=vllm"])
    asyncio.run(verification.verify(config, prompts=99, tokens=2, after=1))
    prompts, sampling = asked[0]
    assert placeholder in sampling.stop_tokens and not any(placeholder in prompt for prompt in prompts)


@pytest.mark.parametrize("fails", [True, False])
def test_logs_are_kept_after_an_error(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        with scratch_directory("verify") as folder:
            for name in ("A", "logs"):
                (folder / name).mkdir()
                (folder / name / "file").touch()
            if fails:
                raise OSError("see the log")
    except OSError:
        pass
    assert [str(path.relative_to(folder)) for path in folder.rglob("file")] == (["logs/file"] if fails else [])
    assert folder.exists() == fails


def test_directories_of_killed_commands_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(run_directory, "LOCKING_S", -1.0)
    killed = tmp_path / "slipstream-verify-killed"
    (killed / "A").mkdir(parents=True)
    (killed / "lock").touch()
    (kept := tmp_path / "slipstream-verify-kept" / "logs").mkdir(parents=True)
    with scratch_directory("verify") as used, scratch_directory("verify") as other:
        assert used.exists() and other.exists() and kept.exists() and not killed.exists()


def test_a_swap_without_sequences_in_flight_is_reported() -> None:
    config = load_config(None, ["--model.path=m", "--environment.name=addition", "--sync.in_flight=recompute"])
    whole = Completion((5,), (7, 8), (0.0, 0.0), (VersionSpan(0, 0, 2),), "length")
    parts = Completion((5,), (7, 8), (0.0, 0.0), (VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)), "length")
    by_b = of_b(5, 9, 9)
    ended = _verdict([whole, by_b], [[int32_array([7, 8])], [int32_array([9, 9])]], pause_s=0.0, met=1)
    met = _verdict([parts, by_b], [[int32_array([7])], [int32_array([8]), int32_array([9, 9])]], pause_s=0.0, met=1)
    wrong = _verdict([parts, by_b], [[int32_array([7])], [int32_array([4]), int32_array([9, 9])]], pause_s=0.0, met=1)
    for verdict in (ended, met, wrong):
        assert verdict.exact == (verdict is not wrong)  # where sequences may finish by A
    ended, met, wrong = (replace(verdict, how="recompute") for verdict in (ended, met, wrong))
    assert met.exact and met.describe(config).endswith(" EXACT")
    assert not wrong.exact and wrong.describe(config).endswith(" NOT EXACT")
    assert not ended.exact
    assert ended.describe(config).endswith("NOT SEEN: all that was in flight had ended at the swap: raise --tokens")
    assert replace(ended, longer=_longer([of_b(5, 7)], 2)).unseen.endswith("raise generator.max_model_len")


def test_completions_are_lengthened_until_one_is_in_flight_at_the_publish(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Verdict(2, 1, 1, 1, (1, 1), (2, 2), (9, 9), 0.0, ())
    over, wrong = replace(seen, met=0), tuple[str, ...]()
    tried: list[int] = []

    async def attempt(config: object, prompts: int, tokens: int, after: int, strength: float) -> Verdict:
        tried.append(tokens)
        return (
            seen if tokens == enough else replace(over, misses=wrong, longer=RAISE_TOKENS if tokens < long else "raise")
        )

    def lengths(**asked: int) -> list[int]:
        tried.clear()
        asyncio.run(verification.verify(config, **asked))
        return list(tried)

    monkeypatch.setattr(verification, "validate_models", lambda config: None)
    monkeypatch.setattr(verification, "_verify", attempt)
    config = load_config(None, ["--model.path=m", "--environment.name=addition"])
    enough, long = 256, 10_000
    assert lengths() == [64, 256] and lengths(tokens=30) == [30]
    assert capsys.readouterr().err == "nothing was in flight at the publish; once more with 256 tokens\n"
    enough, long = 10_000, 256  # by then all end by themselves
    assert lengths() == [64, 256]
    enough = long = 10_000
    assert lengths() == [64, 256, 1024] and lengths(after=100) == [256, 1024] and lengths(after=2000) == [3024]
    wrong = ("in flight, by A: at token 3 of 9",)
    assert lengths() == [64], "a wrong token is reported without another try"


def test_a_small_context_and_an_automatic_link_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sampling.max_tokens` of training, 128 by default, is no limit of this command."""
    build_model(max_position_embeddings=100).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)

    async def attempt(config: Config, *_: object) -> Verdict:
        return Verdict(2, 1, 1, 1, (1, 1), (2, 2), (9, 9), 0.0, (), link=config.sync.link)

    monkeypatch.setattr(verification, "_verify", attempt)
    config = load_verify_config(str(tmp_path), [])
    assert config.sync.link == "auto" and config.sampling.max_tokens > 100
    said = asyncio.run(verification.verify(config)).describe(config)
    assert "\nlink           shared, in flight: recompute\n" in said and said.endswith(" EXACT")


def test_one_engine_of_a_single_copy_has_one_trainer_rank() -> None:
    config = load_config(
        None,
        [
            "--model.path=m", "--environment.name=addition", "--generator.engine=vllm", "--sync.link=single_copy",
            "--generator.replicas=2", "--trainer.ranks=2", "--trainer.parallel=ddp", "--trainer.learning_rate=2e-6",
            "--trainer.context_parallel=2", "--generator.min_replicas=2",
        ],
    )  # fmt: skip
    one = _with_one_engine(config)
    assert (one.generator.replicas, one.trainer.ranks, one.trainer.learning_rate) == (1, 1, 2e-6)


@pytest.mark.parametrize(("rank", "link"), [(0, "shared"), (4, "lora")])
def test_engines_to_compare_with_servers_get_weights_by_a_link_of_this_host(rank: int, link: str) -> None:
    config = load_config(
        None,
        [
            "--model.path=m", "--environment.name=addition", "--generator.engine=vllm", f"--lora.rank={rank}",
            "--generator.servers=['http://far:1','http://far:2']",
        ],
    )  # fmt: skip
    local = _for_local_engines(config)
    assert (local.generator.servers, local.generator.replicas, local.sync.link) == ([], 1, link)


def test_the_message_names_the_option_that_allows_longer_completions() -> None:
    assert _longer([of_b(5, 7, 8)], 2) == RAISE_TOKENS
    assert _longer([of_b(5, 7, 8)], 3) == "raise generator.max_model_len"


def test_a_retry_is_detected_by_its_discarded_tokens() -> None:
    """Without discarded tokens all sequences may have ended before the swap."""
    by_a = Completion((5,), (7, 9), (0.0, 0.0), (VersionSpan(0, 0, 2),), "length")
    by_b = of_b(5, 7, 8)
    ended = replace(
        _verdict([by_a, by_b], [[int32_array([7, 9])], [int32_array([7, 8])]], pause_s=0.0, met=1), how="retry"
    )
    assert not ended.exact and replace(ended, tokens_discarded=3).exact
    # No token of A is left, although a sequence had sampled tokens before the publish began.
    gone = replace(
        _verdict([by_b, by_b], [[int32_array([7, 9])], [int32_array([7, 8]), int32_array([7, 8])]], pause_s=0.0, met=1),
        how="retry",
    )
    assert gone.exact


def test_vllm_samples_past_the_end_of_sequence_token_if_asked() -> None:
    for ignored, stops in ((False, [7, 9]), (True, [9])):
        sampling = Sampling(stop_tokens=(9,), ignore_eos=ignored)
        assert VllmRequest("key", (1,), sampling).parameters(10, [7], False)["stop_token_ids"] == stops
