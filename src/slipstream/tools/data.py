"""`slipstream data`: some tasks token by token, as the model reads them, and the lengths of all prompts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from slipstream.config.loading import load_config
from slipstream.config.schema import Config, ConfigError
from slipstream.environments.base import Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.load import (
    LoadedEnvironment,
    close_environment,
    epoch_steps,
    load_environments,
    share_of_groups,
    with_steps,
)
from slipstream.generators.base import ContextFull, GenerationError
from slipstream.model.inspection import max_model_len
from slipstream.model.tokenizer import load_tokenizer
from slipstream.observe.formatting import plural

BOUNDARY, SPECIAL = Text("│", style="dim"), "bold magenta"
HEAD, TAIL = 400, 100  # tokens of a long prompt that are printed
MAX_MEASURED = 20_000  # prompts of a split, evenly spaced; all take minutes
BINS, WIDTH = 8, 40  # of the histogram


def data(path: str | None, flags: Sequence[str], shown: int) -> None:
    """Print `shown` training tasks of each environment, and the lengths of all prompts. Raises `ConfigError`."""
    if shown < 0:
        raise ConfigError(f"--tasks {shown}: give 0 or more")
    config = load_config(path, flags)
    tokenizer = load_tokenizer(config.model.path)
    loaded = load_environments(config)
    config = with_steps(config, loaded)
    chat, console = ChatTokenizer(tokenizer, max_model_len(config), config.model), Console(highlight=False)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for each in loaded:
        training, held_out = each.environment.train, each.environment.test
        for task in training[:shown]:
            console.print(_described(task, each.id_of(task), chat, special), soft_wrap=True)
        most = config.sampling_of(each.options).max_tokens
        of = f" of {each.options.label}" if len(loaded) > 1 else ""
        for name, tasks in ("training", training), ("held-out", held_out):
            for line in _lengths(plural(len(tasks), f"{name} task") + of, tasks, chat, most) if len(tasks) else ():
                console.print(line, markup=False, soft_wrap=True)
        console.print(_epochs(config, each), "", sep="\n", markup=False, soft_wrap=True)
        asyncio.run(close_environment(each.environment))


def _described(task: Task, name: str, chat: ChatTokenizer, special: set[int]) -> Text:
    """The task's source and answer, and its prompt with token boundaries. Special tokens are in « »."""
    try:
        token_ids = chat.encode(task.prompt)
    except GenerationError as error:
        return Text(f"{name} ({task.source}): {error}\n", style="red")
    wanted = f"expected answer {task.data['wanted']!r:.200}" if "wanted" in task.data else f"data {task.data!r:.200}"
    where = f" ({task.source})" if task.source else ""
    found = Text(f"{name}{where}: {len(token_ids)} tokens; {wanted}\n", style="bold")
    cut = len(token_ids) > HEAD + TAIL
    for index, token in enumerate(token_ids):
        if cut and index == HEAD:
            found.append(f" ... {len(token_ids) - HEAD - TAIL} tokens ... ", style="dim")
        if not cut or not HEAD <= index < len(token_ids) - TAIL:
            text = chat.decode_token(token).replace("\n", "⏎\n")
            found.append(f"«{text}»" if token in special else text, style=SPECIAL if token in special else "")
            found.append_text(BOUNDARY)
    return found.append("\n")


def _epochs(config: Config, each: LoadedEnvironment) -> str:
    """The steps of an epoch, in which each task is visited once, and the epochs of the run."""
    loop, steps, share = config.loop, epoch_steps(config, each), share_of_groups(config, each)
    groups = f"{loop.groups_per_step} groups a step" + f", {share:.0%} of them here" * (share < 1)
    return f"an epoch is {steps:.3g} steps ({groups}): loop.steps = {loop.steps} is {loop.steps / steps:.3g} epochs"


def _lengths(title: str, tasks: Sequence[Task], chat: ChatTokenizer, most: int) -> list[str]:
    """Quantiles and histogram of prompt lengths in tokens, and how many prompts are too long."""
    chosen = range(0, len(tasks), -(-len(tasks) // MAX_MEASURED))
    lengths, failed = [], 0
    context = chat.limits.context
    for index in chosen:
        try:
            lengths.append(len(chat.encode(tasks[index].prompt)))
        except ContextFull:
            lengths.append(context)  # at least
        except GenerationError:
            failed += 1
    if not lengths:
        return [f"{title}: no prompt can be encoded"]
    low, median, p90, p99, high = map(int, np.quantile(lengths, (0, 0.5, 0.9, 0.99, 1), method="nearest"))
    title += f", measured on {len(chosen)}" * (len(chosen) < len(tasks)) + f", {failed} can't be encoded" * bool(failed)
    lines = [f"{title}: prompts of {low} to {high} tokens; median {median}, 90 % {p90}, 99 % {p99}"]
    step = -(-(high - low + 1) // BINS)
    counts = Counter((length - low) // step for length in lengths)
    for number in range(max(counts) + 1):
        left, bar = low + number * step, "█" * -(-WIDTH * counts[number] // max(counts.values()))
        lines.append(f"{left:9} to {left + step - 1:6} {counts[number]:7} {bar}")
    if context:
        full, short = (sum(length > context - room for length in lengths) for room in (1, most))
        lines.append(
            f"in the context of {context} tokens, {full} of {len(lengths)} prompts leave no room for a completion, and "
            f"{short - full} less than sampling.max_tokens = {most}"
        )
    return [*lines, ""]
