"""Mixtures of experts: recording the experts that routers choose, replaying recorded choices, and expert load.

Engine and trainer round differently and hold different versions, so their routers may choose different experts for the
same token; the trained network then differs from the network that sampled the token. With routing replay (Ma et al.
2025, arXiv:2510.11370; "keep routing" in DeepSeek-V3.2, arXiv:2512.02556) engines record the chosen experts, and the
trainer's routers use them. The router weights of these experts come from the current policy, and carry the gradient.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.config.schema import ConfigError
from slipstream.model.inspection import find_routers

PROBE_TOKENS = 64  # random tokens from which `infer_weighting` infers a router's weighting


class RouterWeighting(NamedTuple):
    """How a router weighs chosen experts: sigmoid or softmax scores, `normalized` to sum 1 or not, times `scale`."""

    sigmoid: bool
    normalized: bool
    scale: float

    def weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Weights `[tokens, experts per token]` of these experts, from logits `[tokens, experts]`."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = (logits.sigmoid() if self.sigmoid else logits.softmax(-1)).gather(-1, experts)
        return self.scale * (scores / scores.sum(-1, keepdim=True) if self.normalized else scores)


class ExpertRouting:
    """The routers of a model in the order of layers: records, replays and counts chosen experts.

    Registers a forward hook on each router of a known weighting.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = find_routers(model)
        self._layers = [_layer_index(name) for name in self._routers]
        for router in self._routers.values():
            router.weighting, router.recorded, router.chosen = infer_weighting(router), None, None
            if router.weighting:
                router.register_forward_hook(_record_and_replay)
        self._load: Tensor | None = None

    @property
    def experts(self) -> int:
        """Number of experts of a layer; 0 for a dense model."""
        return max((len(router.weight) for router in self._routers.values()), default=0)

    def chosen(self) -> Tensor:
        """Each router's own choice in the last forward pass, even if replaced by a replay.

        Shape `[tokens, layers with a router, experts per token]`.
        """
        return torch.stack([router.chosen for router in self._routers.values()], 1)

    def replay(self, experts: Tensor | None) -> None:
        """Replay `experts` `[tokens, layers, experts per token]` in the following forward and backward passes.

        Dimension `layers` has all decoder layers, or only those with a router. A router uses its own choice for entries
        of -1; None ends the replay. Raises `ConfigError` if the weighting of a router is unknown.
        """
        if experts is not None:
            self._validate_weightings()
        only_routed = experts is None or experts.shape[1] == len(self._routers)
        columns = range(len(self._routers)) if only_routed else self._layers
        for router, column in zip(self._routers.values(), columns, strict=True):
            router.recorded = None if experts is None else experts[:, column]

    def _validate_weightings(self) -> None:
        known = [r for r in self._routers.values() if r.weighting]
        if not known or len(known) < len(self._routers):
            kinds = {type(r).__name__ for r in self._routers.values() if not r.weighting} or {"this model's routers"}
            raise ConfigError(
                f"routing can't be replayed through {', '.join(kinds)}: how they weigh experts is not known here; set "
                "algorithm.replay_routing = false"
            )

    @torch.no_grad()
    def count_choices(self, tokens: int) -> None:
        """Add the experts that the first `tokens` used in the last forward pass, replayed or chosen, to the load."""
        for row, router in zip(self._counts(), (r for r in self._routers.values() if r.weighting), strict=True):
            used = chosen = router.chosen[:tokens]
            if router.recorded is not None:
                recorded = router.recorded[:tokens]
                used = _recorded_or_own(recorded, chosen)
                row[-2] += (recorded >= 0).sum()
                row[-1] += (used[:, :, None] != chosen[:, None]).all(-1).sum()
            row[:-2] += torch.bincount(used.flatten(), minlength=len(row) - 2)

    def take_load(self, all_reduce: Callable[[Tensor], Tensor] = lambda counts: counts) -> dict[str, Any]:
        """Load statistics since the last call, as means over layers; `all_reduce` sums counts over ranks.

        Keys are fields of `StepStats`; values are None if nothing was counted.
        """
        counts, self._load = self._counts(), None
        summed = all_reduce(counts) if len(counts) else counts
        load, replayed, changed = summed[:, :-2], summed[:, -2].sum(), summed[:, -1].sum()
        if not load.any():
            return dict.fromkeys(
                ("expert_max_load", "expert_load_entropy", "expert_idle_fraction", "expert_changed_fraction")
            )
        share = load / load.sum(-1, keepdim=True)
        entropy = torch.special.entr(share).sum(-1) / torch.tensor(share.shape[-1]).log()
        return {
            "expert_max_load": share.amax(-1).mean().item(),
            "expert_load_entropy": entropy.mean().item(),
            "expert_idle_fraction": (load == 0).double().mean().item(),
            "expert_changed_fraction": float(changed / replayed) if replayed else 0.0,
        }

    def _counts(self) -> Tensor:
        """Counts since the last `take_load`, zeros at first: `[layers, experts + 2]`, of layers with supported routers.

        The columns are the tokens of each expert, replayed choices, and choices that replay changed.
        """
        known = [router.weight.device for router in self._routers.values() if router.weighting]
        if self._load is None:
            device = known[0] if known else None
            self._load = torch.zeros(len(known), self.experts + 2, dtype=torch.float64, device=device)
        return self._load


def infer_weighting(router: Any) -> RouterWeighting | None:
    """The router's weighting, inferred from its outputs for random tokens; None if no `RouterWeighting` fits."""
    tried = copy.deepcopy(router).to("cpu", torch.float32)
    random = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            # New routers may weigh all experts equally, which fits every weighting.
            tried.weight.copy_(torch.randn(tried.weight.shape, generator=random) / tried.weight.shape[1] ** 0.5)
            logits, weights, experts, *_ = tried(torch.randn(PROBE_TOKENS, tried.weight.shape[1], generator=random))
            return _matching_weighting(logits, weights, experts)
    except (TypeError, ValueError, AttributeError, RuntimeError):  # other arguments or results
        return None


def _matching_weighting(logits: Tensor, weights: Tensor, experts: Tensor) -> RouterWeighting | None:
    for sigmoid in (False, True):
        for normalized in (True, False):
            plain = RouterWeighting(sigmoid, normalized, 1.0).weights(logits, experts)
            scale = float((weights / plain).mean())
            if torch.allclose(weights, scale * plain, rtol=1e-4):
                return RouterWeighting(sigmoid, normalized, round(scale, 4))
    return None


def _record_and_replay(router: Any, _: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Forward hook of a router: stores its choice in `router.chosen`, and routes by recorded experts, if any.

    Recorded experts get weights from the router's logits; its own choice stays where they are -1.
    """
    logits, weights, router.chosen, *others = output
    if router.recorded is None:
        return None
    experts = _recorded_or_own(router.recorded, router.chosen)
    return (logits, router.weighting.weights(logits, experts).to(weights.dtype), experts, *others)


def _recorded_or_own(recorded: Tensor, own: Tensor) -> Tensor:
    """Recorded experts, and the router's `own` choice for entries of -1."""
    return torch.where(recorded < 0, own, recorded.to(own.dtype))


def _layer_index(name: str) -> int:
    """Index of the decoder layer in a module's name; 0 if there is none."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else 0
