"""`slipstream study lag`: `slipstream train` for each lag, correction and seed, and a comparison of the results."""
