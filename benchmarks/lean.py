"""Size of the package: processor time of `import slipstream`, the modules that it loads, and the lines of src/.

    python benchmarks/lean.py [--json FILE]

It also measures a full garbage collection in a process that trains and, if vLLM is installed, in a process that drives
vLLM. Such processes exclude loaded objects from collections (`runtime/memory.py`).

Lines are counted three ways: as `wc -l` does, without blank lines, and code alone (no blanks, comments or docstrings).
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import json
import resource
import statistics
import subprocess
import sys
import tokenize
from pathlib import Path

from work import conditions

SOURCE = Path(__file__).parent.parent / "src" / "slipstream"
COLLECT = "import gc, time, {}; gc.collect(); at = time.process_time(); gc.collect(); print(time.process_time() - at)"
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


def children_seconds() -> float:
    """Processor time of ended child processes; other load on the machine changes it little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    seconds = []
    for _ in range(5):
        began = children_seconds()
        assert subprocess.run([sys.executable, "-c", IMPORT], check=False).returncode == 0, "torch was loaded"
        seconds.append(children_seconds() - began)
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    whole = sum(text.count("\n") for text in texts)
    full = sum(sum(bool(line.strip()) for line in text.splitlines()) for text in texts)
    code = sum(map(code_lines, texts))
    print(
        f"import slipstream: {statistics.median(seconds):.2f} s (median of 5, interpreter's start included), no torch"
    )
    print(f"src/: {len(texts)} files, {whole:,} lines, {full:,} of them not blank, {code:,} of code")
    found = {"import_s": seconds, "files": len(texts), "lines": whole, "not_blank": full, "code": code}
    collections = {}
    for name, modules in PROCESSES.items():
        if importlib.util.find_spec(modules.partition(".")[0]):
            done = subprocess.run([sys.executable, "-c", COLLECT.format(modules)], check=True, capture_output=True)
            collections[name] = float(done.stdout.split()[-1])
            print(f"a full garbage collection in a process that {name}: {collections[name]:.2f} s")
    if options.json:
        found |= {"garbage_collection_s": collections}
        options.json.write_text(json.dumps({**conditions(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
