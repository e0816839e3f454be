"""Mixtures of experts: which experts a forward pass chose, using those of another pass instead, and their load.

Generator and trainer round differently, and weights move between them, so that a router on the edge between two experts
chooses one here and the other there: the token was drawn by another network than the one that is trained. So generators
record what their routers chose, and the trainer's choose the same (routing replay, Ma et al. 2025, arXiv:2510.11370;
"keep routing" in DeepSeek-V3.2, arXiv:2512.02556). The chosen experts' weights are the policy's as it is now, and that
is where the router's gradient comes from.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.config import ConfigError
from slipstream.models import routers_of

PROBED = 64  # tokens on which a router shows how it weighs experts


class Rule(NamedTuple):
    """How a router weighs the experts that it chose: their scores, divided by the sum of them or not, times `scale`."""

    sigmoid: bool
    normalised: bool
    scale: float

    def weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Weights `[tokens, experts per token]` of these experts, from logits `[tokens, experts]`."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = (logits.sigmoid() if self.sigmoid else logits.softmax(-1)).gather(-1, experts)
        return self.scale * (scores / scores.sum(-1, keepdim=True) if self.normalised else scores)


class Routing:
    """The routers of a model, in order; a dense one has none."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)
        self._layers = [_number(name) for name in self._routers]
        for router in self._routers.values():
            router.rule, router.recorded, router.chosen = rule_of(router), None, None
            if router.rule:
                router.register_forward_hook(_replay)
        self._load: Tensor | None = None

    @property
    def experts(self) -> int:
        """How many a layer has to choose from; 0 in a dense model."""
        return max((len(router.weight) for router in self._routers.values()), default=0)

    def chosen(self) -> Tensor:
        """What the routers chose in the last forward pass, `[tokens, layers with a router, experts per token]`."""
        return torch.stack([router.chosen for router in self._routers.values()], 1)

    def replay(self, experts: Tensor | None) -> None:
        """Use these experts `[tokens, layers, experts per token]` in the passes that follow, backward ones included;
        the routers' own where they are -1, or None. `layers` are those that have a router, or all.

        Raises `ConfigError` for a router through which that can't be done.
        """
        if experts is not None:
            self._refuse_unknown()
        one_each = experts is None or experts.shape[1] == len(self._routers)
        columns = range(len(self._routers)) if one_each else self._layers
        for router, column in zip(self._routers.values(), columns, strict=True):
            router.recorded = None if experts is None else experts[:, column]

    def _refuse_unknown(self) -> None:
        known = [r for r in self._routers.values() if r.rule]
        if not known or len(known) < len(self._routers):
            kinds = {type(r).__name__ for r in self._routers.values() if not r.rule} or {"this model's routers"}
            raise ConfigError(
                f"routing can't be replayed through {', '.join(kinds)}: how they weigh experts is not known here; set "
                "algorithm.keep_routing = false"
            )

    @torch.no_grad()
    def count(self) -> None:
        """Add the last forward pass to the load."""
        for row, router in zip(self._counts(), (r for r in self._routers.values() if r.rule), strict=True):
            used = router.chosen
            if router.recorded is not None:
                used = _filled(router.recorded, router.chosen)
                row[-2] += (router.recorded >= 0).sum()
                row[-1] += (used[:, :, None] != router.chosen[:, None]).all(-1).sum()
            row[:-2] += torch.bincount(used.flatten(), minlength=len(row) - 2)

    def read(self, add: Callable[[Tensor], Tensor] = lambda counts: counts) -> dict[str, Any]:
        """What was counted since the last reading, by all ranks whose counts are summed by `add`: means over layers.

        Names are those of `StepStats`; None for each where nothing was counted.
        """
        counts, self._load = self._counts(), None
        summed = add(counts) if len(counts) else counts
        load, replayed, changed = summed[:, :-2], summed[:, -2].sum(), summed[:, -1].sum()
        if not load.any():
            return dict.fromkeys(("expert_busiest", "expert_entropy", "experts_idle", "experts_changed"))
        share = load / load.sum(-1, keepdim=True)
        entropy = torch.special.entr(share).sum(-1) / torch.tensor(share.shape[-1]).log()
        return {
            "expert_busiest": share.amax(-1).mean().item(),
            "expert_entropy": entropy.mean().item(),
            "experts_idle": (load == 0).double().mean().item(),
            "experts_changed": float(changed / replayed) if replayed else 0.0,
        }

    def _counts(self) -> Tensor:
        """Tokens of each expert, then choices that were replayed, and changed by that: `[layers, experts + 2]`."""
        known = [router.weight.device for router in self._routers.values() if router.rule]
        if self._load is None:
            device = known[0] if known else None
            self._load = torch.zeros(len(known), self.experts + 2, dtype=torch.float64, device=device)
        return self._load


def rule_of(router: Any) -> Rule | None:
    """The rule by which this router weighs experts, found by trying them on random tokens; None if it has another."""
    tried = copy.deepcopy(router).to("cpu", torch.float32)
    random = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            # Fresh routers may weigh all experts alike, which is in accord with every rule.
            tried.weight.copy_(torch.randn(tried.weight.shape, generator=random) / tried.weight.shape[1] ** 0.5)
            logits, weights, experts, *_ = tried(torch.randn(PROBED, tried.weight.shape[1], generator=random))
            return _rule(logits, weights, experts)
    except (TypeError, ValueError, AttributeError, RuntimeError):  # it wants, or returns, something else
        return None


def _rule(logits: Tensor, weights: Tensor, experts: Tensor) -> Rule | None:
    for sigmoid in (False, True):
        for normalised in (True, False):
            plain = Rule(sigmoid, normalised, 1.0).weights(logits, experts)
            scale = float((weights / plain).mean())
            if torch.allclose(weights, scale * plain, rtol=1e-4):
                return Rule(sigmoid, normalised, round(scale, 4))
    return None


def _replay(router: Any, _: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """A hook behind a router: the recorded experts for its own, weighed by its logits."""
    logits, weights, router.chosen, *others = output
    if router.recorded is None:
        return None
    experts = _filled(router.recorded, router.chosen)
    return (logits, router.rule.weights(logits, experts).to(weights.dtype), experts, *others)


def _filled(recorded: Tensor, own: Tensor) -> Tensor:
    """The recorded experts, and a router's own where none are recorded."""
    return torch.where(recorded < 0, own, recorded.to(own.dtype))


def _number(name: str) -> int:
    """Which layer a module of this name is in."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else 0
