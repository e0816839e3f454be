"""The configuration: options, cross-checks, TOML and flags, plug-ins.

Consumes a TOML file and command-line flags; produces a validated, frozen `Config`, and objects for the references in
it; waits for nothing.
"""
