"""The engine's end of the `lora` link: one adapter of vLLM's a version, kept as long as a sequence draws by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.config import HIGHEST_RANK, Config
from slipstream.generators.vllm_calls import Answer
from slipstream.sync.link import Ticket
from slipstream.vllm_releases import post

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, HIGHEST_RANK)  # that vLLM makes room for


class AdapterWeights:
    """Serves the newest adapter to whoever starts, and every older one until its last user ends."""

    def __init__(self, llm: Any, limit: int) -> None:
        self._llm, self._limit = llm, limit
        self._users: Counter[int] = Counter()
        self._coming: Any = None  # a `LoRARequest`
        self._held = 0.0
        self.current: Any = None

    def prepare(self, ticket: Ticket) -> None:
        """Begin to load a version beside those that are served: workers read it while they go on."""
        from slipstream.generators.vllm_loader import request_of

        asked = post(self._llm, "slipstream_load", ticket)
        self._loaded = Answer(self._llm, "slipstream_loaded", asked)
        self._coming = request_of(ticket)

    def prepared(self) -> bool:
        """Whether every worker has it in its slot. Raises what went wrong."""
        waits = self._loaded.get()
        self._held = max(waits) if waits else 0.0
        return waits is not None

    def apply(self) -> Callable[[], dict[str, int]]:
        """New sequences take the new adapter from here on. Nothing waits, and no sequence in flight changes."""
        self._serve(self._coming)
        return dict

    def load(self, path: str) -> None:
        """Have vLLM itself load an adapter, for new sequences."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest("from files", 1, path)
        self._llm.add_lora(request)
        self._serve(request)

    def held(self) -> float:
        """Seconds for which passes waited until the newest adapter was known."""
        return self._held

    def check(self, names: Sequence[str]) -> None:
        """Begin to add up parameters of the newest adapter as they lie on the workers' devices."""
        asked = post(self._llm, "slipstream_check", list(names))
        self._checked = Answer(self._llm, "slipstream_checked", asked)

    def checked(self) -> dict[str, int] | None:
        """The checksums, once they are there. Raises if a worker has other values in the slot than on its device, or
        than another has."""
        answers = self._checked.get()
        if answers is None:
            return None
        if any(answer != answers[0] for answer in answers):
            raise RuntimeError("vLLM's workers have different adapters")
        return {name: int(value) for name, value in answers[0].items()}

    def close(self) -> None: ...

    def overflow(self) -> int | None:
        """The oldest adapter in use, where there are more of them than vLLM has room for."""
        used = sorted({number for number, users in self._users.items() if users} | {self.current.lora_int_id})
        return used[0] if len(used) > self._limit else None

    def began(self) -> int:
        """A sequence starts. Returns the adapter that it draws by."""
        number: int = self.current.lora_int_id
        self._users[number] += 1
        return number

    def ended(self, number: int) -> None:
        """A sequence that drew by this adapter has ended."""
        self._users[number] -= 1
        self._unload_unused(number)

    def _serve(self, request: Any) -> None:
        old, self.current = self.current, request
        if old:
            self._unload_unused(old.lora_int_id)

    def _unload_unused(self, number: int) -> None:
        if not self._users[number] and number != self.current.lora_int_id:
            self._llm.remove_lora(number)


def arguments(config: Config) -> dict[str, Any]:
    """vLLM's engine arguments for the adapters of a configuration.

    There is a slot for every version that may be in use and for the one that comes: none that is in use is ever moved.
    """
    versions = config.loop.max_lag + 3
    rank = next(r for r in RANKS if r >= config.lora.rank)
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": versions}
