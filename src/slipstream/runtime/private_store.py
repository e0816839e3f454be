"""A rendezvous store, for trainer ranks and the `nccl` link, that listens on one address instead of all."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def private_store(address: str, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """A store at a free port of `address`, the loopback address unless workers are on several hosts."""
    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )
