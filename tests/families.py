"""Model families, each with a tiny configuration, and what the product does with it: the table in docs/models.md."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers

from tests.conftest import COMMON


class Family(NamedTuple):
    """A family's class prefix in transformers, configuration, and abilities."""

    kind: str
    changes: dict[str, Any]
    packs: bool = True
    embedded: bool = True
    vllm: str = "in place"  # or "restart", "GPU" (in place on GPUs alone) or "renamed" (in place nowhere)

    def build(self, seed: int = 0, **changes: Any) -> Any:
        """A model with random weights of float32, biases and norms included."""
        model_class = getattr(transformers, f"{self.kind}ForCausalLM")
        config = model_class.config_class(**(COMMON | self.changes | changes))
        torch.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                else:
                    torch.nn.init.normal_(parameter, std=0.05 if "embed" in name else 1.2 * config.hidden_size**-0.5)
        return model


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "Qwen2": Family("Qwen2", {}),
    "Qwen3": Family("Qwen3", {"tie_word_embeddings": True}),
    "Llama": Family("Llama", {"tie_word_embeddings": False}),
    "Mistral": Family("Mistral", {"sliding_window": 7}),
    "Gemma 3": Family("Gemma3", {"sliding_window": 7}),
    "Qwen3-MoE": Family("Qwen3Moe", {"num_experts": 4, **EXPERTS}, vllm="GPU"),
    "Mixtral": Family("Mixtral", {"num_local_experts": 4, **EXPERTS}, vllm="renamed"),
    "OLMoE": Family("Olmoe", {"num_experts": 4, **EXPERTS}, vllm="GPU"),
    "Cohere": Family("Cohere", {"logit_scale": 0.25}, embedded=False),
    "Gemma 2": Family("Gemma2", {
        "sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8,
    }),
    "Phi-3": Family("Phi3", {"sliding_window": None, "tie_word_embeddings": False}),
    "OLMo 2": Family("Olmo2", {"tie_word_embeddings": False}),
    "Granite": Family("Granite", {
        "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "embedding_multiplier": 3.0,
    }),
    "Phi": Family("Phi", {"partial_rotary_factor": 0.5, "tie_word_embeddings": False}),
    "Falcon-H1": Family("FalconH1", {
        "lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
        "mamba_d_state": 8, "mamba_chunk_size": 16, "embedding_multiplier": 3.0,
    }, packs=False, embedded=False, vllm="restart"),
}  # fmt: skip


def table() -> str:
    """The table in docs/models.md."""
    restart = "`checkpoint` with `sync.restart`"
    links = {
        "in place": "in place",
        "restart": restart,
        "renamed": restart,
        "GPU": f"in place on a GPU; on a CPU {restart}",
    }
    lines = ["| family | class | packs | embedded engine | vLLM's links |", "| --- | --- | --- | --- | --- |"]
    for name, family in FAMILIES.items():
        packs, embedded = ("yes" if answer else "no" for answer in (family.packs, family.embedded))
        lines.append(f"| {name} | `{family.kind}ForCausalLM` | {packs} | {embedded} | {links[family.vllm]} |")
    return "\n".join(lines)
