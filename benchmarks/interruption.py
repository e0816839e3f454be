"""What a publish costs by what it does to sequences in flight: 11 M parameters, 64 of 96 sequences decoding.

    python benchmarks/interruption.py [--kind vllm] [--rounds 3] [--threads 2] [--json FILE]

Every mode does the same work: 96 sequences of 24 to 72 tokens through 64 slots, all submitted at once, and one publish
by the `shared` link when 24 tokens of each of the first have been drawn. `hold` is what the swap takes between two
forward passes, `longest gap` the longest time without a token from then on until 8 passes later, `wait` the time from
asking for the swap to knowing who drew what before it, and `extra` is what the whole work takes longer than without a
publish. Modes take turns; medians of the rounds are given.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import torch
from work import build_model, conditions, save_model

from slipstream.config import load_config
from slipstream.generators.base import Interruption
from slipstream.generators.torch import Engine
from slipstream.generators.weights import ServedWeights, local_places
from slipstream.rollout import Sampling
from slipstream.sync.link import find_link

SEQUENCES, SLOTS, PROMPT, PUBLISH_AFTER, PASSES_AFTER = 96, 64, 16, 24, 8
MODES: tuple[Interruption, ...] = get_args(Interruption)
MEASURED = ("hold_ms", "longest_gap_ms", "wait_ms", "tokens_wasted")


class Published:
    """An engine, and a trainer's weights that are published to it by the `shared` link."""

    def __init__(self, kind: str, folder: Path) -> None:
        save_model("11M", folder / "model")
        flags = [f"--model.path={folder / 'model'}", "--environment.name=addition", f"--generator.kind={kind}",
                 f"--generator.slots={SLOTS}", "--generator.context=128", "--sampling.max_tokens=72"]  # fmt: skip
        config = load_config(None, flags)
        parameters = dict(build_model("11M").named_parameters())
        self._sender = find_link("shared")[0](parameters, config, folder, 1)
        if kind == "vllm":
            from slipstream.generators.vllm import VllmEngine

            self.engine: Any = VllmEngine(config)
            self.weights: Any = self.engine.open_weights("shared", self._sender.offer(), 1)
        else:
            served = build_model("11M")
            self.engine = Engine(served, slots=SLOTS)
            places = local_places(dict(served.named_parameters()))
            self.weights = ServedWeights("shared", self._sender.offer(), places, 1, rebind=True)

    def prepare(self) -> None:
        """Bring the next version beside the one that is served."""
        self.weights.prepare(self._sender.stage(self.engine.version + 1))
        while not self.weights.prepared():
            time.sleep(0.001)

    def swap(self, how: Interruption) -> float:
        held: float = self.engine.swap(self.engine.version + 1, self.weights.apply, how)
        return held


def work(published: Published, how: Interruption | None) -> dict[str, float]:
    """Seconds and tokens of the whole work, with one publish in mid-flight unless `how` is None."""
    engine, rng = published.engine, random.Random(0)
    lengths = [rng.randint(24, 72) for _ in range(SEQUENCES)]
    found: dict[str, float] = {}
    published.prepare()
    wasted, tokens, held = engine.tokens_wasted, 0, 0.0
    asked = swapped = last = 0.0
    gaps: list[float] = []
    began = time.perf_counter()
    for i, length in enumerate(lengths):
        engine.submit(i, [rng.randrange(1000) for _ in range(PROMPT)], Sampling(max_tokens=length, seed=i))
    while engine.busy:
        if how and not asked and engine.drawn() >= PUBLISH_AFTER:
            asked, engine.draining = time.perf_counter(), how == "drain"
        if how and asked and not swapped and not (engine.draining and engine.running):
            swapped = last = time.perf_counter()
            held = published.swap(how)
        tokens += sum(len(completion.token_ids) for _, completion in engine.step())
        if swapped and "wait_ms" not in found and engine.settled:
            found["wait_ms"] = 1000 * (time.perf_counter() - asked)
            found["hold_ms"] = 1000 * max(held, published.weights.held())
        if swapped and len(gaps) < PASSES_AFTER:
            gaps.append(1000 * (time.perf_counter() - last))
            last = time.perf_counter()
    assert tokens == sum(lengths) and bool(found) == bool(how), (how, tokens, sum(lengths), found)
    if gaps:
        found["longest_gap_ms"] = max(gaps)
    return {"seconds": time.perf_counter() - began, "tokens_wasted": engine.tokens_wasted - wasted} | found


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--kind", choices=["torch", "vllm"], default="torch")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        published = Published(options.kind, Path(folder))
        work(published, None)  # caches have grown afterwards
        rounds = [{how: work(published, how) for how in (None, *MODES)} for _ in range(options.rounds)]
    modes = {
        how: {name: statistics.median(r[how][name] for r in rounds) for name in MEASURED}
        | {"extra_seconds": statistics.median(r[how]["seconds"] - r[None]["seconds"] for r in rounds)}
        for how in MODES
    }
    undisturbed = statistics.median(r[None]["seconds"] for r in rounds)
    for how, found in modes.items():
        print(
            f"{how:>9}: held {found['hold_ms']:.2f} ms, longest gap {found['longest_gap_ms']:.0f} ms, "
            f"new weights after {found['wait_ms']:,.0f} ms, "
            f"{found['extra_seconds']:+.2f} s on {undisturbed:.2f}, {found['tokens_wasted']:.0f} tokens wasted"
        )
    if options.json:
        result = {**conditions(), "rounds": options.rounds, "undisturbed_seconds": undisturbed, "modes": modes}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
