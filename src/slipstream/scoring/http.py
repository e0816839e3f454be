"""A judge behind a URL: JSON in, a number out."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from slipstream.config import ConfigError
from slipstream.environments.base import Codec, Task
from slipstream.environments.scoring import ScoringError
from slipstream.rollout import Rollout
from slipstream.scoring.base import take

DEFAULTS = {"url": None, "timeout": 30.0, "retries": 3, "backoff": 0.5, "token_env": ""}
LONGEST_PAUSE = 30.0  # seconds between two attempts, whatever the judge asks for
LARGEST_ANSWER = 2**20
SHOWN = 200


class _Failed(Exception):
    """One attempt failed. `reason` is short enough to be counted by; `pause`: seconds that the judge asks to wait."""

    def __init__(self, reason: str, detail: str = "", *, again: bool = True, pause: float = 0.0) -> None:
        super().__init__(detail)
        self.reason, self.again, self.pause = f"judge {reason}", again, pause


class Judge:
    """POSTs each rollout to `url` and takes the answer for its reward.

    An attempt that gets no answer within `timeout` seconds, no connection, or status 429 or 5xx is made again,
    `retries` times, after `backoff` seconds and twice as many each time; they are counted by reason. A variable of the
    environment that `token_env` names goes along as a bearer token. Raises `ConfigError` for options that can't be.
    """

    def __init__(self, options: Mapping[str, Any], codec: Codec) -> None:
        taken = take(options, DEFAULTS, "http")
        self._url, self._attempts = taken["url"], taken["retries"] + 1
        self._timeout, self._backoff = taken["timeout"], taken["backoff"]
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"scoring.options.url = {self._url!r} is no URL; give one such as http://host:8000/score")
        for name in ("timeout", "retries", "backoff"):
            if taken[name] < 0 or not math.isfinite(taken[name]):
                raise ConfigError(f"scoring.options.{name} = {taken[name]} must be 0 or more")
        self._headers = _headers(taken["token_env"])
        self._codec = codec
        self._session: Any = None
        self.retries: Counter[str] = Counter()
        try:
            import aiohttp  # noqa: F401
        except ImportError:
            raise ConfigError("scoring.kind = \"http\" needs aiohttp: pip install 'slipstream-rl[judge]'") from None

    async def score(self, task: Task, rollout: Rollout) -> Any:
        """What the judge answers, made again where that may help. Raises `ScoringError`."""
        question = describe(task, rollout, self._codec)
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._ask(question)
            except _Failed as failure:
                if attempt == self._attempts or not failure.again:
                    tried = f" after {attempt} attempts" if attempt > 1 else ""
                    raise ScoringError(failure.reason, f"{self._url}: {failure}{tried}") from None
                self.retries[failure.reason] += 1
                pause = self._backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)  # not all at the same moment
                await asyncio.sleep(min(LONGEST_PAUSE, max(pause, failure.pause)))
        raise AssertionError("there is at least one attempt")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, question: Any) -> Any:
        """One attempt. Raises `_Failed`."""
        import aiohttp

        if self._session is None:  # here, where there is a loop; the stage limits how many ask at once
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers)
        try:
            limit = aiohttp.ClientTimeout(self._timeout or None)
            async with self._session.post(self._url, json=question, timeout=limit, allow_redirects=False) as response:
                body = await response.content.read(LARGEST_ANSWER)
                while not response.content.at_eof() and len(body) < LARGEST_ANSWER:
                    body += await response.content.read(LARGEST_ANSWER)
                status, wait = response.status, response.headers.get("Retry-After", "")
        except TimeoutError:
            raise _Failed("timeout", f"no answer within {self._timeout:g} s") from None
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, ConnectionError) as error:
            raise _Failed("unreachable", str(error)) from None
        except aiohttp.ClientError as error:
            raise _Failed(type(error).__name__, str(error)) from None
        if status != 200:
            shown = body[:SHOWN].decode(errors="replace")
            pause = float(wait) if wait.isdigit() else 0.0
            raise _Failed(f"HTTP {status}", shown, again=status == 429 or status >= 500, pause=pause)
        return parse(body)


def describe(task: Task, rollout: Rollout, codec: Codec) -> dict[str, Any]:
    """The question: the task, and every completion of the rollout as text and as tokens."""
    return {
        "task": {"id": task.id, "prompt": task.prompt, "data": task.data},
        "completions": [
            {
                "prompt": codec.decode(c.prompt_ids), "text": c.text, "token_ids": list(c.token_ids),
                "finish_reason": c.finish_reason,
            }
            for c in rollout.completions
        ],
        "reward": rollout.reward if math.isfinite(rollout.reward) else None,
        "metrics": rollout.metrics,
    }  # fmt: skip


def parse(body: bytes) -> Any:
    """The answer: a number or a mapping. Raises `_Failed`."""
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if isinstance(answer, bool) or not isinstance(answer, int | float | dict):
        raise _Failed("answer", f"no number and no object: {body[:SHOWN].decode(errors='replace')}", again=False)
    return answer


def _headers(token_env: str) -> dict[str, str]:
    if not token_env:
        return {}
    if token_env not in os.environ:
        raise ConfigError(
            f"scoring.options.token_env = {token_env!r}, but there is no such variable in the environment"
        )
    return {"Authorization": f"Bearer {os.environ[token_env]}"}
