"""Losses, advantages, corrections and their statistics: pure functions of tensors, each with its formula and source.

Consumes the log-probabilities, versions and rewards of a batch; produces the gradient of each token; waits for nothing.
"""
