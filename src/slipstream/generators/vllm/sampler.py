"""A sampler for vLLM's second model runner on GPUs that reads the logits once.

vLLM 0.25 copies all logits to float32, adds noise to each, and reads them three more times for a log-probability and a
rank. With 256 sequences and a vocabulary of 152,000 this takes a tenth of a decode step of a 1.7 B model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Sampling parameters that leave the logits as they are, or scale them. vLLM masks logits for structured outputs before
# it samples, and has another sampler for watermarks. vLLM itself sets the names with an underscore.
LOGIT_NEUTRAL = {
    *("temperature", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs", "flat_logprobs"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "structured_outputs"),
    *("watermarking", "_eos_token_id", "_all_stop_token_ids"),
}
CUSTOM = ("compute_nans", "use_fp64_gumbel", "return_sampling_mask", "trace_replay_state")  # features of its sampler
OWN_PROCESSORS = 3  # of logits in vLLM's sampler: biases, penalties, bad words


class SinglePassSampler:
    """Samples for vLLM's `sampler` all sequences that use their whole distribution, and passes on everything else.

    Both sample a batch that has other sequences, too.

    Ranks of sampled tokens are 0, or another token's; Slipstream reads none.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._logit_neutral = np.zeros(len(sampler.sampling_states.num_logprobs), dtype=bool)  # by vLLM's request index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def add_request(self, index: int, *arguments: Any) -> None:
        """Take a request's sampling parameters, the last of the arguments."""
        self._logit_neutral[index] = is_logit_neutral(arguments[-1])
        self._sampler.add_request(index, *arguments)

    def __call__(self, logits: Tensor, batch: Any) -> Any:
        """Sample a token for each sequence of vLLM's batch."""
        neutral = self._logit_neutral[batch.idx_mapping_np]
        if len(logits) != len(neutral) or not neutral.any():
            return self._sampler(logits, batch)
        from slipstream.generators.vllm.sampling_kernels import sample

        states, positions = self._sampler.sampling_states, batch.positions[batch.logits_indices]
        drawn = sample(logits, batch.expanded_idx_mapping, states.temperature.gpu, states.seeds.gpu, positions)
        if neutral.all():
            return self._output(*drawn, batch)
        return _overwrite_rows(self._sampler(logits, batch), *drawn, neutral)

    def _output(self, tokens: Tensor, logprobs: Tensor, batch: Any) -> Any:
        """vLLM's output of these tokens, with log-probabilities if a sequence wants them."""
        from vllm.v1.outputs import LogprobsTensors
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        ones, prompts = batch.seq_lens.new_ones(batch.num_reqs), self._sampler.req_states.prefill_len.gpu
        sampled, rejected = get_num_sampled_and_rejected(
            ones, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, prompts
        )
        found = None
        if self._sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np) >= 0:
            found = LogprobsTensors(tokens[:, None], logprobs[:, None], tokens.new_zeros(len(tokens)))
        return SamplerOutput(tokens[:, None], found, num_nans=None, num_sampled=sampled, num_rejected=rejected)


def _overwrite_rows(output: Any, tokens: Tensor, logprobs: Tensor, rows: NDArray[np.bool_]) -> Any:
    """Write these tokens into `rows` of the output; else the tokens of a seed would depend on other sequences."""
    where = torch.from_numpy(rows).to(tokens.device)
    columns = [(output.sampled_token_ids, tokens)]
    if output.logprobs_tensors is not None:
        found = output.logprobs_tensors
        columns += [(found.logprob_token_ids, tokens), (found.logprobs, logprobs)]
    for matrix, values in columns:
        matrix[:, 0] = torch.where(where, values.to(matrix.dtype), matrix[:, 0])
    return output


def is_logit_neutral(parameters: Any) -> bool:
    """Whether these `SamplingParams` change logits by the temperature alone, and ask for no top log-probabilities."""
    default = type(parameters)()
    others = set(parameters.__struct_fields__) - LOGIT_NEUTRAL
    changed = any(np.any(getattr(parameters, name) != getattr(default, name)) for name in others)
    return not changed and not parameters.logprobs


def use_single_pass(runner: Any) -> None:
    """Let a model runner of vLLM sample by `SinglePassSampler`.

    Does nothing if vLLM's sampler is customized, or must return more than tokens and log-probabilities.
    """
    try:
        from vllm.v1.worker.gpu.sample.sampler import Sampler
    except ImportError:
        return
    sampler: Any = getattr(runner, "sampler", None)  # None: of a pipeline stage that is not the last
    if type(sampler) is not Sampler or sampler.logprobs_mode != "processed_logprobs":
        return
    custom = any(getattr(sampler, name, None) for name in CUSTOM)
    if not custom and len(getattr(sampler, "logits_processors", ())) <= OWN_PROCESSORS:
        runner.sampler = SinglePassSampler(sampler)
