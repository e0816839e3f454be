"""Environments: tasks, and episodes that sample from the policy and return a reward.

Consumes an environment's tasks and a generator; produces validated rollouts. Waits for completions, for tools, and for
reward workers.
"""
