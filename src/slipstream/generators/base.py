"""What every generator is: something that draws completions from the newest weights it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from slipstream.rollout import Completion, Sampling

# What new weights do to a sequence in flight: it keeps its keys and values, they are computed again, it starts again
# from its prompt, or there is none, because the swap waits for them to finish.
Interruption = Literal["continue", "recompute", "retry", "drain"]


class Generator(Protocol):
    """Draws completions. A pool of generators, or a wrapper around one, has the same three members."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Draw one completion; many calls run at once. Raises `GenerationError` for a request it can't serve."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights that the next token is drawn with."""
        ...

    async def close(self) -> None: ...


class GenerationError(RuntimeError):
    """A request that no generator of this run can serve, such as a prompt longer than the context."""


class ContextFull(GenerationError):
    """A prompt that leaves no room in the context for a token."""


class EngineFailed(RuntimeError):
    """An engine that can't go on. What it was asked for might be served well by another."""


def refused_logits(position: int) -> GenerationError:
    """The failure of a request for which the model's logits are no distribution at token `position`, from 1."""
    return GenerationError(
        f"the model's logits are not finite at token {position} of the completion, so no token can be drawn; check "
        "the weights for NaN or infinities"
    )


def refuse_length(found: str, tokens: int, context: int) -> None:
    """Raise `ContextFull`, which says what was `found`, for a prompt of at least so many tokens if no other fits."""
    if tokens >= context:
        raise ContextFull(
            f"the prompt has {found}, but prompt and completion share a context of {context} tokens; shorten the "
            "prompt or raise generator.context"
        )


def refuse_prompt(prompt: Sequence[int], context: int, vocabulary: int) -> None:
    """Raise `GenerationError` for a prompt that no engine of this context and vocabulary can serve."""
    if not prompt:
        raise GenerationError("the prompt is empty; give at least one token")
    refuse_length(f"{len(prompt)} tokens", len(prompt), context)
    unknown = [token for token in prompt if not 0 <= token < vocabulary]
    if unknown:
        raise GenerationError(
            f"the prompt has the token id {unknown[0]}, and the model has ids from 0 to {vocabulary - 1}; encode it by "
            "the tokenizer of model.path"
        )
