"""Commands to a run from other processes: over the socket in its directory, and on Ray through its mailbox.

A request is a line of JSON with a command and its arguments. An error of a request never ends the run.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from slipstream.config.section import MAX_WORKERS
from slipstream.controller.engine_supervisor import scale
from slipstream.controller.finish import record_pause, stop_run
from slipstream.controller.run_context import RunContext
from slipstream.environments.base import Policy
from slipstream.generators.pool import EngineReplica
from slipstream.runtime.control_socket import ControlError, serve_socket
from slipstream.runtime.runtime import current_runtime
from slipstream.runtime.worker_process import alive_workers

MAX_METRICS = 1000  # steps in one answer
SAMPLING = ("temperature", "top_k", "top_p", "max_tokens", "stop_strings", "seed", "ignore_eos")
COMPLETION = ("prompt_ids", "token_ids", "logprobs", "spans", "finish_reason", "temperature", "text")
SHOWN = {
    "reward": "reward/mean", "lag_mean": "lag/mean", "lag_max": "lag/max", "tokens_per_s": "gen/tokens_per_s",
    "train_tokens_per_s": "train/tokens_per_s",
}  # fmt: skip


@asynccontextmanager
async def serve_commands(run: RunContext) -> AsyncIterator[None]:
    """Context in which the run answers commands."""
    directory = run.directory.path.absolute()
    async with serve_socket(directory, Commands(run).answer), current_runtime().forward(directory):
        yield


class Commands:
    """The commands `status`, `metrics`, `generate`, `scale`, `pause`, `resume`, `checkpoint` and `stop` of a run.

    Each is a method, with the arguments of `slipstream.client.RunHandle`'s.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._started_at = time.time()
        self._draws = 0
        self._scaling = asyncio.Lock()
        self._commands = {
            method.__name__: method
            for method in (
                self.status, self.metrics, self.generate, self.scale, self.pause, self.resume, self.checkpoint,
                self.stop,
            )
        }  # fmt: skip

    async def answer(self, line: bytes) -> bytes:
        """The answer to one request."""
        try:
            result = await self._call(line)
        except Exception as error:  # the run goes on
            return json.dumps({"error": " ".join(str(error).split()) or type(error).__name__}).encode()
        # Pure Python in a thread: a C call would hold the interpreter for the length of a long completion.
        encoder = json.JSONEncoder(default=list)
        return (await asyncio.to_thread(lambda: "".join(encoder.iterencode({"result": result})))).encode()

    async def _call(self, line: bytes) -> Any:
        """Run the command of a request. Raises `ControlError` for a malformed request."""
        try:
            request = json.loads(line)
            command, arguments = request["command"], {**request.get("arguments", {})}
            method = self._commands.get(command)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            message = 'a request is a line such as {"command": "status", "arguments": {}}'
            raise ControlError(message) from None
        if not method:
            raise ControlError(f"there is no command {command!r:.80}; there are {', '.join(self._commands)}")
        try:
            inspect.signature(method).bind(**arguments)
        except TypeError as error:
            raise ControlError(f"{command}: {error}") from None
        return await method(**arguments)

    async def status(self) -> dict[str, Any]:
        run, latest, directory = self._run, self._run.progress.latest, self._run.directory.path.absolute()
        engines = run.started_cluster.generator.generators if run.started_cluster else ()
        workers = [
            {
                "name": w.name,
                "pending_calls": w.pending_calls,
                "seconds_since_progress": round(w.seconds_since_progress, 1),
            }
            for w in alive_workers()
        ]
        return {
            "name": directory.name, "directory": str(directory), "state": state(run), "host": socket.gethostname(),
            "pid": os.getpid(), "started_at": self._started_at, "step": run.state.step, "steps": run.config.loop.steps,
            "version": run.state.version, "eta_s": run.progress.seconds_left,
            **{name: latest.get(metric) for name, metric in SHOWN.items()},
            "groups_ready": len(run.state.ready), "groups_in_flight": run.state.running,
            "engines": [_describe_engine(engine) for engine in engines], "workers": workers,
        }  # fmt: skip

    async def metrics(self, last: int = 1) -> list[dict[str, Any]]:
        if not isinstance(last, int) or not 1 <= last <= MAX_METRICS:
            raise ControlError(f"last = {last!r:.80} must be a whole number from 1 to {MAX_METRICS}")
        return await asyncio.to_thread(self._read_metrics, last)

    def _read_metrics(self, last: int) -> list[dict[str, Any]]:
        try:
            with self._run.directory.metrics.open() as file:
                return [json.loads(line) for line in deque(file, maxlen=last) if line.endswith("\n")]
        except FileNotFoundError:
            return []

    async def generate(self, prompt: Any, sampling: dict[str, Any]) -> dict[str, Any]:
        run = self._run
        self._refuse_if_starting()
        name = sampling.pop("policy", "") if run.policies else ""
        if unknown := [option for option in sampling if option not in SAMPLING]:
            raise ControlError(f"generate has no option {unknown[0]!r:.80}; it takes {', '.join(SAMPLING)}")
        self._draws += 1
        seed = f"{run.config.loop.seed}/command/{self._draws}"
        whole = Policy(run.cluster.generator, run.chat_tokenizer, run.sampling, seed, policies=run.policies)
        if run.policies and name not in run.policies:
            raise ControlError(f"generate needs policy = one of {', '.join(run.policies)}, not {name!r:.80}")
        policy = whole[name] if run.policies else whole
        completion = await policy.sample(prompt, **sampling, record_sampling_mask=False, record_routing=False)
        return {name: getattr(completion, name) for name in COMPLETION}

    async def scale(self, engines: int) -> str:
        if not isinstance(engines, int) or isinstance(engines, bool) or not 1 <= engines <= MAX_WORKERS:
            raise ControlError(
                f"engines = {engines!r:.80} must be a whole number from 1 to {MAX_WORKERS}; "
                "`slipstream pause` lets all engines wait"
            )
        self._refuse_if_starting()
        if self._scaling.locked():
            raise ControlError("the number of engines is being changed already; try again when that has ended")
        async with self._scaling:
            await scale(self._run, engines)
        return state(self._run)

    async def pause(self) -> str:
        self._refuse_if_ending()
        if not self._run.paused:
            self._run.paused = True
            self._run.paused_at = self._run.events.now()
            self._run.progress.note("paused: no group starts and no step is taken until `slipstream resume`")
        return state(self._run)

    async def resume(self) -> str:
        self._refuse_if_ending()
        if self._run.paused:
            self._run.paused = False
            record_pause(self._run)
            self._run.progress.resumed()
            self._run.changed.set()
        return state(self._run)

    async def checkpoint(self) -> str:
        run = self._run
        run.requested_checkpoint = run.requested_checkpoint or asyncio.get_running_loop().create_future()
        run.changed.set()
        return await asyncio.shield(run.requested_checkpoint)  # other clients may wait for it, too

    async def stop(self) -> str:
        if not self._run.stopped:
            stop_run(self._run, "slipstream stop", "Ctrl-C stops at once")
        return state(self._run)

    def _refuse_if_starting(self) -> None:
        if not self._run.begun:
            raise ControlError('the run is starting; try again when its state is "running"')

    def _refuse_if_ending(self) -> None:
        if self._run.ending:
            raise ControlError(f"the run is {state(self._run)} after step {self._run.state.step}")


def state(run: RunContext) -> str:
    """What the run does: "starting", "running", "paused", "finishing" after the last step, or "stopping"."""
    if run.stopped:
        return "stopping"
    if not run.begun:
        return "starting"
    if run.complete:
        return "finishing"
    return "paused" if run.paused else "running"


def _describe_engine(engine: EngineReplica) -> dict[str, Any]:
    dead = str(engine.process.dead).partition("\n")[0] if engine.process.dead else None
    return {
        "name": engine.process.name, "alive": dead is None, "died_of": dead, "version": engine.version,
        "pending_requests": engine.pending_requests,
    }  # fmt: skip
