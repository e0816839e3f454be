"""Plan a run before it starts: the split of GPUs between trainer and engines, `loop.max_lag`, and the cost.

Consumes a model's shape, a kind of GPU, and the lengths of rollouts. Produces ranked splits: by formula, the best of
them by a simulation that drives the scheduling code of runs. Never waits, and needs no GPU.
"""
