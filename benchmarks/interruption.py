"""The cost of a publish for each `sync.in_flight` mode: 11 M parameters, 64 of 96 sequences decoding.

    python benchmarks/interruption.py [--kind vllm] [--rounds 3] [--threads 2] [--json FILE]

Every mode does the same work: 96 sequences of 24 to 72 tokens through 64 slots, all submitted at once, and one publish
by the `shared` link when the first sequences have 24 tokens. `pause` is the duration of the swap between two forward
passes, `longest gap` the longest time without a token from the swap until 8 passes later, `wait` the time from the
request of the swap until the token counts before it are known, and `extra` the additional time of the whole work
compared with a run without a publish. Modes alternate; figures are medians of the rounds.
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

from slipstream.config.loading import load_config
from slipstream.generators.base import Interruption
from slipstream.generators.served_weights import ServedWeights, local_shards
from slipstream.generators.torch.engine import Engine
from slipstream.rollout import Sampling
from slipstream.sync.link import find_link

SEQUENCES, SLOTS, PROMPT, PUBLISH_AFTER, PASSES_AFTER = 96, 64, 16, 24, 8
MODES: tuple[Interruption, ...] = get_args(Interruption)
MEASURED = ("pause_ms", "longest_gap_ms", "wait_ms", "tokens_discarded")


class Published:
    """An engine, and a trainer's weights, connected by the `shared` link."""

    def __init__(self, kind: str, folder: Path) -> None:
        save_model("11M", folder / "model")
        flags = [f"--model.path={folder / 'model'}", "--environment.name=addition", f"--generator.engine={kind}",
                 f"--generator.max_num_seqs={SLOTS}", "--generator.max_model_len=128",
                 "--sampling.max_tokens=72"]  # fmt: skip
        config = load_config(None, flags)
        parameters = dict(build_model("11M").named_parameters())
        self._sender = find_link("shared")[0](parameters, config, folder, 1)
        if kind == "vllm":
            from slipstream.generators.vllm.engine import VllmEngine

            self.engine: Any = VllmEngine(config)
            self.weights: Any = self.engine.open_weights("shared", self._sender.connection_info(), 1)
        else:
            served = build_model("11M")
            self.engine = Engine(served, slots=SLOTS)
            places = local_shards(dict(served.named_parameters()))
            self.weights = ServedWeights("shared", self._sender.connection_info(), places, 1, rebind=True)

    def prepare(self) -> None:
        """Receive the next version into separate memory."""
        self.weights.prepare(self._sender.stage(self.engine.version + 1))
        while not self.weights.prepared():
            time.sleep(0.001)

    def swap(self, how: Interruption) -> float:
        pause_s: float = self.engine.swap(self.engine.version + 1, self.weights.apply, how)
        return pause_s


def work(published: Published, how: Interruption | None) -> dict[str, float]:
    """Seconds and tokens of the whole work, with one publish in mid-flight unless `how` is None."""
    engine, rng = published.engine, random.Random(0)
    lengths = [rng.randint(24, 72) for _ in range(SEQUENCES)]
    found: dict[str, float] = {}
    published.prepare()
    discarded, tokens, pause_s = engine.tokens_discarded, 0, 0.0
    asked = swapped = last = 0.0
    gaps: list[float] = []
    began = time.perf_counter()
    for i, length in enumerate(lengths):
        engine.submit(i, [rng.randrange(1000) for _ in range(PROMPT)], Sampling(max_tokens=length, seed=i))
    while engine.busy:
        if how and not asked and engine.longest_in_flight() >= PUBLISH_AFTER:
            asked, engine.draining = time.perf_counter(), how == "drain"
        if how and asked and not swapped and not (engine.draining and engine.running):
            swapped = last = time.perf_counter()
            pause_s = published.swap(how)
        tokens += sum(len(completion.token_ids) for _, completion in engine.step())
        if swapped and "wait_ms" not in found and engine.versions_known:
            found["wait_ms"] = 1000 * (time.perf_counter() - asked)
            found["pause_ms"] = 1000 * max(pause_s, published.weights.pause_s())
        if swapped and len(gaps) < PASSES_AFTER:
            gaps.append(1000 * (time.perf_counter() - last))
            last = time.perf_counter()
    assert tokens == sum(lengths) and bool(found) == bool(how), (how, tokens, sum(lengths), found)
    if gaps:
        found["longest_gap_ms"] = max(gaps)
    return {"seconds": time.perf_counter() - began, "tokens_discarded": engine.tokens_discarded - discarded} | found


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
            f"{how:>9}: paused {found['pause_ms']:.2f} ms, longest gap {found['longest_gap_ms']:.0f} ms, "
            f"new weights after {found['wait_ms']:,.0f} ms, "
            f"{found['extra_seconds']:+.2f} s on {undisturbed:.2f}, {found['tokens_discarded']:.0f} tokens discarded"
        )
    if options.json:
        result = {**conditions(), "rounds": options.rounds, "undisturbed_seconds": undisturbed, "modes": modes}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
