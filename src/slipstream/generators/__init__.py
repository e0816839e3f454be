"""Inference engines and the pool that distributes requests over them.

Consumes prompts and published versions; produces completions with log-probabilities and version spans; waits for the
forward passes of engines.
"""
