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
