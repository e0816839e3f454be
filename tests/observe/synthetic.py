"""The writer of made-up runs in benchmarks/, for tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from synthetic_run import HOSTILE, SyntheticRun, build_tokenizer

__all__ = ["HOSTILE", "SyntheticRun", "build_tokenizer"]
