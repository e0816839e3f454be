"""Drive a run from another process.

    run = slipstream.attach("runs/gsm8k-20260101-120000")
    run.status()["state"]                     # "running"
    run.generate("2 + 2 =", max_tokens=8).text
    run.pause()

Each call is one request to the controller, over the socket in the run directory or through the run's mailbox on a Ray
cluster. Handles hold no connection: they may be copied, used by several threads, and kept for as long as needed.
"""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.schema import ConfigError
from slipstream.rollout import Completion, VersionSpan
from slipstream.runtime.control_socket import FOLDER, HOST, ControlError, Gone, request
from slipstream.runtime.run_files import read_summary

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


def attach(run: str | Path, address: str = "", timeout: float = 30.0) -> RunHandle:
    """The handle of a running run. `run` is its directory, or its name on the Ray cluster at `address` ("auto": found).

    `timeout` (seconds) limits commands that the controller alone answers: `generate` and `checkpoint` have no limit.
    Raises `ConfigError` if the run is over, was killed, or can't be reached.
    """
    handle = RunHandle(str(run) if address else str(Path(run).absolute()), address, timeout)
    handle.status()
    return handle


@dataclass(frozen=True)
class RunHandle:
    """A running run. Every method raises `ConfigError` with one line if the run refuses, is over or doesn't answer."""

    run: str
    address: str = ""
    timeout: float = 30.0

    def status(self) -> dict[str, Any]:
        """State ("starting", "running", "paused", "stopping", "finishing"), step, engines, workers and more.

        docs/control.md has a table of all keys.
        """
        return dict(self._ask("status"))

    def metrics(self, last: int = 1) -> list[dict[str, Any]]:
        """The records of the last steps, at most 1,000, as in `metrics.jsonl`; the newest is the last."""
        return list(self._ask("metrics", last=last))

    def generate(self, prompt: Prompt, **sampling: Any) -> Completion:
        """Sample a completion of text, chat messages or token ids from the live policy, with versions of its tokens.

        `sampling` overrides the run's: temperature, top_k, top_p, max_tokens, stop_strings, seed, ignore_eos. A run of
        several policies needs `policy`, the name of one.
        """
        answer = self._ask("generate", limited=False, prompt=prompt, sampling=sampling)
        return Completion(**answer | {"spans": tuple(VersionSpan(*span) for span in answer["spans"])})

    def scale(self, engines: int) -> str:
        """Change the number of engines; further ones start in the background. Returns the state of the run."""
        return str(self._ask("scale", limited=False, engines=engines))

    def pause(self) -> str:
        """Start no further group and take no further step; rollouts in flight finish. Returns the state."""
        return str(self._ask("pause"))

    def resume(self) -> str:
        """Continue after `pause`. Returns the state."""
        return str(self._ask("resume"))

    def checkpoint(self) -> Path:
        """Write a checkpoint after the current step. Returns its path once it is complete."""
        return Path(self._ask("checkpoint", limited=False))

    def stop(self) -> str:
        """End the run after the current step, as Ctrl-C does. Returns the state, without waiting for the end."""
        return str(self._ask("stop"))

    def _ask(self, command: str, *, limited: bool = True, **arguments: Any) -> Any:
        """The result of a command, within `timeout` if it is `limited`, else for as long as the run lives."""
        try:
            line = json.dumps({"command": command, "arguments": arguments}).encode()
        except (TypeError, ValueError) as error:
            raise ControlError(f"{command}: the arguments can't be sent as JSON: {error}") from None
        answer = json.loads(self._send(line, self.timeout if limited else None))
        if "error" in answer:
            raise ControlError(f"{self.run}: {answer['error']}")
        return answer["result"]

    def _send(self, line: bytes, timeout: float | None) -> bytes:
        if self.address:
            try:
                from slipstream.runtime.ray.mailbox import request as request_on_ray
            except ImportError as error:
                raise ConfigError(
                    f'address = "{self.address}" needs Ray ({error}): pip install "slipstream-rl[ray]"'
                ) from None
            return bytes(request_on_ray(self.address, self.run, line, timeout))
        try:
            return request(Path(self.run), line, timeout)
        except Gone as error:
            raise Gone(f"{error}: {describe_ended(Path(self.run))}") from None


def describe_ended(run: Path) -> str:
    """Why no controller answers in this directory, and what to do."""
    if not run.is_dir():
        return "it is no directory; give that of a run (`slipstream runs` lists them), or --address and the run's name"
    host, again = "", f"slipstream train --resume {shlex.quote(str(run))}"
    with suppress(OSError):
        host = (run / FOLDER / HOST).read_text()  # of a controller that serves the run, or was killed while it did
    if host not in ("", socket.gethostname()):
        return f"its controller is on host {host}; give the command there, or on a Ray cluster --address and its name"
    if (state := read_summary(run)) and not (run / FOLDER).exists():
        over = f"the run is over, after step {state.get('steps')}"
        return (
            f"{over}; continue it with `{again}`" if state.get("stopped") else f"{over}; its policy is {run / 'policy'}"
        )
    if (run / "config.toml").exists():
        return f"the run was killed or failed; continue it with `{again}`"
    if (run / "lock").exists():
        return "the run is starting, or its start failed; try again in a moment, or start it again"
    return "it is no run directory; `slipstream runs` lists those under runs/"
