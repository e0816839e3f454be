"""What a publish costs by what it does to sequences in flight: 11 M parameters, 64 of 96 sequences decoding.

    python benchmarks/interruption.py [--rounds 3] [--threads 2] [--json benchmarks/results/interruption.json]

Every mode does the same work: 96 sequences of 24 to 72 tokens through 64 slots, all submitted at once, and one publish
after 24 steps that moves the parameters to other memory, as the `shared` link does. `hold` is the time between two
forward passes, `next pass` that of the first one after, `wait` the time from asking for the swap to having it, and
`extra` is what the whole work takes longer than without a publish. Modes take turns; medians of the rounds are given.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import get_args

import torch
from work import build_model

from slipstream.generators.base import Interruption
from slipstream.generators.torch import Engine
from slipstream.rollout import Sampling

SEQUENCES, SLOTS, PROMPT, PUBLISH_AFTER = 96, 64, 16, 24
MODES: tuple[Interruption, ...] = get_args(Interruption)
MEASURED = ("hold_ms", "next_pass_ms", "wait_ms", "tokens_wasted")
OTHERS = [parameter.detach() for parameter in build_model("11M").parameters()]


def move(engine: Engine) -> None:
    """Let the parameters be views of other memory that holds the same numbers."""
    for parameter, other in zip(engine.model.parameters(), OTHERS, strict=True):
        parameter.data, other.data = other.data, parameter.data


def work(engine: Engine, how: Interruption | None) -> dict[str, float]:
    """Seconds and tokens of the whole work, with one publish in mid-flight unless `how` is None."""
    rng = random.Random(0)
    lengths = [rng.randint(24, 72) for _ in range(SEQUENCES)]
    found: dict[str, float] = {}
    wasted, tokens, steps, asked = engine.tokens_wasted, 0, 0, 0.0
    began = time.perf_counter()
    for i, length in enumerate(lengths):
        engine.submit(i, [rng.randrange(1000) for _ in range(PROMPT)], Sampling(max_tokens=length, seed=i))
    while engine.busy:
        if steps == PUBLISH_AFTER:
            asked, engine.draining = time.perf_counter(), how == "drain"
        if how and asked and "hold_ms" not in found and not (engine.draining and engine.running):
            found["hold_ms"] = 1000 * engine.swap(engine.version + 1, lambda: move(engine), how)
            found["wait_ms"] = 1000 * (time.perf_counter() - asked)
        busy = engine.busy_seconds
        tokens += sum(len(completion.token_ids) for _, completion in engine.step())
        steps += 1
        if "hold_ms" in found:
            found.setdefault("next_pass_ms", 1000 * (engine.busy_seconds - busy))
    assert tokens == sum(lengths) and bool(found) == bool(how)
    return {"seconds": time.perf_counter() - began, "tokens_wasted": engine.tokens_wasted - wasted} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = Engine(build_model("11M"), slots=SLOTS)
    work(engine, None)  # the cache has grown afterwards
    rounds = [{how: work(engine, how) for how in (None, *MODES)} for _ in range(options.rounds)]
    modes = {
        how: {name: statistics.median(r[how][name] for r in rounds) for name in MEASURED}
        | {"extra_seconds": statistics.median(r[how]["seconds"] - r[None]["seconds"] for r in rounds)}
        for how in MODES
    }
    undisturbed = statistics.median(r[None]["seconds"] for r in rounds)
    for how, found in modes.items():
        print(
            f"{how:>9}: held {found['hold_ms']:.2f} ms, next pass {found['next_pass_ms']:.0f} ms, "
            f"new weights after {found['wait_ms']:,.0f} ms, "
            f"{found['extra_seconds']:+.2f} s on {undisturbed:.2f}, {found['tokens_wasted']:.0f} tokens wasted"
        )
    if options.json:
        command = " ".join(["python", *sys.argv])
        result = {"command": command, "rounds": options.rounds, "undisturbed_seconds": undisturbed, "modes": modes}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
