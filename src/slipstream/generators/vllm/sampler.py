"""A sampler for vLLM's second model runner on GPUs that reads the logits once.

vLLM copies all logits to float32, adds noise to each, and reads them three more times for a log-probability and a rank.
With 256 sequences and a vocabulary of 152,000 that is a tenth of a decode step of a 1.7 B model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Sampling parameters that leave the logits as they are. vLLM masks logits for structured outputs before it samples.
# Those with an underscore are set by vLLM itself.
HARMLESS = {
    *("temperature", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs", "flat_logprobs"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "structured_outputs"),
    *("_eos_token_id", "_all_stop_token_ids"),
}


class SinglePassSampler:
    """vLLM's sampler, replaced for steps in which each sequence samples from its whole distribution.

    It computes no ranks of the sampled tokens, which Slipstream does not read: they are 0. Everything else is passed
    to vLLM's `sampler`.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._whole = np.zeros(len(sampler.sampling_states.num_logprobs), dtype=bool)  # by vLLM's index of a request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def add_request(self, index: int, *arguments: Any) -> None:
        """Take a request's sampling parameters, the last of the arguments."""
        self._whole[index] = samples_from_all(arguments[-1])
        self._sampler.add_request(index, *arguments)

    def __call__(self, logits: Any, batch: Any) -> Any:
        """Sample a token for each sequence of vLLM's batch."""
        if len(logits) != len(batch.idx_mapping_np) or not self._whole[batch.idx_mapping_np].all():
            return self._sampler(logits, batch)
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        from slipstream.generators.vllm.sampling_kernels import sample

        states = self._sampler.sampling_states
        positions = batch.positions[batch.logits_indices]
        tokens, logprobs = sample(
            logits, batch.expanded_idx_mapping, states.temperature.gpu, states.seeds.gpu, positions
        )
        sampled, rejected = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self._sampler.req_states.prefill_len.gpu,
        )
        wanted = states.max_num_logprobs(batch.idx_mapping_np) >= 0
        return SamplerOutput(
            sampled_token_ids=tokens[:, None],
            logprobs_tensors=_without_ranks(tokens, logprobs) if wanted else None,
            num_nans=None,
            num_sampled=sampled,
            num_rejected=rejected,
        )


def samples_from_all(parameters: Any) -> bool:
    """Whether these `SamplingParams` sample from all tokens, and ask for no log-probability but the sampled token's."""
    default = type(parameters)()
    changed = {name for name in parameters.__struct_fields__ if getattr(parameters, name) != getattr(default, name)}
    return changed <= HARMLESS and not parameters.logprobs


def use_single_pass(runner: Any) -> None:
    """Let a model runner of vLLM sample by `SinglePassSampler`, unless it does more with logits than sampling."""
    try:
        from vllm.v1.worker.gpu.sample.sampler import Sampler
    except ImportError:
        return
    sampler: Any = getattr(runner, "sampler", None)  # None: of a pipeline stage that is not the last
    if type(sampler) is not Sampler or sampler.logprobs_mode != "processed_logprobs":
        return
    processors = getattr(sampler, "logits_processors", ())[3:]  # the first three are vLLM's own
    unusual = ("compute_nans", "use_fp64_gumbel", "return_sampling_mask", "trace_replay_state")
    if not processors and not any(getattr(sampler, name, None) for name in unusual):
        runner.sampler = SinglePassSampler(sampler)


def _without_ranks(tokens: Any, logprobs: Any) -> Any:
    from vllm.v1.outputs import LogprobsTensors

    return LogprobsTensors(
        logprob_token_ids=tokens[:, None],
        logprobs=logprobs[:, None],
        selected_token_ranks=tokens.new_zeros(len(tokens)),
        cu_num_generated_tokens=None,
    )
