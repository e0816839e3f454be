"""How lean the package is: the time that `import slipstream` takes, what it loads, and the lines of src/.

    python benchmarks/lean.py

It also tells how long a full garbage collection takes in a process that trains, and where it is installed in one that
drives vLLM: such processes leave out of it what they have loaded.

Lines are counted three ways: as `wc -l` does, without blank lines, and code alone (no blanks, comments or docstrings).
"""

from __future__ import annotations

import ast
import importlib.util
import io
import statistics
import subprocess
import sys
import time
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "slipstream"
COLLECT = "import gc, time, {}; gc.collect(); at = time.perf_counter(); gc.collect(); print(time.perf_counter() - at)"
PROCESSES = {
    "trains": "slipstream.trainers.trainer, transformers.models.qwen3",
    "drives vLLM": "vllm.v1.engine.llm_engine",
}
IMPORT = "import slipstream, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"


def code_lines(text: str) -> int:
    """Lines that hold a token which is neither a comment nor part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines - {text.count("\n") + 1})


def main() -> None:
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        assert subprocess.run([sys.executable, "-c", IMPORT], check=False).returncode == 0, "torch was loaded"
        seconds.append(time.perf_counter() - began)
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    whole = sum(text.count("\n") for text in texts)
    full = sum(sum(bool(line.strip()) for line in text.splitlines()) for text in texts)
    code = sum(map(code_lines, texts))
    print(
        f"import slipstream: {statistics.median(seconds):.2f} s (median of 5, interpreter's start included), no torch"
    )
    print(f"src/: {len(texts)} files, {whole:,} lines, {full:,} of them not blank, {code:,} of code")
    for name, modules in PROCESSES.items():
        if importlib.util.find_spec(modules.partition(".")[0]):
            done = subprocess.run([sys.executable, "-c", COLLECT.format(modules)], check=True, capture_output=True)
            print(f"a full garbage collection in a process that {name}: {float(done.stdout.split()[-1]):.2f} s")


if __name__ == "__main__":
    main()
