"""Plan a run before it starts: how to split GPUs between trainer and engines, how far to generate ahead, what it costs.

Consumes a model's shape, a kind of GPU, and the lengths of rollouts. Produces ranked splits: by formula, the best of
them by a simulation that drives the scheduling code of runs. Never waits, and needs no GPU.
"""
