#!/bin/sh
# Accuracy lost and time gained by stale data: two-digit addition at lag 0, 1, 4 and 16, with the corrections of the
# configuration and with none, three seeds each.
#
#     benchmarks/study_lag.sh [--jobs N] [--seeds N] [--loop.max_tokens N] [further arguments of `slipstream study lag`]
#
# Needs the dependencies, not the installed package: PYTHON=python3.12 benchmarks/study_lag.sh. Results are written to
# studies/lag (STUDY=...). The same command resumes an interrupted study. If matplotlib is missing, copy lag.json to a
# machine that has it, and draw there: slipstream study lag --draw --dir studies/lag.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
STUDY=${STUDY:-studies/lag}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
if [ ! -f "$STUDY/demo/start/tokenizer.json" ]; then
    "$PYTHON" examples/demo.py --dir "$STUDY/demo" --start-only
fi
exec "$PYTHON" -m slipstream study lag examples/addition.toml --dir "$STUDY" --model.path "$STUDY/demo/start" \
    --trainer.learning_rate 5e-4 --trainer.warmup_steps 0 --loop.max_tokens 350000 --evaluation.every_tokens 17500 "$@"
