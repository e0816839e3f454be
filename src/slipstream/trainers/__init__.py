"""The trainer: optimizer steps over one or several ranks.

Consumes batches. Produces updated weights, a `StepStats` for each step, checkpoints and exported policies.
Waits for other ranks in collectives, and for the disk at the last checkpoint.
"""
