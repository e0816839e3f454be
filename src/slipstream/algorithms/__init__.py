"""What is learned from a rollout: pure functions of tensors, each a formula and its source."""
