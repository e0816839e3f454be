"""Weight links: they bring one version of the weights from the trainer to every engine, both ends in one file.

Consumes the trainer's parameters. Produces staged weights in each engine process, and checksums to verify them.
Waits for the other end of a collective link, with a timeout.
"""
