"""The known name that a misspelt or renamed one probably means, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

RENAMED = {  # options of earlier versions: the new name in the same section
    "lora.base": "quantization", "environment.time_limit": "timeout", "environment.turns": "max_turns",
    "environment.tokens": "max_tokens", "environment.scorers": "reward_workers", "scoring.time_limit": "timeout",
    "teacher.kind": "engine", "teacher.memory": "gpu_memory_utilization", "teacher.options": "engine_args",
    "loop.tokens": "max_tokens", "loop.hold_lag": "force_max_lag", "loop.buffer": "buffer_size",
    "generator.kind": "engine", "generator.count": "replicas", "generator.tensor_parallel": "tensor_parallel_size",
    "generator.options": "engine_args", "generator.memory": "gpu_memory_utilization", "generator.slots": "max_num_seqs",
    "generator.context": "max_model_len", "trainer.shards": "fsdp_shard_size",
    "trainer.max_skipped": "max_consecutive_nonfinite", "trainer.compute_copy": "keep_compute_copy",
    "trainer.probe_bound": "logprob_tolerance", "algorithm.whiten": "normalize_advantages",
    "algorithm.parts": "reward_weights", "algorithm.process": "process_reward_coef",
    "algorithm.overlong_soft": "overlong_buffer", "algorithm.kl": "kl_coef",
    "algorithm.keep_sampling_mask": "replay_sampling_mask", "algorithm.keep_routing": "replay_routing",
    "algorithm.filter_equal": "filter_zero_advantage", "algorithm.filter_most": "max_filtered_in_a_row",
    "sync.keep": "keep_versions", "sync.interruption": "in_flight",
}  # fmt: skip


def suggest(name: str, known: Sequence[str]) -> str:
    """ " (did you mean X?)" for the nearest of the known names, or nothing."""
    renamed = f"{name.partition('.')[0]}.{RENAMED.get(name)}"
    close = [renamed] if renamed in known else difflib.get_close_matches(name, known)
    close = close or difflib.get_close_matches(name.lower(), known)
    close = close or [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]  # in another section
    return f" (did you mean {close[0]}?)" if close else ""
