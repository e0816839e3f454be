"""Records of a run, and their display: metrics, rollouts, evaluations, progress, report.

Consumes batches, step statistics and evaluations. Produces the files of the run directory and text in the terminal.
Waits only for the disk.
"""
