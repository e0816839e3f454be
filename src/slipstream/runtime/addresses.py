"""Network addresses of a worker. Without torch, which takes seconds to import."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

ADDRESS = "SLIPSTREAM_ADDRESS"  # environment variable: address of this worker for workers on other hosts
SIOCGIFADDR = 0x8915  # see netdevice(7)


def own_address() -> str:
    """The address at which other workers reach this process: its Ray node's, or the loopback address."""
    return os.environ.get(ADDRESS, "127.0.0.1")


def interface_of(address: str) -> str:
    """Name of the network interface with this IPv4 address, or "" (Linux only)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""
