"""Network addresses of a worker, and the rendezvous store at one of them."""

from __future__ import annotations

import os
import socket
import struct
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

ADDRESS = "SLIPSTREAM_ADDRESS"  # environment variable: address of this worker for workers on other hosts
SIOCGIFADDR = 0x8915  # see netdevice(7)


def own_address() -> str:
    """The address at which other workers reach this process: its Ray node's, or the loopback address."""
    return os.environ.get(ADDRESS, "127.0.0.1")


def interface_of(address: str) -> str:
    """Name of the network interface with this IPv4 address, or "" (Linux only)."""
    import fcntl  # which Windows lacks; `run_directory` says so

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def private_store(address: str, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """A rendezvous store at a free port of this address alone, for trainer ranks and the `nccl` link."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its import takes seconds

    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )
