"""The policy as a packed forward pass, which trainer, reference and teacher share.

Consumes model files and samples. Produces loaded models, micro-batches, and log-probabilities of sampled tokens.
Waits for the Hugging Face Hub when a model loads, and for other ranks in context parallelism.
"""
