"""The embedded engine: continuous batching over a Hugging Face model's own forward pass.

Consumes requests and weights; produces completions; waits for nothing but its own forward passes.
"""
