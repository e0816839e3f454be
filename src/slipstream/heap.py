"""When Python looks for garbage: not so that a process which has millions of tokens stands still for it."""

from __future__ import annotations

import gc

# A full collection then comes once in five million containers more. By itself Python makes one whenever there is a
# quarter more than at the last, and walks through every token of every list in it.
SELDOM = (5_000, 10, 100)


def set_heap_aside() -> None:
    """Let the garbage collector never again look at what exists now.

    Libraries and models are half a million objects that stay for good, and each full collection would stop the process
    for some tenths of a second to walk through them.
    """
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Let it look for garbage seldom from here on: for processes that make next to none, as vLLM's."""
    gc.set_threshold(*SELDOM)
