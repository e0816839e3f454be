"""In CI a test runs or fails: a library that is missing there skips none."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import LONG, _require_libraries

REASONS = {
    "could not import 'verifiers': No module named 'verifiers'": "failed",
    "vLLM is not installed": "failed",
    "there is no GPU here": "skipped",
}


@pytest.mark.parametrize(("reason", "outcome"), REASONS.items())
def test_a_missing_library_fails_its_tests(reason: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def skipped() -> SimpleNamespace:
        return SimpleNamespace(skipped=True, outcome="skipped", longrepr=("test_file.py", 1, f"Skipped: {reason}"))

    monkeypatch.setenv("SLIPSTREAM_TEST_LIBRARIES", "required")
    assert _require_libraries(skipped()).outcome == outcome
    monkeypatch.delenv("SLIPSTREAM_TEST_LIBRARIES")
    assert _require_libraries(skipped()).outcome == "skipped"


def test_ci_requires_all_libraries() -> None:
    assert "SLIPSTREAM_TEST_LIBRARIES=required make test" in (Path(__file__).parents[1] / ".ci/run").read_text()


def test_the_files_that_run_first_exist() -> None:
    assert [name for name in LONG if not (Path(__file__).parent / name).exists()] == []
