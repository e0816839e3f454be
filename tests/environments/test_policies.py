"""Episodes that ask several policies by name: who sampled what, and which rollouts they may return."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.episode import EpisodeOptions, RolloutFailed, run_episode
from slipstream.rollout import Completion, Rollout, Sampling, VersionSpan
from tests.conftest import build_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from nim import Nim
from words import Words

Play = Callable[[Task, Policy], Coroutine[Any, Any, Any]]


class Scripted:
    """A generator that answers each policy with its own texts in turn; the last one again and again."""

    version = 3

    def __init__(self, **texts: list[str]) -> None:
        self.tokenizer, self.texts = build_tokenizer(), texts
        self.asked: list[Sampling] = []

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
        self.asked.append(sampling)
        own = self.texts[sampling.policy or "start"]
        ids = (*self.tokenizer.encode(own.pop(0) if own[1:] else own[0]), 1)
        logprobs, spans = (-0.5,) * len(ids), (VersionSpan(3, 0, len(ids)),)
        return Completion(tuple(prompt_ids), ids, logprobs, spans, "stop", policy=sampling.policy)

    async def close(self) -> None: ...


def played(play: Play, generator: Scripted, **names: str) -> dict[str, float]:
    """The rewards of an episode by role; of several rollouts of a role the last."""

    environment: Any = SimpleNamespace(rollout=play)

    async def main() -> tuple[Rollout, ...]:
        tokenizer = ChatTokenizer(generator.tokenizer)
        policy = Policy(generator, tokenizer, Sampling(), "0", Endpoint(tokenizer), policies=names)
        return await run_episode(environment, Task("t", "?", {"pile": 6}), policy, EpisodeOptions(20.0))

    return {rollout.role: rollout.reward for rollout in asyncio.run(main())}


BOTH = {"a": "a", "b": "b"}


def test_one_number_is_the_reward_of_each_policy_that_was_asked() -> None:
    async def ask(task: Task, policy: Policy) -> float:
        assert (await policy["b"].sample("1=")).text == "2"
        assert await policy["a"].conversation().ask("3=") == "4" and policy["a"] is policy["a"]
        return 0.5

    generator = Scripted(a=["4"], b=["2"])
    assert played(ask, generator, **BOTH, c="c") == {"b": 0.5, "a": 0.5}
    assert [sampling.policy for sampling in generator.asked] == ["b", "a"]
    assert generator.asked[0].seed != generator.asked[1].seed


def test_a_rollout_has_one_policy_and_its_role_begins_with_the_name() -> None:
    async def ask(task: Task, policy: Policy) -> list[Rollout]:
        own, other = policy["a"].conversation(), policy["b"].conversation()
        await own.ask("1="), await other.ask("1=")
        rollouts = [own.rollout(1.0, role="x"), other.rollout(0.0)]
        return [Rollout((*own.completions, *other.completions), 1.0)] if task.id == "mixed" else rollouts

    assert played(ask, Scripted(a=["4"], b=["2"]), **BOTH) == {"a:x": 1.0, "b": 0.0}

    async def mixed(task: Task, policy: Policy) -> list[Rollout]:
        return await ask(Task("mixed", "1="), policy)

    with pytest.raises(RolloutFailed, match="are of the policies a and b; return a rollout for each policy"):
        played(mixed, Scripted(a=["4"], b=["2"]), **BOTH)


def test_each_policy_has_a_url_of_its_own() -> None:
    async def ask(task: Task, policy: Policy) -> float:
        async with aiohttp.ClientSession() as client:
            for name, text in (("a", "4"), ("b", "2")):
                body = {"model": "policy", "prompt": "1=", "max_tokens": 4}
                async with client.post(f"{await policy[name].base_url()}/completions", json=body) as answer:
                    assert (await answer.json())["choices"][0]["text"] == text
        with pytest.raises(ConfigError, match=r"several policies \(a, b\), and an episode names none"):
            await policy.base_url()
        return 1.0

    assert played(ask, Scripted(a=["4"], b=["2"]), **BOTH) == {"a": 1.0, "b": 1.0}


def test_a_failed_episode_names_the_refusal_of_a_policys_url() -> None:
    async def ask(task: Task, policy: Policy) -> float:
        async with aiohttp.ClientSession() as client:
            body = {"model": "policy", "prompt": "1=", "max_tokens": "four"}
            async with client.post(f"{await policy['a'].base_url()}/completions", json=body) as answer:
                assert answer.status == 400
        raise ValueError("no answer")

    with pytest.raises(RolloutFailed, match=r"no answer\nIts URL had answered: .*max_tokens"):
        played(ask, Scripted(a=["4"]), a="a")


def test_the_examples_reward_as_they_say() -> None:
    nim = {"first": "first", "second": "second"}
    assert played(Nim().rollout, Scripted(first=["2", "3"], second=["1"]), **nim) == {"first": 1.0, "second": 0.0}
    assert played(Nim().rollout, Scripted(first=["7"], second=["1"]), **nim) == {"first": 0.0}, "7 is no move"
    assert played(Nim().rollout, Scripted(first=["1"], start=["3", "2"]), first="first", second="") == {
        "first": 1.0, "": 0.0,
    }, "against the start"  # fmt: skip
    words = {"proposer": "proposer", "solver": "solver"}
    found = played(Words().rollout, Scripted(proposer=["abc"], solver=["abc", "cba", "c"]), **words)
    assert found == {"proposer": 0.5, "solver:abc": pytest.approx(1 / 3)}
    for wrong in ("aba", "abcdefgh", "z", "1"):
        assert played(Words().rollout, Scripted(proposer=[wrong]), **words) == {"proposer": 0.0}
