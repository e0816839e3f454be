"""The embedded engine: records of every token stay exact while requests arrive, end or see a weight swap."""

from __future__ import annotations

import asyncio
import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.generators.base import ContextFull, EngineFailed, GenerationError
from slipstream.generators.torch.engine import Engine
from slipstream.generators.torch.generator import TorchGenerator
from slipstream.generators.torch.sampling import BLOCK, Sampler
from slipstream.model.inspection import find_routers
from slipstream.rollout import Completion, Sampling
from tests.conftest import FAMILIES, build_model, build_tokenizer, random_prompts

BOUND = 1e-5


def drain(engine: Engine) -> dict[Any, Completion]:
    finished = {}
    while engine.busy:
        finished |= dict(engine.step())
    return finished


def test_too_many_sequences_for_the_memory_name_the_option() -> None:
    engine = Engine(build_model(), slots=10**12)
    engine.submit(0, (5, 6), Sampling(max_tokens=6))
    with pytest.raises(
        GenerationError, match=r"^keys and values of 1\d+ sequences .*; lower generator.max_num_seqs = 1"
    ):
        engine.step()


def test_a_request_without_a_distribution_fails_alone() -> None:
    """NaN in the weights of one token fails its request; other requests and the next one in its slot are unaffected."""
    model = build_model("llama", vocab_size=8 * BLOCK + 97)
    prompts = [(5, 6, 8, 9, 11), (3,), (2, 12)]
    whole = Engine(model, slots=4)
    for key, prompt in enumerate(prompts):
        whole.submit(key, prompt, Sampling(max_tokens=6, seed=key))
    expected = drain(whole)
    assert all(7 not in completion.token_ids for completion in expected.values())
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    engine = Engine(model, slots=4)
    failing = ("sampled", (7,), Sampling(max_tokens=6)), ("greedy", (4, 7, 4), Sampling(temperature=0))
    for turn in range(2):  # the second round reuses the slots of the first
        for key, prompt, sampling in failing:
            engine.submit((key, turn), prompt, sampling)
        for key, prompt in enumerate(prompts):
            engine.submit(key, prompt, Sampling(max_tokens=6, seed=key))
        outcomes = drain(engine)
        for key, *_ in failing:
            with pytest.raises(GenerationError, match="logits are not finite at token 1 of the completion"):
                raise outcomes[key, turn]
        for key, completion in expected.items():
            assert outcomes[key].token_ids == completion.token_ids
            assert outcomes[key].logprobs == pytest.approx(completion.logprobs, abs=BOUND)


@pytest.mark.parametrize("logits", [[torch.nan, 0.0, 0.0], [torch.inf, 0.0, 0.0], [-torch.inf] * 3])
@pytest.mark.parametrize("changes", [{}, {"temperature": 0}, {"temperature": 0.5, "top_k": 2, "top_p": 0.9}])
@pytest.mark.parametrize("vocabulary", [3, 20 * BLOCK + 17])
def test_invalid_logits_give_a_nan_log_probability(
    logits: list[float], changes: dict[str, Any], vocabulary: int
) -> None:
    rows = torch.zeros(2, vocabulary)
    rows[0, :3] = torch.tensor(logits)
    if logits[0] == -torch.inf:
        rows[0] = -torch.inf
    drawn = Sampler([Sampling(**changes)] * 2, rows.device).sample(rows, np.zeros(2, dtype=np.uint64))
    assert [math.isfinite(logprob) for logprob in drawn.logprobs] == [False, True]
    assert all(0 <= token < vocabulary for token in drawn.tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": value} for value in (1e-320, 1e-40, 0.009, 101, 1e308, 2**70, math.nan, math.inf, -1, "1")
    ] + [{"top_k": 2**70}, {"top_k": -1}, {"top_p": 0}, {"top_p": math.nan}, {"max_tokens": 0},
     {"stop_tokens": (2**70,)}, {"stop_strings": "END"}, {"stop_strings": ("",)},
     {"stop_strings": ("x" * 1001,)}, {"stop_strings": ("x",) * 65}],
)  # fmt: skip
def test_invalid_sampling_parameters_are_refused_at_construction(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=rf"^{name} = [^\n]* must be [^\n]*$"):
        Sampling(**changes)
    if name in ("temperature", "top_k", "top_p", "max_tokens") and isinstance(changes[name], float | int):
        with pytest.raises(ConfigError, match=rf"sampling\.{name}"):
            load_config(None, ["--model.path=m", "--environment.name=e", f"--sampling.{name}={changes[name]}"])


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0}, {"temperature": 0.01}, {"temperature": 100}, {"seed": -(2**80)}, {"top_k": 2**31 - 1},
     {"top_p": 1e-320}, {"max_tokens": 2**70}],
)  # fmt: skip
def test_sampling_works_at_the_bounds_of_its_parameters(changes: dict[str, Any]) -> None:
    engine = Engine(build_model(), slots=1, context=20)
    engine.submit(0, (3, 4), Sampling(**changes))
    (completion,) = drain(engine).values()
    assert all(map(math.isfinite, completion.logprobs)) and len(completion.token_ids) == 18


STOPS = ["🙂🙃", "終わり", "</answer>", "é", "🏁" * 20]


@pytest.mark.parametrize("kind", ["bytes in a run", "bytes alone"])
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("before", ["", "a", "€€", "🙂"])
def test_a_stop_string_is_found_where_every_token_is_a_byte(kind: str, stop: str, before: str) -> None:
    """The completion ends at the last byte of the stop string."""
    tokenizer = byte_tokenizer(kind)
    engine = Engine(build_model(vocab_size=len(tokenizer)), tokenizer=tokenizer)
    ids = tokenizer.encode(before + stop)
    assert len(ids) == len((before + stop).encode())
    engine.submit(0, (3,), Sampling(max_tokens=200, stop_strings=(stop, "never said")))
    sequence = engine._queue[0]
    for token in ids[:-1]:
        sequence.tokens.append(token)
        assert not engine._stops(sequence)
    sequence.tokens.append(ids[-1])
    assert engine._stops(sequence)


def byte_tokenizer(kind: str) -> Any:
    """One token a byte, decoded as Llama's tokenizers do (a run of bytes as one) or as GPT-2's do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if kind == "bytes in a run":
        vocabulary = {"<unk>": 256} | {f"<0x{i:02X}>": i for i in range(256)}
        tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    else:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(alphabet))}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def reference_logits(model: Any, completion: Completion) -> torch.Tensor:
    """Logits of a full forward pass for each completion token, by transformers' own attention, in float64."""
    ids = torch.tensor([completion.prompt_ids + completion.token_ids[:-1]])
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    if find_routers(model):
        model.set_experts_implementation("eager")  # grouped matrix products have no float64
    with torch.no_grad():
        return model(ids).logits[0, len(completion.prompt_ids) - 1 :] / (completion.temperature or 1)


def kept_by_hand(logits: torch.Tensor, top_k: int, top_p: float) -> set[int]:
    """The tokens that top-k, then top-p, keep: a slow reference implementation."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i].item())[: top_k or len(logits)]
    probabilities = torch.softmax(logits[order], 0).tolist()
    kept, mass = set(), 0.0
    for token, probability in zip(order, probabilities, strict=True):
        kept.add(token)
        mass += probability
        if mass >= top_p:
            break
    return kept if top_p < 1 else set(order)


def assert_true(completion: Completion, sampling: Sampling, models: dict[int, Any]) -> None:
    """Recorded log-probabilities and kept tokens against full forward passes by the tagged versions' weights."""
    assert completion.spans[0].start == 0 and completion.spans[-1].end == len(completion.token_ids)
    for version, start, end in completion.spans:
        logits = reference_logits(models[version], completion)
        for i in range(start, end):
            token = completion.token_ids[i]
            if sampling.temperature == 0:
                assert token == logits[i].argmax() and completion.logprobs[i] == 0.0
                continue
            kept = kept_by_hand(logits[i], sampling.top_k, sampling.top_p)
            if completion.sampling_mask is not None:
                assert set(completion.sampling_mask[i].tolist()) == kept
            masked = torch.full_like(logits[i], -torch.inf)
            masked[list(kept)] = logits[i][list(kept)]
            assert abs(masked.log_softmax(-1)[token].item() - completion.logprobs[i]) < BOUND


OPTIONS = ("temperature", "top_k", "top_p", "record_sampling_mask")
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0.6),
    Sampling(top_k=5, record_sampling_mask=True),
    Sampling(top_p=0.8, record_sampling_mask=True),
    Sampling(temperature=1.7, top_k=20, top_p=0.9, record_sampling_mask=True),
]


def requests(count: int, seed: int = 0) -> list[tuple[list[int], Sampling]]:
    """Prompts of all lengths, some of them equal, with all sampling options mixed."""
    rng = random.Random(seed)
    prompts = random_prompts(count, seed)
    prompts[3:6] = [prompts[2]] * 3
    prompts[9] = [prompts[9][0]]
    return [
        (prompt, Sampling(**{
            **{k: getattr(SAMPLINGS[i % len(SAMPLINGS)], k) for k in OPTIONS},
            "max_tokens": rng.randint(1, 40), "seed": i,
        }))
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


@pytest.mark.parametrize("family", [*FAMILIES, "mixtral", "olmoe"])
def test_log_probabilities_and_versions_are_exact(family: str) -> None:
    model = build_model(family)
    engine = Engine(copy.deepcopy(model), slots=5)
    asked = requests(24)
    for key, (prompt, sampling) in enumerate(asked):
        engine.submit(key, prompt, sampling)
    finished = drain(engine)
    assert len(finished) == len(asked)
    for key, completion in finished.items():
        assert list(completion.prompt_ids) == list(asked[key][0])
        assert len(completion.token_ids) == asked[key][1].max_tokens and completion.finish_reason == "length"
        assert_true(completion, asked[key][1], {0: model})


@pytest.mark.parametrize(("family", "large_head"), [("qwen3", 2**24), ("gemma3", 2**24), ("gemma3", 1)])
def test_log_probabilities_stay_exact_across_swaps(
    family: str, large_head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are swapped every few tokens. The first span is checked against a full pass; since a sequence keeps its
    old keys and values, the tokens after a swap are replayed with a cache that mixes versions in the same way."""
    monkeypatch.setattr("slipstream.model.logprobs.LARGE_HEAD", large_head)
    models = {version: build_model(family, seed=version) for version in range(4)}
    engine = Engine(copy.deepcopy(models[0]), slots=6)
    asked = requests(18, seed=5)
    for key, (prompt, sampling) in enumerate(asked):
        engine.submit(key, prompt, sampling)
    finished, steps, swapped_at = {}, 0, {}
    while engine.busy:
        finished |= dict(engine.step())
        steps += 1
        if steps % 7 == 0 and engine.version < 3:
            version = engine.version + 1
            engine.swap(version, lambda v=version: engine.model.load_state_dict(models[v].state_dict()))
            swapped_at[version] = steps
    assert set(swapped_at) == {1, 2, 3}
    assert any(len(c.spans) >= 3 for c in finished.values())
    for key, completion in finished.items():
        replayed = replay(models, completion)
        for i, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            sampling = asked[key][1]
            logits = replayed[i] / (sampling.temperature or 1)
            if sampling.temperature == 0:
                assert token == logits.argmax()
                continue
            kept = list(kept_by_hand(logits, sampling.top_k, sampling.top_p))
            assert abs((logits[token] - logits[kept].logsumexp(0)).item() - logprob) < BOUND


def replay(models: dict[int, Any], completion: Completion) -> list[torch.Tensor]:
    """Logits of every token, by the weights of its tagged version on the cache computed by earlier versions."""
    from transformers import DynamicCache

    versions = [v for v, start, end in completion.spans for _ in range(start, end)]
    cache, ids, results = DynamicCache(), torch.tensor([completion.prompt_ids]), []
    replayed = {v: copy.deepcopy(models[v]) for v in set(versions)}
    for model in replayed.values():
        model.set_attn_implementation("eager")
    with torch.no_grad():
        for i, version in enumerate(versions):
            results.append(replayed[version](ids, past_key_values=cache, use_cache=True).logits[0, -1])
            ids = torch.tensor([[completion.token_ids[i]]])
    return results


def test_a_failed_swap_leaves_the_old_version() -> None:
    engine = Engine(build_model(), slots=2)

    def broken() -> None:
        raise OSError("file is gone")

    with pytest.raises(OSError, match="gone"):
        engine.swap(1, broken)
    assert engine.version == 0


def test_completions_do_not_depend_on_other_requests() -> None:
    """A request's tokens are a function of weights, prompt and seed: alone, in a batch, or in another order."""
    asked = requests(16, seed=2)
    alone = {}
    for key, (prompt, sampling) in enumerate(asked):
        engine = Engine(build_model(), slots=1)
        engine.submit(key, prompt, sampling)
        alone |= drain(engine)
    for slots in (3, 16):
        crowd = Engine(build_model(), slots=slots)
        for key in reversed(range(len(asked))):
            crowd.submit(key, *asked[key])
        together = drain(crowd)
        assert {k: c.token_ids for k, c in together.items()} == {k: c.token_ids for k, c in alone.items()}


def test_samples_of_different_seeds_follow_the_distribution() -> None:
    """4,000 first tokens against the model's own probabilities (chi-squared; a correct sampler passes in 99.9 %)."""
    model = build_model(vocab_size=8)
    engine = Engine(copy.deepcopy(model), slots=500)
    for seed in range(4000):
        engine.submit(seed, [1, 2, 3], Sampling(max_tokens=1, seed=seed))
    counts = torch.zeros(8)
    for completion in drain(engine).values():
        counts[completion.token_ids[0]] += 1
    with torch.no_grad():
        expected = 4000 * model(torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_completions_end_at_stop_tokens_stop_strings_and_the_context_limit() -> None:
    tokenizer = build_tokenizer()
    model = build_model(vocab_size=len(tokenizer), eos_token_id=1)
    free = Engine(copy.deepcopy(model), slots=4, tokenizer=tokenizer)
    free._eos = frozenset()
    free.submit("free", [5, 6, 7], Sampling(max_tokens=60, seed=1))
    tokens = drain(free)["free"].token_ids
    text = tokenizer.decode(tokens)

    engine = Engine(copy.deepcopy(model), slots=4, tokenizer=tokenizer, context=40)
    engine._eos = frozenset()
    engine.submit("token", [5, 6, 7], Sampling(max_tokens=60, seed=1, stop_tokens=(tokens[9],)))
    engine.submit("string", [5, 6, 7], Sampling(max_tokens=60, seed=1, stop_strings=(text[10:13],)))
    engine.submit("context", [5, 6, 7], Sampling(max_tokens=60, seed=1))
    done = drain(engine)
    end = tokens.index(tokens[9]) + 1
    assert done["token"].token_ids == tokens[:end] and done["token"].finish_reason == "stop"
    end = text.index(text[10:13]) + 3
    assert done["string"].token_ids == tokens[:end] and done["string"].finish_reason == "stop"
    assert done["context"].token_ids == tokens[:37] and done["context"].finish_reason == "length"

    eos = Engine(copy.deepcopy(model), slots=4, tokenizer=tokenizer)
    for seed in range(40):
        eos.submit(seed, [5, 6, 7], Sampling(max_tokens=60, seed=seed))
    drawn = drain(eos)
    stopped = [c for c in drawn.values() if c.finish_reason == "stop"]
    stopped_seed = next(seed for seed, c in drawn.items() if c is stopped[0])
    assert stopped and all(c.token_ids[-1] == 1 and 1 not in c.token_ids[:-1] for c in stopped)
    eos.submit("on", [5, 6, 7], Sampling(max_tokens=60, seed=stopped_seed, ignore_eos=True))
    [(_, whole)] = drain(eos).items()
    assert whole.finish_reason == "length" and whole.token_ids[: len(stopped[0].token_ids)] == stopped[0].token_ids


def test_aborted_requests_free_their_slot_and_return_nothing() -> None:
    engine = Engine(build_model(), slots=2)
    for key in range(4):
        engine.submit(key, [5, 6, 7], Sampling(max_tokens=30, seed=key))
    engine.step()
    engine.abort(0)
    engine.abort(3)
    engine.abort("unknown")
    assert set(drain(engine)) == {1, 2}
    assert not engine.busy


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_recorded_experts_are_those_the_model_chose(family: str) -> None:
    model = build_model(family)
    engine = Engine(copy.deepcopy(model), slots=3)
    prompts = [[5, 6, 7, 8], [5, 6, 7, 8], [9], *random_prompts(5)]
    for key, prompt in enumerate(prompts):
        engine.submit(key, prompt, Sampling(max_tokens=12, seed=key, record_routing=True))
    for completion in drain(engine).values():
        ids = torch.tensor([completion.prompt_ids + completion.token_ids[:-1]])
        chosen: list[torch.Tensor] = []
        gates = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        hooks = [g.register_forward_hook(lambda _m, _i, out, to=chosen: to.append(out[-1])) for g in gates]
        with torch.no_grad():
            model(ids)
        for hook in hooks:
            hook.remove()
        assert completion.experts.shape == (ids.shape[1], 3, 2)
        assert (torch.stack(chosen, 1).sort(-1).values.numpy() == np.sort(completion.experts)).all()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_unsupported_models_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    from types import SimpleNamespace

    from slipstream.generators.torch.engine import validate_supported

    with pytest.raises(GenerationError, match=named):
        validate_supported(SimpleNamespace(**config))
    with pytest.raises(GenerationError, match=r'set generator.engine = "vllm"'):
        validate_supported(SimpleNamespace(**config))


def test_bad_requests_are_refused() -> None:
    engine = Engine(build_model(), slots=2, context=8)
    with pytest.raises(GenerationError, match="empty"):
        engine.submit(0, [], Sampling())
    with pytest.raises(ContextFull, match="8 tokens, but prompt and completion share a context of 8"):
        engine.submit(0, [1] * 8, Sampling())
    with pytest.raises(GenerationError, match="no experts"):
        engine.submit(0, [1], Sampling(record_routing=True))
    with pytest.raises(GenerationError, match="tokenizer"):
        engine.submit(0, [1], Sampling(stop_strings=("x",)))
    assert not engine.busy


def test_the_cache_keeps_its_content_when_it_grows() -> None:
    model = build_model()
    engine = Engine(copy.deepcopy(model), slots=2)
    engine.submit("long", [5] * 30, Sampling(max_tokens=150, seed=0))
    engine.submit("short", [6, 7], Sampling(max_tokens=3, seed=1))
    for completion in drain(engine).values():
        assert_true(completion, Sampling(), {0: model})


def test_a_failing_engine_fails_its_pending_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(build_model(), slots=2)
    generator = TorchGenerator(engine)

    def fail() -> None:
        raise RuntimeError("no memory")

    async def main() -> list[object]:
        monkeypatch.setattr(engine, "step", fail)
        calls = [generator.generate([5, 6], Sampling()) for _ in range(3)]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)

    for told in asyncio.run(main()):
        assert isinstance(told, EngineFailed) and "no memory" in str(told)
