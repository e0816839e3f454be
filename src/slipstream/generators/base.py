"""The protocols of generators and engines, and the errors of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from slipstream.errors import UserError
from slipstream.rollout import Completion, Sampling

if TYPE_CHECKING:
    from slipstream.sync.link import ConnectionInfo, PublishHandle

# Handling of sequences in flight at a swap: keep their keys and values, recompute them, restart from the prompt, or
# finish the sequences before the swap.
Interruption = Literal["continue", "recompute", "retry", "drain"]
# vLLM's tags for `EngineWorker.wake`: two kinds of memory, and the end of a pause. `AWAKE`: it samples again.
WEIGHTS, KV_CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
AWAKE = frozenset({KV_CACHE, SCHEDULING})


class Generator(Protocol):
    """Samples completions. A pool of generators, or a wrapper around one, has the same three members."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion; many calls run at once. Raises `GenerationError` for an invalid request.

        Of a failed engine it raises `EngineFailed`, or `WorkerDied` if it had its own process.
        """

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""

    async def close(self) -> None: ...


class EngineWorker(Protocol):
    """One engine as the controller calls it: a worker in its own process, or a vLLM server."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion. Cancelling the call aborts the request. Raises as `Generator.generate`."""

    async def longest_in_flight(self) -> int:
        """Sampled tokens of the longest sequence in flight; 0 without one."""

    async def stats(self) -> dict[str, float]:
        """Totals since the start: `tokens` sampled, `tokens_discarded`, and `busy_s` (seconds)."""

    async def connect(self, connection_info: ConnectionInfo, rank: int) -> None:
        """Open the engine's end of the weight link; `rank` is the link rank of the engine's first process."""

    async def prepare(self, handle: PublishHandle) -> str:
        """Receive a version while decoding continues. Returns "" when the whole version is staged.

        Returns why the version did not arrive if it may arrive later, or a newer one may.
        """

    async def swap(self, version: int) -> tuple[float, dict[str, float]] | None:
        """Serve the staged version. Returns the pause in seconds, and `stats`.

        Returns None if the swap failed and the engine serves the version before it.
        """

    async def checksums(self, names: Sequence[str]) -> dict[str, int]:
        """Checksum of each of these parameters as served."""

    async def sleep(self, level: int) -> None:
        """Stop sampling. At level 1 and 2, also free GPU memory of keys, values and weights; level 1 keeps weights in
        host memory, 2 may discard them."""

    async def wake(self, tags: Sequence[str]) -> None:
        """Allocate memory for "weights" or the "kv_cache" again; with both, decoding continues."""

    async def export_ipc_handles(self, shapes: dict[str, list[int]]) -> list[dict[str, str]]:
        """IPC handles of each rank's served weights, for a trainer that computes on them (`sync.single_copy`)."""

    async def set_version(self, version: int) -> None:
        """Set the version that the engine serves: that of the files on which it was started."""


class GenerationError(UserError):
    """An invalid request, such as a prompt longer than the context: no generator of this run can serve it."""


class ContextFull(GenerationError):
    """A prompt that fills the context, without room for a token."""


class EngineFailed(UserError):
    """A failed engine. Another engine may serve its requests."""


def nonfinite_logits_error(position: int) -> GenerationError:
    """The error for logits that are no distribution at token `position`, counted from 1."""
    return GenerationError(
        f"the model's logits are not finite at token {position} of the completion, so no token can be sampled; check "
        "the weights for NaN or infinities"
    )


def finish_request(request: asyncio.Future[Completion], outcome: Completion | GenerationError | EngineFailed) -> None:
    """Set the result or error of a request, unless it was cancelled."""
    if request.done():
        return
    if isinstance(outcome, Completion):
        request.set_result(outcome)
    else:
        request.set_exception(outcome)


def validate_length(found: str, tokens: int, context: int) -> None:
    """Raise `ContextFull` for a prompt of at least `tokens` tokens that fills the context; `found` describes it."""
    if tokens >= context:
        raise ContextFull(
            f"the prompt has {found}, but prompt and completion share a context of {context} tokens; shorten the "
            "prompt or raise generator.max_model_len"
        )


def validate_prompt(prompt: Sequence[int], context: int, vocabulary: int) -> None:
    """Raise `GenerationError` for a prompt that is empty, too long, or has a token outside the vocabulary."""
    if not prompt:
        raise GenerationError("the prompt is empty; give at least one token")
    validate_length(f"{len(prompt)} tokens", len(prompt), context)
    unknown = [token for token in prompt if not 0 <= token < vocabulary]
    if unknown:
        raise GenerationError(
            f"the prompt has the token id {unknown[0]}, and the model has ids from 0 to {vocabulary - 1}; encode it by "
            "the tokenizer of model.path"
        )
