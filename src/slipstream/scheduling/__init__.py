"""Pure scheduling, without I/O and clocks: which tasks start, which groups are trained on, when failures end a run.

Consumes events of the training loop. Produces visits to start and groups to train on. Never waits.
"""
