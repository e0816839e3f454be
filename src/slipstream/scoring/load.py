"""From a configuration to a scoring stage."""

from __future__ import annotations

from pathlib import Path

from slipstream.config import Config
from slipstream.environments.base import Codec
from slipstream.scoring.base import Scorer
from slipstream.scoring.functions import own_scorer
from slipstream.scoring.http import Judge
from slipstream.scoring.model import RewardModel
from slipstream.scoring.stage import ScoringStage
from slipstream.scoring.teacher import Teacher


def make_scoring(config: Config, codec: Codec, logs: Path | None = None) -> ScoringStage | None:
    """The stage of this configuration, not started; None where all rewards are the environment's and there is no
    teacher. Raises `ConfigError`."""
    scorer = make_scorer(config, codec, logs)
    teacher = Teacher(config, logs and logs / "teacher.log") if config.teacher.path or config.teacher.lag else None
    return ScoringStage(config.scoring, scorer, teacher) if scorer or teacher else None


def make_scorer(config: Config, codec: Codec, logs: Path | None) -> Scorer | None:
    """What `scoring.kind` names. Raises `ConfigError`."""
    kind, options = config.scoring.kind, config.scoring.options
    if kind == "http":
        return Judge(options, codec)
    if kind == "model":
        return RewardModel(
            options, config.model.path, logs and logs / "reward_model.log", config.runtime.progress_timeout
        )
    return own_scorer(config) if kind else None
