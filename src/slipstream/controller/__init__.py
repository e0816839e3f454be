"""What surrounds the training loop: start, rollouts, publishing, evaluation, checkpoints, metrics, finish.

Consumes a configuration and a run directory. Produces batches of finished groups, published versions and the records
of the run. Waits for engines, environments and the trainer, each with a time limit.
"""
