"""The pause of the generator by a publish: link `shared`, 11 M parameters, 64 sequences decoding.

    python benchmarks/publish.py [--publishes 40] [--link shared] [--json benchmarks/results/publish.json]

The pause is the duration of the swap between two forward passes. It is compared with the time of one decode step of the
same run. Every sequence must finish with all its tokens and with spans that name every version in order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

from work import conditions, save_model

import slipstream
from slipstream.controller.launch import Cluster
from slipstream.rollout import Completion, Sampling

SEQUENCES, TOKENS = 64, 400


async def measure(scratch: Path, link: str, publishes: int) -> dict[str, object]:
    config = slipstream.load_config(
        None, [f"--model.path={scratch / 'model'}", "--environment.name=addition", f"--sync.link={link}",
               "--generator.threads=1", "--trainer.threads=1"],
    )  # fmt: skip
    pools = await Cluster.start(config, scratch / "run")
    try:
        await pools.link.connect(0)
        before = await pools.generator.stats()
        running = [
            asyncio.create_task(pools.generator.generate([1, 2, 3, i + 4], Sampling(max_tokens=TOKENS, seed=i)))
            for i in range(SEQUENCES)
        ]
        pauses, totals = [], []
        for version in range(1, publishes + 1):
            await asyncio.sleep(0.05)
            stats = await pools.link.publish(version)
            assert not any(task.done() for task in running), "sequences ended before the last publish; raise TOKENS"
            pauses.append(1000 * stats.pause_s)
            totals.append(1000 * stats.total)
        completions = await asyncio.gather(*running)
        after = await pools.generator.stats()
    finally:
        await pools.close()
    check(completions, publishes)
    step = 1000 * (after["busy_s"] - before["busy_s"]) / TOKENS
    return {
        "link": link, "publishes": publishes, "decode_step_ms": step, "pause_ms": statistics.median(pauses),
        "pause_ms_max": max(pauses), "publish_ms": statistics.median(totals), "sequences": len(completions),
    }  # fmt: skip


def check(completions: list[Completion], publishes: int) -> None:
    """Check that no sequence was aborted, and that each has spans of all versions, in order, without a gap."""
    for completion in completions:
        assert len(completion.token_ids) == TOKENS and completion.finish_reason == "length"
        versions = [span.version for span in completion.spans]
        assert versions == sorted(set(versions)) and versions[0] == 0 and versions[-1] == publishes
        assert [s.start for s in completion.spans[1:]] == [s.end for s in completion.spans[:-1]]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--publishes", type=int, default=40)
    found.add_argument("--link", default="shared")
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        save_model("11M", Path(temporary) / "model")
        found = asyncio.run(measure(Path(temporary), options.link, options.publishes))
    print(
        f"{options.link}: paused {found['pause_ms']:.2f} ms (max {found['pause_ms_max']:.2f}), a publish takes "
        f"{found['publish_ms']:.1f} ms; one decode step takes {found['decode_step_ms']:.1f} ms"
    )
    if options.json:
        options.json.write_text(json.dumps({**conditions(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
