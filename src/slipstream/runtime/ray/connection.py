"""Connects this process to a Ray cluster, or starts one, and hides Ray's output."""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import ray

from slipstream.config.schema import ConfigError
from slipstream.runtime.addresses import LOOPBACK

CONNECT_TIMEOUT_S = 5.0


def connect(address: str, option: str) -> None:
    """Make this process a driver of the cluster at `address`; "" starts a cluster of this host only.

    `option` names the address in errors. Raises `ConfigError` if no cluster answers, or if it refuses this process.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            f'{option} = "{address}" is of Ray\'s client, which carries no weights; give the address of the '
            "head node, such as 10.0.0.1:6379, on a machine that nodes can reach"
        )
    if ray.is_initialized():
        raise ConfigError("this process uses a Ray cluster already; call ray.shutdown() before the run")
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "critical", "configure_logging": False}
    with _captured_stderr() as printed:
        try:
            if ":" in address:  # Ray itself tries for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
            if address:
                ray.init(address, **quiet)
            else:
                ray.init("local", include_dashboard=False, _node_ip_address=LOOPBACK, **quiet)
            # Otherwise Ray prints the last hundred lines of a lost node's log, whatever `log_to_driver` is.
            ray._private.worker._worker_logs_enabled = False
        except Exception as error:  # Ray raises this class itself if a node takes too long to start
            printed.seek(0)
            raise ConfigError(_describe(address, option, error, printed.read().decode(errors="replace"))) from None


def _describe(address: str, option: str, error: Exception, printed: str) -> str:
    """One line for a failed connection: what Ray raised and printed, and what to do."""
    reason, given = " ".join(str(error).split())[:300], f'{option} = "{address}"'
    if not address:
        return f"Ray can't start on this machine ({reason}); Ray's logs are in /tmp/ray/session_latest/logs"
    if isinstance(error, ray.exceptions.AuthenticationError) or "InvalidAuthToken" in printed:
        return (
            f"{given}: the cluster refuses this process's token; copy ~/.ray/auth_token of the head node to this "
            "machine, or name it with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        )
    if "Version mismatch" in reason:
        return f"{given}: {reason}; install the same Ray and the same Python on all nodes"
    return (
        f"{given}: no Ray cluster answers there ({reason}); start one with `ray start --head` and give its address, "
        f"or leave {option} out to start one on this machine"
    )


@contextmanager
def _captured_stderr() -> Iterator[IO[bytes]]:
    """Context in which a file receives what this process prints on standard error, in Python and in C++."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
