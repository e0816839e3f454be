"""The demo: a tiny language model learns two-digit addition by asynchronous GRPO, in a few minutes on a CPU.

    python examples/demo.py [--seed 0] [--dir runs/demo] [--start-only] [--section.option value ...]

First a Qwen3 of 109 k parameters and 16 symbols is trained by supervised steps until about three in ten sums are right;
reinforcement learning needs a policy that succeeds sometimes. Then `slipstream.train` runs examples/addition.toml with
concurrent generator and trainer, and evaluates on 500 held-out sums.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import slipstream
from slipstream.environments.addition import Addition, target
from slipstream.environments.base import Task
from slipstream.generators.torch.engine import Engine
from slipstream.observe.report import report

HERE = Path(__file__).parent
SYMBOLS = ["<pad>", "<eos>", *"0123456789+= ."]
ENOUGH = 0.3


def build_tokenizer(symbols: Sequence[str] = SYMBOLS) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each character."""
    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_model(seed: int, head_size: int, vocabulary: int = len(SYMBOLS)) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=head_size, max_position_embeddings=64, bos_token_id=None, eos_token_id=1,
        pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[Task], seed: int) -> float:
    """Train supervised until greedy accuracy on held-out tasks reaches `ENOUGH`; return the accuracy."""
    validation, training = tasks[:300], tasks[len(tasks) // 2 :]
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    accuracy, step = 0.0, 0
    while accuracy < ENOUGH:
        step += 1
        texts = [(t.prompt, f"{target(t)}<eos>") for t in rng.sample(training, 128)]
        rows = [(tokenizer.encode(str(p)), tokenizer.encode(a)) for p, a in texts]
        longest = max(len(p) + len(a) for p, a in rows)
        ids = torch.tensor([p + a + [0] * (longest - len(p) - len(a)) for p, a in rows])
        labels = torch.tensor([[-100] * len(p) + a + [-100] * (longest - len(p) - len(a)) for p, a in rows])
        model.train()(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and step >= 100:
            accuracy = greedy_accuracy(model, tokenizer, validation)
            print(f"\rwarm-up step {step}: {accuracy:.0%} right", end="", flush=True)
    print()
    return accuracy


def greedy_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> float:
    """Share of `tasks` that the model answers exactly, by greedy decoding with the embedded engine."""
    engine, right = Engine(copy.deepcopy(model), slots=256), 0
    for i, task in enumerate(tasks):
        engine.submit(i, tokenizer.encode(str(task.prompt)), slipstream.Sampling(temperature=0, max_tokens=5))
    while engine.busy:
        for key, completion in engine.step():
            assert isinstance(key, int)
            right += tokenizer.decode(completion.token_ids, skip_special_tokens=True) == target(tasks[key])
    return right / len(tasks)


def configuration(
    parser: argparse.ArgumentParser, name: str, directory: Path, seed: int, flags: list[str]
) -> slipstream.Config:
    """Configuration of `examples/NAME.toml` on the start model in `directory`; an invalid option ends the program."""
    run = next(d for i in range(1000) if not (d := directory / f"run_{i}").exists())
    own = ["--model.path", str(directory / "start"), "--run.dir", str(run), "--loop.seed", str(seed)]
    try:
        return slipstream.load_config(HERE / f"{name}.toml", [*own, *flags])
    except slipstream.ConfigError as error:
        parser.error(str(error))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--dir", type=Path, default=Path("runs/demo"))
    found.add_argument("--quiet", action="store_true")
    found.add_argument("--head-size", type=int, default=16, help="of attention; vLLM needs 32 on a CPU, 64 on a GPU")
    found.add_argument("--start-only", action="store_true", help="make the start model, and leave it at that")
    return found


def main() -> None:
    options, flags = parser().parse_known_args()

    start = options.dir / "start"
    config = configuration(parser(), "addition", options.dir, options.seed, flags)
    began = time.perf_counter()
    torch.set_num_threads(1)
    tokenizer, model = build_tokenizer(), build_model(options.seed, options.head_size)
    print(f"warming up {sum(p.numel() for p in model.parameters()):,} parameters by supervised steps ...")
    environment = Addition()
    warm_up(model, tokenizer, list(environment.train), options.seed)
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)
    print(f"start model in {start} after {time.perf_counter() - began:.0f} s")
    if options.start_only:
        return
    summary = slipstream.train(config, quiet=options.quiet)
    report(slipstream.load_run(summary["directory"]))


if __name__ == "__main__":
    main()
