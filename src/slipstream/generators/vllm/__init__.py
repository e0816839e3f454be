"""Engines on released versions of vLLM: in a process of the run (`engine`), or a server of the user (`servers`).

Consumes requests and published versions; produces completions with exact version spans; waits for vLLM's steps.
"""
