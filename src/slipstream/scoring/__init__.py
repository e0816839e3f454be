"""Scoring: rewards from a function, a judge or a reward model, and a teacher's log-probabilities.

Consumes the rollouts of finished episodes; produces them with rewards. Waits for scorers and the teacher, concurrently
with generation.
"""
