#!/bin/sh
# What stale data costs in learning, and gains in time: two-digit addition at lag 0, 1, 4 and 16, with the corrections
# of the configuration and with none, three seeds each.
#
#     benchmarks/study_lag.sh [--jobs N] [--seeds N] [--loop.max_tokens N] [further arguments of `slipstream study lag`]
#
# Needs no installed package, only the dependencies: PYTHON=python3.12 benchmarks/study_lag.sh. Results are in
# studies/lag (STUDY=...). Started again, it goes on; where matplotlib is missing, draw elsewhere from lag.json there:
# slipstream study lag --draw --dir studies/lag.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
STUDY=${STUDY:-studies/lag}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
if [ ! -f "$STUDY/demo/start/tokenizer.json" ]; then
    "$PYTHON" examples/demo.py --dir "$STUDY/demo" --start-only
fi
exec "$PYTHON" -m slipstream study lag examples/addition.toml --dir "$STUDY" --model.path "$STUDY/demo/start" \
    --trainer.learning_rate 5e-4 --loop.max_tokens 350000 --evaluation.every_tokens 17500 "$@"
