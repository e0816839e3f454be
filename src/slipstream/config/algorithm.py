"""Options of the objective, and of several policies, which may differ in it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from slipstream.config.section import Section, option


class AlgorithmConfig(Section):
    """The objective; see docs/algorithms.md. A function is a name, or a table of its name and its options."""

    advantage: dict[str, Any] = option(
        {"name": "group_mean"}, 'Group baseline: "group_mean", "leave_one_out", "pass_at_k", "reward", or your own.'
    )
    normalize_advantages: bool = option(False, "Give the advantages of a step mean 0 and standard deviation 1.")
    reward_weights: dict[str, float] = option({}, "Weights of reward parts, by metric name; each has its own baseline.")
    process_reward_coef: float = option(0.0, "Weight of a scorer's rewards of steps, added per token.", ge=0)
    overlong: Literal["train", "filter", "penalty"] = option(
        "train", "Rollouts truncated at sampling.max_tokens: train on them, leave them out, or penalize their length."
    )
    overlong_buffer: int = option(0, "Tokens before sampling.max_tokens in which the penalty rises from 0 to 1.", ge=0)
    loss: dict[str, Any] = option(
        {"name": "grpo"},
        'Loss of a token: "grpo", "ppo", "gspo", "cispo", "topr", "reinforce", "decoupled", "dppo_tv", "dppo_kl", '
        '"sapo", or your own as "module:function".',
    )
    corrections: list[dict[str, Any]] = option(
        [], 'Weights of off-policy tokens, multiplied: "truncate_tokens", "icepop", "mask_tokens", "opsm", and more.'
    )
    aggregation: dict[str, Any] = option(
        {"name": "token_mean"}, 'Denominator of the loss: "token_mean", "sequence_mean", or "constant" with a length.'
    )
    kl_coef: float = option(0.0, "Weight of the KL divergence to the reference policy; 0 needs no second model.", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = option("k3", "Estimator of that divergence from sampled tokens.")
    kl_weighted: bool = option(False, "Multiply that estimate by the ratio to the behaviour policy (k1 and k3).")
    reference: str = option("start", 'Reference policy: "start", "average" over the steps, or the path of a model.')
    reference_decay: float = option(0.99, "Decay of that average at each step.", ge=0, lt=1)
    replay_sampling_mask: bool = option(
        True, "Train on the distribution truncated by top_k and top_p, recorded at generation; false: the full one."
    )
    replay_routing: bool = option(True, "Train through the experts that generation chose (mixtures of experts).")
    filter_zero_advantage: bool = option(False, "Replace groups whose advantages are all 0 by further groups.")
    max_filtered_in_a_row: int = option(0, "Most groups replaced in a row; 0 means those of 20 steps.", ge=0)

    @field_validator("advantage", "loss", "aggregation", "corrections", mode="before")
    @classmethod
    def _named(cls, value: Any, info: ValidationInfo) -> Any:
        """The table of a function: a bare name gets no options, a table without a name gets the default name."""
        if info.field_name == "corrections":
            values = [value] if isinstance(value, str | dict) else value
            return [{"name": v} if isinstance(v, str) else v for v in values] if isinstance(values, list) else values
        if isinstance(value, str):
            return {"name": value}
        return cls.model_fields[info.field_name or ""].default | value if isinstance(value, dict) else value


class PolicyConfig(Section):
    """One of several policies. Each has its own adapter, or model, and its own objective."""

    name: str = Field(description='Name by which episodes ask the policy: policy["NAME"].')
    model: str = option("", "Directory or Hub name of a model of its own; empty: model.path.")
    adapter: str = option("", "Directory of a trained PEFT adapter to start from; empty: a new adapter.")
    learning_rate: float = option(0.0, "Peak learning rate of AdamW; 0: trainer.learning_rate.", ge=0)
    algorithm: AlgorithmConfig = option(AlgorithmConfig(), "Options of [algorithm] that differ for this policy.")
