"""`slipstream study lag`: compare training on stale data by lag and off-policy correction.

Consumes a configuration; starts `slipstream train` once per lag, correction and seed and waits for all runs.
Produces `lag.json` (all results), `lag.md` (table) and two plots.
"""
