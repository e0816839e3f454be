"""The scorer of `scoring.kind = "http"`: POSTs each rollout as JSON to a URL, and returns the answer."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from slipstream.config.section import ConfigError, Section, bearer_headers, is_url, parse_options
from slipstream.environments.base import Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.reward_workers import ScoringError
from slipstream.rollout import Rollout

MAX_PAUSE_S = 30.0  # between two attempts, also if Retry-After is longer
MAX_ANSWER = 2**20  # bytes
MAX_SHOWN = 200  # bytes of an answer in an error message


class JudgeOptions(Section):
    """Options of `scoring.kind = "http"`: `timeout` of an attempt (0: no limit) and first `backoff` in seconds.

    `token_env` names the environment variable that holds the bearer token.
    """

    url: str
    timeout: float = Field(30.0, ge=0)
    retries: int = Field(3, ge=0)
    backoff: float = Field(0.5, ge=0)
    token_env: str = ""


class _AttemptFailed(Exception):
    """One attempt failed. `reason` is a short category; `pause`: seconds of the judge's Retry-After."""

    def __init__(self, reason: str, detail: str = "", *, retry: bool = True, pause: float = 0.0) -> None:
        super().__init__(detail)
        self.reason, self.retry, self.pause = f"judge {reason}", retry, pause


class Judge:
    """POSTs each rollout to `url` and returns the judge's answer: a reward, or an object with the fields of `Answer`.

    Retries a timeout, a failed connection, and status 429 or 5xx up to `retries` times, with exponential backoff from
    `backoff` seconds; `self.retries` counts them by reason. `token_env` names an environment variable with a bearer
    token. Raises `ConfigError` for invalid options.
    """

    def __init__(self, options: Mapping[str, Any], tokenizer: ChatTokenizer) -> None:
        taken = parse_options("scoring", JudgeOptions, options)
        self._url, self._attempts = taken.url, taken.retries + 1
        self._timeout, self._backoff = taken.timeout, taken.backoff
        if not is_url(self._url):
            raise ConfigError(
                f"scoring.options.url = {self._url!r} is not a URL; give one such as http://host:8000/score"
            )
        self._headers = bearer_headers("scoring", taken.token_env)
        self._tokenizer = tokenizer
        self._session: Any = None
        self.retries: Counter[str] = Counter()
        try:
            import aiohttp  # noqa: F401
        except ImportError:
            raise ConfigError("scoring.kind = \"http\" needs aiohttp: pip install 'slipstream-rl[judge]'") from None

    async def score(self, task: Task, rollout: Rollout) -> Any:
        """The judge's answer, after retries. Raises `ScoringError`."""
        request = judge_request(task, rollout, self._tokenizer)
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._post(request)
            except _AttemptFailed as failure:
                if attempt == self._attempts or not failure.retry:
                    tried = f" after {attempt} attempts" if attempt > 1 else ""
                    raise ScoringError(failure.reason, f"{self._url}: {failure}{tried}") from None
                self.retries[failure.reason] += 1
                pause = self._backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)  # jitter
                await asyncio.sleep(min(MAX_PAUSE_S, max(pause, failure.pause)))
        raise AssertionError("there is at least one attempt")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _post(self, request: Any) -> Any:
        """One attempt. Raises `_AttemptFailed`."""
        import aiohttp

        if self._session is None:  # needs a running event loop; `ScoringStage` limits concurrency
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers)
        try:
            limit = aiohttp.ClientTimeout(self._timeout or None)
            async with self._session.post(self._url, json=request, timeout=limit, allow_redirects=False) as response:
                body = await response.content.read(MAX_ANSWER)
                while not response.content.at_eof() and len(body) < MAX_ANSWER:
                    body += await response.content.read(MAX_ANSWER)
                status, wait = response.status, response.headers.get("Retry-After", "")
        except TimeoutError:
            raise _AttemptFailed("timeout", f"no answer within {self._timeout:g} s") from None
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, ConnectionError) as error:
            raise _AttemptFailed("unreachable", str(error)) from None
        except aiohttp.ClientError as error:
            raise _AttemptFailed(type(error).__name__, str(error)) from None
        if status != 200:
            shown = body[:MAX_SHOWN].decode(errors="replace")
            pause = float(wait) if wait.isdigit() else 0.0
            raise _AttemptFailed(f"HTTP {status}", shown, retry=status == 429 or status >= 500, pause=pause)
        return parse_answer(body)


def judge_request(task: Task, rollout: Rollout, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """The request's JSON: the task, the rollout's completions as text and tokens, its reward so far, and metrics."""
    return {
        "task": {"id": task.id, "prompt": task.prompt, "data": task.data},
        "completions": [
            {
                "prompt": tokenizer.decode(c.prompt_ids), "text": c.text, "token_ids": list(c.token_ids),
                "finish_reason": c.finish_reason,
            }
            for c in rollout.completions
        ],
        "reward": rollout.reward if math.isfinite(rollout.reward) else None,
        "metrics": rollout.metrics,
    }  # fmt: skip


def parse_answer(body: bytes) -> Any:
    """The judge's answer from JSON: a number or a mapping, which `scoring.base.apply_answer` validates.

    Raises `_AttemptFailed` for anything else.
    """
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if isinstance(answer, bool) or not isinstance(answer, int | float | dict):
        shown = body[:MAX_SHOWN].decode(errors="replace")
        raise _AttemptFailed("answer", f"neither a number nor an object: {shown}", retry=False)
    return answer
