"""Servers started by the user: a real `vllm serve`, and fake servers with all kinds of failures."""

from __future__ import annotations

import asyncio
import math
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")
from aiohttp import web
from transformers import AutoModelForCausalLM

from slipstream.config import loading as configuration
from slipstream.config.schema import Config, ConfigError
from slipstream.controller.launch import Cluster, start_generators
from slipstream.generators.base import GenerationError, Interruption
from slipstream.generators.pool import EngineReplica, GeneratorPool
from slipstream.generators.vllm import server_client, servers
from slipstream.generators.vllm.servers import Server
from slipstream.generators.vllm.worker_methods import WorkerMethods
from slipstream.model.inspection import config_sizes
from slipstream.rollout import Completion, Sampling
from slipstream.runtime.placement import Placement
from slipstream.runtime.worker import WorkerDied
from slipstream.tools.verify import verify
from tests.conftest import VOCABULARY, build_model, build_tokenizer, random_prompts, save_model
from tests.generators.test_engine import assert_true, reference_logits
from tests.generators.vllm.serving import CONTEXT, free_port, serving
from tests.trainers.test_trainer import random_batch

LONG = [5 + n % 80 for n in range(200)]  # more than a block, whose keys vLLM caches for prompts with the same prefix
COSTS = (
    server_client.REQUEST_TIMEOUT_S + 3 * server_client.SILENT_TIMEOUT_S
)  # seconds that one that falls silent takes, until a run that has it has ended
MODES = [
    ("shared", "recompute"),
    ("nccl", "recompute"),
    ("delta", "continue"),
    *(("checkpoint", how) for how in get_args(Interruption)),
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an end-of-sequence token, small enough to sample on a CPU."""
    path = tmp_path_factory.mktemp("served") / "policy-a"
    build_model(head_dim=32).save_pretrained(path)
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None  # vLLM would also stop at the tokenizer's token
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")  # an idle server uses processor time
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a vLLM server, started as docs/vllm-servers.md shows."""
    with serving(model, tmp_path_factory.mktemp("server")) as url:
        yield url


def configured(model: Path, *urls: str, **more: Any) -> Config:
    values = {
        "model.path": model, "environment.name": "addition", "generator.engine": "vllm",
        "generator.servers": list(urls), "trainer.learning_rate": 3e-2, "trainer.threads": 1,
        **{name.replace("__", "."): value for name, value in more.items()},
    }  # fmt: skip
    return configuration.load_config(None, [f"--{name}={value}" for name, value in values.items()])


@asynccontextmanager
async def attached(config: Config, directory: Path) -> AsyncIterator[Cluster]:
    pools = await Cluster.start(config, directory)
    try:
        await pools.link.connect(0)
        yield pools
    finally:
        await pools.close()


async def trained(pools: Cluster, path: Path) -> Any:
    """Take a large step. Returns the model after it."""
    await pools.trainer.step(random_batch(VOCABULARY))
    await pools.trainer.export(path)
    return AutoModelForCausalLM.from_pretrained(path).eval()


async def keep_busy(pools: Cluster, prompt: list[int], version: int = 1, longest: int = 230) -> list[Completion]:
    """Request completions one by one until this version has sampled a whole one. Lengths differ by prompt."""
    drawn: list[Completion] = []
    while not drawn or drawn[-1].spans[0].version < version:
        drawn.append(await pools.generator.generate(prompt, Sampling(max_tokens=longest - 5 * len(prompt))))
    return drawn


def test_log_probabilities_and_versions_are_exact(server: str, model: Path, tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    asked = [
        Sampling(max_tokens=20), Sampling(max_tokens=20, temperature=0), Sampling(max_tokens=20, temperature=0.6),
        Sampling(max_tokens=20, temperature=1.7), Sampling(max_tokens=20, top_k=5), Sampling(max_tokens=20, top_p=0.8),
        Sampling(max_tokens=400),
        Sampling(max_tokens=20, top_k=9, top_p=0.7, temperature=2.0, record_sampling_mask=True),
    ]  # fmt: skip

    async def main() -> None:
        async with attached(configured(model, server), tmp_path) as pools:
            generate = pools.generator.generate
            prompts = random_prompts(len(asked))
            drawn = await asyncio.gather(*(generate(p, s) for p, s in zip(prompts, asked, strict=True)))
            for prompt, sampling, completion in zip(prompts, asked, drawn, strict=True):
                assert list(completion.prompt_ids) == list(prompt) and completion.finish_reason == "length"
                assert len(completion.token_ids) == min(sampling.max_tokens, CONTEXT - len(prompt))
                assert_kept(completion, sampling, reference)
            assert (await pools.generator.stats())["tokens"] == sum(len(c.token_ids) for c in drawn)

            stop = drawn[1].token_ids[4]
            ended = await generate(prompts[1], Sampling(max_tokens=20, temperature=0, stop_tokens=(stop,)))
            first = drawn[1].token_ids.index(stop) + 1
            assert (ended.token_ids, ended.finish_reason) == (drawn[1].token_ids[:first], "stop")
            free = await generate([5, 6], Sampling(max_tokens=40, seed=1))
            spoken = next(i for i, token in enumerate(free.token_ids) if 2 <= token < len(build_tokenizer()))
            letter = build_tokenizer().decode([free.token_ids[spoken]])
            ended = await generate([5, 6], Sampling(max_tokens=200, stop_strings=(letter,)))
            assert ended.finish_reason == "stop" and len(ended.token_ids) < 200
            assert build_tokenizer().decode(ended.token_ids[-1:]) == letter

            schema = {"record_sampling_mask": True, "json_schema": '{"const": 123456}', "stop_tokens": (1,)}
            follows = await generate([5, 6], Sampling(max_tokens=20, top_k=9, **schema))
            assert build_tokenizer().decode(follows.token_ids).removesuffix("<eos>") == "123456"
            assert [*map(list, follows.sampling_mask or ())] == [[token] for token in follows.token_ids]
            assert not any(follows.logprobs)
            unrecorded = await generate([5, 6], Sampling(max_tokens=9, record_logprobs=False))
            assert len(unrecorded.token_ids) == 9 and all(map(math.isnan, unrecorded.logprobs))

            for prompt, sampling, why in (
                ([], Sampling(), "the prompt is empty"),
                ([VOCABULARY], Sampling(), "token id 97, and the model has"),
                ([2] * CONTEXT, Sampling(), f"share a context of {CONTEXT}"),
                ([2], Sampling(top_p=0.5, record_sampling_mask=True), "set sampling.top_k too"),
                ([2], Sampling(top_k=50, record_sampling_mask=True), "at most 20 tokens that top_k kept"),
            ):
                with pytest.raises(GenerationError, match=why):
                    await generate(prompt, sampling)

    asyncio.run(main())


def assert_kept(completion: Completion, sampling: Sampling, reference: Any) -> None:
    assert_true(Completion(**{**fields(completion), "sampling_mask": None}), sampling, {0: reference})
    for logits, kept in zip(reference_logits(reference, completion), completion.sampling_mask or (), strict=False):
        probabilities = logits[list(kept)].softmax(-1)
        assert set(kept) == set(logits.topk(len(kept)).indices.tolist())
        assert len(kept) == sampling.top_k or probabilities.sort().values[1:].sum() < 1
    assert (completion.sampling_mask is not None) == sampling.record_sampling_mask


def fields(completion: Completion) -> dict[str, Any]:
    return {name: getattr(completion, name) for name in Completion.__dataclass_fields__}


@pytest.mark.parametrize(("link", "how"), MODES)
def test_every_token_has_its_version_when_weights_swap_in_mid_sequence(
    link: str, how: Interruption, server: str, model: Path, tmp_path: Path
) -> None:
    models = {0: AutoModelForCausalLM.from_pretrained(model).eval()}
    config = configured(model, server, sync__link=link, sync__in_flight=how, sync__verify="full")

    async def main() -> None:
        wanted = 4 if how in ("continue", "recompute") else 0
        async with attached(config, tmp_path) as pools:
            before = 0.0
            # On a crowded machine no sequence may be in its middle at a swap, or one may wait for its first token.
            for version in range(1, 6):
                models[version] = await trained(pools, tmp_path / f"policy {version}")
                prompts = [[5, 6, 7], *random_prompts(11)]
                busy = [asyncio.create_task(keep_busy(pools, prompt, version)) for prompt in prompts]
                await pools.generator.generate(LONG, Sampling(max_tokens=50))  # by then all of them have begun
                assert (await pools.link.publish(version)).version == version
                late = await pools.generator.generate(LONG, Sampling(max_tokens=9))  # reads no old keys
                drawn = [completion for completions in await asyncio.gather(*busy) for completion in completions]
                totals = await pools.generator.generators[0].stats()
                assert [span.version for span in late.spans] == [version]
                assert_true(late, Sampling(), models)
                met = [completion for completion in drawn if len(completion.spans) > 1]
                for completion in met or drawn[:4]:
                    check(completion, how)
                assert wanted or not met
                discarded, before = totals["tokens_discarded"] - before, totals["tokens_discarded"]
                if len(met) >= wanted and bool(discarded) == (how == "retry"):
                    break
            else:
                pytest.fail(f"no swap met sequences as it should: {totals}")

    def check(completion: Completion, how: Interruption) -> None:
        if how == "continue" and len(completion.spans) > 1:  # keys of A under the weights of B: no reference has them
            end = completion.spans[0].end
            part = {"token_ids": completion.token_ids[:end], "logprobs": completion.logprobs[:end]}
            completion = Completion(**{**fields(completion), **part, "spans": completion.spans[:1]})
        assert_true(completion, Sampling(), models)

    asyncio.run(main())


def test_cancelled_requests_are_aborted_on_the_server(server: str, model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with attached(configured(model, server), tmp_path) as pools:
            tasks = [asyncio.create_task(keep_busy(pools, p)) for p in random_prompts(4)]
            await pools.generator.generate([5], Sampling(max_tokens=20))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert pools.generator.generators[0].pending_requests == 0
            for _ in range(50):
                with urllib.request.urlopen(f"{server}/metrics") as metrics:
                    running = [x for x in metrics.read().decode().splitlines() if x.startswith("vllm:num_requests_run")]
                if running[0].endswith(" 0.0"):
                    return
                await asyncio.sleep(0.1)
            pytest.fail(running[0])

    asyncio.run(main())


def test_completions_of_a_server_are_exact_across_a_swap(server: str, model: Path) -> None:
    """Measured by `slipstream verify`, which starts reference engines."""
    config = configured(model, server, sync__link="shared", sync__in_flight="recompute", sync__verify="full")
    for _ in range(4):  # a busy host may publish too late
        verdict = asyncio.run(verify(config, prompts=4, tokens=200))
        if not verdict.unseen:
            break
    assert verdict.exact, verdict.describe(config)
    assert verdict.changed and verdict.completions == 8


def test_a_server_left_paused_by_a_killed_run_is_resumed(server: str, model: Path) -> None:
    def order(path: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{server}{path}", method="POST"), timeout=20).close()

    async def main() -> None:
        attached = Server(server, configured(model, server))
        try:
            await attached.start()
            async with asyncio.timeout(20):
                drawn = await attached.generate((5, 6, 7), Sampling(max_tokens=4))
            assert len(drawn.token_ids) == 4
        finally:
            await attached.stop()

    order("/pause?mode=keep&clear_cache=false")
    try:
        asyncio.run(main())
    finally:
        order("/resume")


def test_a_second_run_is_refused_while_the_first_holds_the_server(
    server: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "LEASE_S", 0.5)  # the second run waits for it

    async def main() -> None:
        first, second = (Server(server, configured(model, server)) for _ in range(2))

        async def claim(asking: Server, run: str) -> list[str | None]:
            return await asking._call_workers("claim", None, WorkerMethods.slipstream_claim, run, server, False)

        try:
            await first.start()
            with pytest.raises(ConfigError, match="is in use by another run"):
                await second.start()
            assert None not in await claim(first, first._run)
            assert None in await claim(first, second._run)
            again = Server(server.replace("127.0.0.1", "localhost"), configured(model, server), first._run)
            with pytest.raises(
                ConfigError, match=r"http://127\.0.* and http://localhost.* are one server; leave one out"
            ):
                await again.start()
            await again.stop()
            assert None not in await claim(first, first._run)
            await first.stop()
            await second.start()
        finally:
            await first.stop()
            await second.stop()

    asyncio.run(main())


def refusal(config: Config) -> str:
    async def main() -> str:
        server = Server(config.generator.servers[0], config)
        try:
            await server.start()
        except ConfigError as error:
            return str(error)
        finally:
            await server.stop()
        return "none"

    message = asyncio.run(main())
    assert "\n" not in message
    return message


def test_unsupported_server_configurations_are_refused(server: str, model: Path, tmp_path: Path) -> None:
    assert refusal(configured(model, server)) == "none"
    message = refusal(configured(tmp_path / "policy-c", server))
    assert message.startswith(f"{server} serves ") and 'model.path = "' in message and "policy-c" in message
    larger = tmp_path / model.name
    save_model(larger, intermediate_size=80)
    assert refusal(configured(larger, server)).endswith(
        f" with a model of intermediate_size 64; {larger} has 80: serve that"
    )
    assert f"--max-model-len {CONTEXT}; the run needs 300" in refusal(
        configured(model, server, generator__max_model_len=300)
    )
    assert "--dtype float32; start it with --dtype bfloat16" in refusal(
        configured(model, server, model__dtype="bfloat16")
    )
    nobody = f"http://127.0.0.1:{free_port()}"
    assert refusal(configured(model, nobody)).startswith(f"{nobody}/health did not answer: ")


def test_an_http_server_other_than_vllm_is_refused(model: Path) -> None:
    async def main() -> None:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        url = f"http://127.0.0.1:{port}"
        server = Server(url, configured(model, url))
        with pytest.raises(ConfigError, match=r"404.*this is no vLLM server; correct generator.servers"):
            await server.start()
        await server.stop()
        await runner.cleanup()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"generator.engine": "torch"}, 'generator.engine = "torch"; set it to "vllm"'),
        ({"generator.replicas": 3}, "generator.replicas = 3"),
        ({"generator.tensor_parallel_size": 2}, "generator.tensor_parallel_size; give it to `vllm serve`"),
        ({"generator.max_num_seqs": 8}, "generator.max_num_seqs; give it to `vllm serve`"),
        ({"generator.servers": ["here:8000", "http://localhost:1"]}, "each is a URL such as http://host:8000"),
        ({"generator.servers": ["http://localhost:1", "http://localhost:1/"]}, "name each once"),
        ({"generator.device": "cuda:1"}, "generator.device; give it to `vllm serve`"),
        (
            {"generator.servers": ["http://far:1"], "sync.link": "shared"},
            'sync.link = "shared", which does not reach far:1',
        ),
        ({"sync.link": "nccl_direct"}, 'set it to "delta", "nccl" or "checkpoint", or leave servers out'),
        (
            {"sync.link": "single_copy", "model.dtype": "bfloat16"},
            '"single_copy", which takes engines that the run starts',
        ),
    ],
)
def test_conflicting_options_are_refused(more: dict[str, Any], named: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"^generator.servers does not go with [^\n]*$") as refused:
        configured(model, "http://localhost:1", **more)
    assert named in str(refused.value)
    assert configured(model, "http://far:1", "http://far:2", sync__link="checkpoint").generator.replicas == 2
    for link in ("nccl", "mine:Link"):
        assert configured(model, "http://localhost:1", sync__link=link).sync.link == link


FACTS = {
    "logprobs_mode": "processed_logprobs", "dtype": "float32", "context": 64, "vocabulary": VOCABULARY, "eos": [1],
    "replicas": 1, "counts": True, "max_logprobs": 20, "max_num_seqs": 16, "max_loras": 0, "max_lora_rank": 0,
    "sizes": config_sizes(build_model().config),
}  # fmt: skip
Answer = Callable[[dict[str, Any]], Awaitable[Any]]


class Unable(str):
    """The reply of a worker that raised an error."""


@asynccontextmanager
async def fake(
    complete: Answer,
    facts: dict[str, Any],
    rpc: Answer | None = None,
    order: Answer | None = None,
    claim: Answer | None = None,
) -> AsyncIterator[str]:
    """A server with this description, and with given answers to completions, worker calls and orders."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy-a"}]})

    async def call(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "slipstream_call"
        method, *arguments = body["args"]
        method = method.removeprefix("slipstream_")
        if method == "describe":
            return web.json_response({"results": [[FACTS | facts]]})
        asked = {"method": method, "args": arguments}
        if method == "claim" and (claim or arguments[-1]):
            return web.json_response({"results": [[await claim(asked) if claim else arguments[1]]]})
        answer = await rpc(asked) if rpc else None  # also for the health check
        if isinstance(answer, Unable):
            return web.json_response({"results": [answer]})
        return web.json_response({"results": [[arguments[1] if method == "claim" else answer]]})

    async def completions(request: web.Request) -> web.Response:
        return web.json_response(await complete(await request.json()))

    async def ordered(request: web.Request) -> web.Response:
        return web.json_response(await order({"path": request.path}) if order else {})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([
        web.get("/health", health), web.get("/v1/models", models),
        web.post("/collective_rpc", call), web.post("/v1/completions", completions),
        *(web.post(path, ordered) for path in ("/pause", "/resume", "/reset_prefix_cache")),
    ])  # fmt: skip
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def faked(
    model: Path, complete: Answer, rpc: Answer, order: Answer | None = None, claim: Answer | None = None, **options: Any
) -> AsyncIterator[Server]:
    """The run's end of a fake server, with these options of the run."""
    async with fake(complete, {}, rpc, order, claim) as url:
        server = Server(url, configured(model, url, sampling__max_tokens=4, **options))
        await server.start()
        try:
            yield server
        finally:
            await server.stop()


async def complete(body: dict[str, Any]) -> Any:
    tokens = [7] * body["max_tokens"]
    drawn = {"token_logprobs": [-1.0] * len(tokens), "top_logprobs": [{"token_id:7": -1.0}] * len(tokens)}
    return {"choices": [{"token_ids": tokens, "logprobs": drawn, "finish_reason": "length"}]}


async def fail(body: dict[str, Any]) -> Any:
    raise web.HTTPInternalServerError(text='{"error": {"message": "out of memory\\nat line 3"}}')


async def hang(body: dict[str, Any]) -> Any:
    await asyncio.sleep(1000)


@pytest.fixture(autouse=True)
def short_limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "server" not in request.fixturenames:
        monkeypatch.setattr(server_client, "REQUEST_TIMEOUT_S", 2.0)
        monkeypatch.setattr(servers, "RENEW_INTERVAL_S", 0.2)
        monkeypatch.setattr(servers, "BACKOFF_S", 0.01)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode raw_logprobs; start it with --logprobs-mode processed"),
        ({"counts": False}, "start it with VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"replicas": 2}, "2 data- or pipeline-parallel parts"),
        ({"context": 20}, "--max-model-len 20; the run needs 129"),
        ({"sizes": FACTS["sizes"] | {"hidden_size": 8}}, r"with a model of hidden_size 8; \S+ has \d+: serve that"),
        ({"max_logprobs": 5}, "--max-logprobs 5; start it with --max-logprobs 9"),
        ({"max_lora_rank": 8}, "--enable-lora and can't take full weights; start it without, or set lora.rank"),
    ],
)
def test_a_server_with_unsuitable_settings_is_refused(facts: dict[str, Any], named: str, model: Path) -> None:
    async def main() -> None:
        async with fake(complete, {"context": 512} | facts) as url:
            with pytest.raises(ConfigError, match=named):
                await Server(url, configured(model, url, sampling__top_k=9)).start()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("complete_as", "rpc", "said"),
    [
        (fail, None, r"/v1/completions answered 500: out of memory$"),
        (hang, hang, r"/collective_rpc did not answer within 2 s$"),
        (hang, fail, r"/collective_rpc answered 500: out of memory$"),
    ],
)
def test_requests_of_a_failed_server_move_to_another(
    complete_as: Answer, rpc: Answer | None, said: str, model: Path
) -> None:
    async def main() -> None:
        async with fake(complete_as, {}, rpc) as broken, fake(complete, {}) as sound:
            config = configured(model, broken, sound, sampling__max_tokens=4)
            both = [Server(url, config) for url in (broken, sound)]
            for server in both:
                await server.start()
            pool = GeneratorPool([EngineReplica(s) for s in both])
            async with asyncio.timeout(5):
                drawn = await asyncio.gather(*(pool.generate([3, 4], Sampling(max_tokens=4)) for _ in range(6)))
            assert [len(c.token_ids) for c in drawn] == [4] * 6
            assert both[0].dead and not both[1].dead
            with pytest.raises(WorkerDied, match=f"^{broken}{said}"):
                await pool.generators[0].generate([3], Sampling())
            with pytest.raises(WorkerDied, match=f"^{broken}"):
                await both[0].prepare({})
            await pool.close()

    asyncio.run(main())


def test_a_failed_request_leaves_the_server_in_the_pool(model: Path) -> None:
    """The same request would fail at every other server, too."""

    async def choosy(body: dict[str, Any]) -> Any:
        return await (fail if 9 in body["prompt"] else complete)(body)

    async def main() -> None:
        async with fake(choosy, {}) as one, fake(choosy, {}) as other:
            both = [Server(url, configured(model, one, other, sampling__max_tokens=4)) for url in (one, other)]
            for server in both:
                await server.start()
            pool = GeneratorPool([EngineReplica(s) for s in both])
            async with asyncio.timeout(5):
                with pytest.raises(GenerationError, match="answered 500: out of memory, and others are sampled"):
                    await pool.generate([3, 9], Sampling(max_tokens=4))
                assert len((await pool.generate([3, 4], Sampling(max_tokens=4))).token_ids) == 4
            assert not both[0].dead and not both[1].dead
            await pool.close()

    asyncio.run(main())


def test_a_failed_swap_ends_requests_in_flight(model: Path) -> None:
    """The served weights are then unknown, so their tokens get no version."""
    begun = asyncio.Event()

    async def slow(body: dict[str, Any]) -> Any:
        begun.set()
        await asyncio.sleep(0.3)
        return await complete(body)

    async def rpc(body: dict[str, Any]) -> Any:
        return await (fail if body["method"] == "apply" else answer)(body)

    async def answer(body: dict[str, Any]) -> Any:
        return None

    async def main() -> None:
        async with faked(model, slow, rpc) as server:
            drawing = asyncio.ensure_future(server.generate((3, 4), Sampling(max_tokens=4)))
            await begun.wait()
            with pytest.raises(WorkerDied, match="/collective_rpc answered 500"):
                await server.swap(1)
            with pytest.raises(WorkerDied, match="/collective_rpc answered 500"):
                await drawing

    asyncio.run(main())


@pytest.mark.parametrize("how", ["continue", "retry", "recompute"])
def test_a_swap_that_is_rolled_back_leaves_the_server_at_the_version_before(how: Interruption, model: Path) -> None:
    """Requests in flight continue, and the next swap succeeds. Workers that differ end the server."""
    begun, answer = asyncio.Event(), asyncio.Event()
    rolled_back = [True]

    async def slow(body: dict[str, Any]) -> Any:
        begun.set()
        await answer.wait()
        return await complete(body)

    async def rpc(body: dict[str, Any]) -> Any:
        return [0.001, {}, rolled_back[0]] if body["method"] == "swapped" else None

    async def main() -> None:
        async with faked(model, slow, rpc, sync__in_flight=how) as server:
            drawing = asyncio.ensure_future(server.generate((3, 4), Sampling(max_tokens=4)))
            await begun.wait()
            assert await server.swap(1) is None and not server.dead
            answer.set()
            assert (await drawing).spans == ((0, 0, 4),)
            rolled_back[0] = False
            assert await server.swap(2) and not server.dead
            assert (await server.generate((3, 4), Sampling(max_tokens=4))).spans == ((2, 0, 4),)

            async def differ(*_: Any) -> list[Any]:
                return [[0.001, {}, True], [0.001, {}, False]]

            server._poll_workers = differ  # type: ignore[method-assign]
            with pytest.raises(WorkerDied, match="serve two versions"):
                await server.swap(3)

    asyncio.run(main())


def test_responses_are_held_during_a_swap(model: Path) -> None:
    """Workers count tokens before they are tagged, and a request unknown to the workers is sent again."""
    salts: list[str] = []
    names: list[str] = []

    async def slow(body: dict[str, Any]) -> Any:
        salts.append(body["cache_salt"])
        await asyncio.sleep(0.1)
        return await complete(body)

    async def rpc(body: dict[str, Any]) -> Any:
        if body["method"] == "apply":
            await asyncio.sleep(0.3)  # all other answers arrive first
        if body["method"] != "swapped":
            return None
        return [0.001, {f"cmpl-{names[0]}-0-1a2b3c4d": 3, "cmpl-of-another-0-1a2b3c4d": 9}, False]

    async def main() -> None:
        async with faked(model, slow, rpc) as server:
            drawing = [asyncio.ensure_future(server.generate((3, 4), Sampling(max_tokens=5))) for _ in range(2)]
            while len(salts) < 2:
                await asyncio.sleep(0.01)
            names.extend(request.name for request in server._requests)
            await server.swap(1)
            spans = [(await task).spans for task in drawing]
            assert spans == [((0, 0, 3), (1, 3, 5)), ((1, 0, 5),)]
            assert len(salts) == 3 and salts[0] == salts[1] != salts[2]

    asyncio.run(main())


@pytest.mark.parametrize("how", ["continue", "retry"])
def test_completions_finished_before_a_swap_are_not_sampled_again(how: Interruption, model: Path) -> None:
    """The response may arrive after that swap, and after the next one. A response revoked by the swap is discarded."""
    prompts: list[list[int]] = []
    answer, late, arrived = asyncio.Event(), asyncio.Event(), asyncio.Event()
    counts: dict[str, Any] = {}

    async def drawing(body: dict[str, Any]) -> Any:
        prompts.append(body["prompt"])
        again = prompts.count(body["prompt"]) > 1
        if len(prompts) == 3:
            arrived.set()
        if not again:
            await (late if body["prompt"] == [1] else answer).wait()
        return await complete(body)

    async def rpc(body: dict[str, Any]) -> Any:
        if body["method"] == "apply":
            answer.set()
        return [0.001, counts, False] if body["method"] == "swapped" else None

    async def main() -> None:
        async with faked(model, drawing, rpc, sync__in_flight=how) as server:
            tasks = [asyncio.ensure_future(server.generate((i,), Sampling(max_tokens=5))) for i in (1, 2, 3)]
            await arrived.wait()
            workers = server._call_workers

            async def once_answered(purpose: str, limit: Any, method: Any, *arguments: Any) -> list[Any]:
                while (
                    method is WorkerMethods.slipstream_swapped
                    and sum(future.done() for future in server._requests.values()) < 2
                ):
                    await asyncio.sleep(0.01)
                return await workers(purpose, limit, method, *arguments)

            server._call_workers = once_answered  # type: ignore[method-assign]
            names = {request.prompt[0]: f"cmpl-{request.name}-0-1a2b3c4d" for request in server._requests}
            counts.update({names[1]: None, names[2]: 5, names[3]: 3})
            await server.swap(1)
            assert (await tasks[1]).spans == ((0, 0, 5),)
            assert (await tasks[2]).spans == (((1, 0, 5),) if how == "retry" else ((0, 0, 3), (1, 3, 5)))
            server._call_workers = workers  # type: ignore[method-assign]
            counts.clear()
            await server.swap(2)
            late.set()
            assert (await tasks[0]).spans == ((0, 0, 5),)
            assert prompts.count([1]) == prompts.count([2]) == 1
            assert (await server.stats())["tokens_discarded"] == (5 if how == "retry" else 0)

    asyncio.run(main())


def test_a_restarted_server_is_removed_even_if_idle(model: Path) -> None:
    """A restarted server serves the model that it loaded, and not its last version."""
    claims = []

    async def claim(body: dict[str, Any]) -> str | None:
        claims.append(body["args"])
        return body["args"][1] if len(claims) < 3 else None

    async def nothing(body: dict[str, Any]) -> None: ...

    async def main() -> None:
        async with faked(model, complete, nothing, claim=claim) as server:
            async with asyncio.timeout(60):
                while not server.dead:
                    await asyncio.sleep(0.01)
            with pytest.raises(WorkerDied, match="was restarted, or claimed by another run"):
                await server.generate((3, 4), Sampling(max_tokens=4))

    asyncio.run(main())
    (run,) = {run for run, _, _ in claims}
    assert run and [anew for _, _, anew in claims] == [True, False, False]


def test_a_server_claimed_by_another_run_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "LEASE_S", 0.3)

    async def no(body: dict[str, Any]) -> None: ...

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"http://.* is in use by another run; wait for its end, or start"):
            async with faked(model, complete, no, claim=no):
                pass

    asyncio.run(main())


def test_a_claim_lasts_until_its_release_or_the_end_of_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from slipstream.generators.vllm import worker_methods as vllm_worker

    now = [100.0]
    monkeypatch.setattr(vllm_worker, "time", SimpleNamespace(monotonic=lambda: now[0]))
    worker = vllm_worker.WorkerMethods()

    def claim(run: str, anew: bool, address: str = "http://here") -> str | None:
        return worker.slipstream_claim(run, address, anew)

    assert not claim("a", False) and claim("a", True) == "http://here"
    assert claim("a", True, "http://127.0.0.1") == claim("a", False) == "http://here"  # one server, by two names
    assert not claim("b", True) and not claim("b", False)
    now[0] += vllm_worker.LEASE_S - 1
    assert claim("a", False)
    now[0] += vllm_worker.LEASE_S - 1
    assert not claim("b", True)
    worker.slipstream_release("b")
    assert not claim("b", True)
    worker.slipstream_release("a")
    assert claim("b", True) and not claim("a", False)
    now[0] += vllm_worker.LEASE_S
    assert claim("a", True)
    # A call that blocks the worker for longer than the lease announces it.
    monkeypatch.setattr(vllm_worker, "map_parameters", lambda *_: {})
    worker._slipstream_validated, worker._slipstream_tokens = True, None  # type: ignore[attr-defined]
    worker.model_runner = Mock()
    worker.model_runner.get_model().modules.return_value = ()
    worker.model_runner.parallel_config.tensor_parallel_size = 1
    worker.model_runner.parallel_config.pipeline_parallel_size = 1
    worker.vllm_config, worker.rank = Mock(), 0
    monkeypatch.setattr(
        vllm_worker, "ServedWeights", lambda *_, **__: now.__setitem__(0, now[0] + 2 * vllm_worker.LEASE_S)
    )
    worker.slipstream_connect("nccl", {"shapes": {}}, 1)
    assert not claim("b", True) and claim("a", False)


def test_a_worker_that_connects_again_closes_its_earlier_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from slipstream.generators.vllm import worker_methods as vllm_worker

    worker = vllm_worker.WorkerMethods()
    worker._slipstream_validated, worker._slipstream_tokens = True, None  # type: ignore[attr-defined]
    worker.model_runner, worker.vllm_config, worker.rank = Mock(), Mock(), 0
    worker.model_runner.get_model().modules.return_value = ()
    worker.model_runner.parallel_config.tensor_parallel_size = 1
    worker.model_runner.parallel_config.pipeline_parallel_size = 1
    ends = [Mock(), Mock()]
    monkeypatch.setattr(vllm_worker, "map_parameters", lambda *_: {})
    monkeypatch.setattr(vllm_worker, "ServedWeights", Mock(side_effect=ends))
    for _ in ends:
        worker.slipstream_connect("delta", {"shapes": {}}, 1)
    assert ends[0].close.called and not ends[1].close.called


@pytest.mark.parametrize(
    ("method", "arguments", "doing"),
    [("prepare", ({},), "get a version of the weights"), ("checksums", (["w"],), "add up its weights"),
     ("connect", ({}, 1), "connect")],
)  # fmt: skip
def test_errors_of_workers_are_passed_on(method: str, arguments: tuple[Any, ...], doing: str, model: Path) -> None:
    async def rpc(body: dict[str, Any]) -> Any:
        return (
            True
            if body["method"] in ("prepare", "start_checksums")
            else Unable("FileNotFoundError: no version_3\n  at line 7")
        )

    async def main() -> None:
        async with faked(model, complete, rpc) as server:
            with pytest.raises(WorkerDied, match=f"^{server.name} could not {doing}: FileNotFoundError: no version_3$"):
                await getattr(server, method)(*arguments)

    asyncio.run(main())


def test_one_server_with_two_addresses_is_refused_and_released(model: Path, tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []

    async def claim(body: dict[str, Any]) -> str:
        run, address, _ = body["args"]
        told.append((run, address))
        assert {one for one, _ in told} == {run}, "all servers of a run are claimed for it"
        return told[0][1]

    async def rpc(body: dict[str, Any]) -> None:
        told.append((body["method"], *body["args"]))

    async def main() -> None:
        async with fake(complete, {}, rpc, claim=claim) as url:
            config = configured(model, url, url.replace("127.0.0.1", "localhost"), sampling__max_tokens=4)
            with pytest.raises(ConfigError, match=r"^http://\S+ and http://\S+ in generator.servers are one server"):
                await start_generators(config, tmp_path, Placement(((), ()), ()))
        assert ("release", told[0][0]) in told

    asyncio.run(main())


def test_a_worker_returns_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    """vLLM's own reply to an error of a worker does not contain the error."""
    pytest.importorskip("vllm")
    worker = WorkerMethods()
    assert worker.slipstream_call("slipstream_claim", "a", "http://here", True) == ["http://here"]
    assert worker.slipstream_call("slipstream_claim", "b", "http://here", True) == [None]
    answer = worker.slipstream_call("slipstream_start_checksums", ["w"])
    assert isinstance(answer, str) and answer.startswith("AttributeError: ") and "_slipstream" in answer
    assert "Traceback" in capfd.readouterr().err, "the server's log has it all"


def test_a_server_that_returns_no_checksums_is_removed(model: Path) -> None:
    async def rpc(body: dict[str, Any]) -> Any:
        return None

    async def main() -> None:
        async with faked(model, complete, rpc) as server:
            async with asyncio.timeout(60):
                with pytest.raises(WorkerDied, match="did not add up its weights within 2 s"):
                    await server.checksums(["w"])

    asyncio.run(main())


class Orders:
    """A server with one worker, and the orders that it received. `broken` names the orders that fail."""

    def __init__(self, *broken: str) -> None:
        self.told: list[str] = []
        self._broken = broken
        self.applying = asyncio.Event()

    async def order(self, body: dict[str, Any]) -> Any:
        self.told.append(body["path"])
        if self.told == ["/resume"]:  # at the start
            return {}
        return await self._answer(body["path"], {})

    async def rpc(self, body: dict[str, Any]) -> Any:
        what = body["method"]
        if what == "apply":
            self.applying.set()
        return await self._answer(what, [0.001, {}, False] if what == "swapped" else None)

    async def _answer(self, what: str, well: Any) -> Any:
        if f"{what} is late" in self._broken:
            await asyncio.sleep(0.3)
        if f"{what} is silent" in self._broken:
            await hang({})
        if f"{what} fails" in self._broken:
            await fail({})
        return None if f"{what} is never over" in self._broken else well


@asynccontextmanager
async def swapping(model: Path, *broken: str) -> AsyncIterator[tuple[Server, asyncio.Future[Any], list[str]]]:
    """A server in the middle of a swap with `recompute`, the swap, and the orders since the start."""
    orders = Orders(*broken)
    async with faked(model, complete, orders.rpc, orders.order, sync__in_flight="recompute") as server:
        assert orders.told == ["/resume"]
        orders.told.clear()
        swap = asyncio.ensure_future(server.swap(1))
        await orders.applying.wait()
        try:
            yield server, swap, orders.told
        finally:
            await server.stop()
            await asyncio.gather(swap, return_exceptions=True)


@pytest.mark.parametrize("broken", ["apply fails", "apply is silent", "swapped is never over", "swapped fails"])
def test_a_server_whose_swap_fails_is_resumed(broken: str, model: Path) -> None:
    async def main() -> None:
        async with swapping(model, broken) as (server, swap, told):
            with pytest.raises(WorkerDied):
                await swap
            assert told == ["/pause", "/resume"] and server.dead

    asyncio.run(main())


def test_a_server_silent_in_a_swap_costs_its_timeout_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders that resume or release it do not add their timeouts: pending requests fail within a minute."""
    limit, last = 3.0, 0.2
    monkeypatch.setattr(server_client, "REQUEST_TIMEOUT_S", limit)
    monkeypatch.setattr(server_client, "SILENT_TIMEOUT_S", last)

    async def main() -> None:
        async with swapping(model, "apply is silent", "/resume is silent", "release is silent") as (server, swap, told):
            began = time.monotonic()
            with pytest.raises(WorkerDied):
                await swap
            assert told == ["/pause", "/resume"]
            await server.stop()
            assert told == ["/pause", "/resume", "/resume"] and limit < time.monotonic() - began < limit + 1.5

    asyncio.run(main())
    assert COSTS < 60


def test_comparing_weights_may_take_longer_than_the_silence_timeout(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is not renewed meanwhile, since the workers answer only afterwards."""
    monkeypatch.setattr(server_client, "REQUEST_TIMEOUT_S", 0.3)
    monkeypatch.setattr(servers, "RENEW_INTERVAL_S", 0.05)
    told = []

    async def rpc(body: dict[str, Any]) -> Any:
        told.append(body["method"])
        if body["method"] == "connect":
            await asyncio.sleep(0.9)
            told.append("connected")
        return True

    async def main() -> None:
        async with faked(model, complete, rpc) as server:
            await server.connect({}, 1)
            assert not server.dead
            while told[-1] != "claim":
                await asyncio.sleep(0.02)
            await server.stop()

    asyncio.run(main())
    connecting = told.index("connect")
    assert told[connecting + 1] == "connected"


def test_a_server_whose_swap_is_cancelled_is_resumed(model: Path) -> None:
    async def main() -> None:
        async with swapping(model, "apply is silent") as (server, swap, told):
            swap.cancel()
            with pytest.raises(asyncio.CancelledError):
                await swap
            assert told == ["/pause", "/resume"] and server.dead

    asyncio.run(main())


@pytest.mark.parametrize("cancelled", [False, True])
def test_leaving_a_server_waits_for_the_current_swap(
    cancelled: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a run that is stopped at once, or whose trainer has died."""
    monkeypatch.setattr(server_client, "REQUEST_TIMEOUT_S", 45.0)

    async def main() -> None:
        async with swapping(model, "apply is late", "/resume is late") as (server, swap, told):
            if cancelled:
                swap.cancel()
            await server.stop()
            assert swap.done() and swap.cancelled() == cancelled
            assert told == ["/pause", *([] if cancelled else ["/reset_prefix_cache"]), "/resume"]

    asyncio.run(main())


@pytest.mark.parametrize("broken", ["apply is silent", "/resume fails"])
def test_leaving_a_server_resumes_it_if_the_swap_did_not(broken: str, model: Path) -> None:
    async def main() -> None:
        async with swapping(model, broken) as (server, swap, told):
            if broken == "/resume fails":
                with pytest.raises(WorkerDied, match="/resume answered 500"):
                    await swap
                told.clear()
            await server.stop(grace=0.2)
            assert told[-1] == "/resume"

    asyncio.run(main())


def test_no_swap_begins_while_a_server_is_released(model: Path) -> None:
    orders = Orders("close is late")

    async def main() -> None:
        async with faked(model, complete, orders.rpc, orders.order, sync__in_flight="recompute") as server:
            await server.connect({}, 1)
            leaving = asyncio.ensure_future(server.stop())
            await asyncio.sleep(0.1)
            with pytest.raises(WorkerDied, match="was left"):
                await server.swap(1)
            await leaving
            assert orders.told == ["/resume"]  # at the start

    asyncio.run(main())


def test_a_server_that_fails_to_resume_is_refused(model: Path) -> None:
    async def main() -> None:
        async with fake(complete, {"context": 512}, order=fail) as url:
            server = Server(url, configured(model, url))
            with pytest.raises(ConfigError, match=r"/resume answered 500: out of memory; see its log$"):
                await server.start()
            await server.stop()

    asyncio.run(main())


def test_a_server_whose_monitor_fails_is_removed(model: Path) -> None:
    """After an invalid answer or an unexpected error, pending requests fail and the server is not used."""

    async def nonsense(body: dict[str, Any]) -> Any:
        raise web.HTTPOk(text='{"results": 3}')

    async def fails(*asked: Any, **how: Any) -> Any:
        raise ZeroDivisionError("odd")

    async def main(watched: Answer, said: str, fail: bool) -> None:
        async with faked(model, hang, watched) as server:
            waits = asyncio.ensure_future(server.generate((5,), Sampling(max_tokens=4)))
            if fail:
                server._client.call_workers = fails  # type: ignore[method-assign]
            with pytest.raises(WorkerDied, match=said):
                await asyncio.wait_for(waits, 10)
            if fail:
                del server._client.call_workers

    asyncio.run(main(nonsense, r"/collective_rpc answered with \{'results': 3\}, which is no list of results$", False))
    asyncio.run(main(hang, "can't be watched any more: ZeroDivisionError: odd$", True))
