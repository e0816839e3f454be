"""Network addresses of a worker, and the rendezvous store at one of them."""

from __future__ import annotations

import os
import socket
import struct
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slipstream.config.schema import Config, ConfigError
from slipstream.errors import InvalidInput

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
ADDRESS = "SLIPSTREAM_ADDRESS"  # environment variable: address of this worker for workers on other hosts
INTERFACE = "SLIPSTREAM_INTERFACE"  # environment variable: `sync.interface`
RENDEZVOUS_FILE = "SLIPSTREAM_RENDEZVOUS_FILE"  # environment variable: rendezvous file of trainer ranks on one host
RENDEZVOUS_PREFIX = ".ranks-"  # of its directory, in that of the run
SIOCGIFADDR = 0x8915  # see netdevice(7)


def own_address() -> str:
    """The address at which other workers reach this process.

    That of `sync.interface`, else of `SLIPSTREAM_ADDRESS` (set with Ray and with servers on other hosts), else the
    loopback address. Raises `InvalidInput` for an interface without an address.
    """
    if not (name := os.environ.get(INTERFACE)):
        return os.environ.get(ADDRESS, LOOPBACK)
    if address := (found := interfaces()).get(name):
        return address
    has = ", ".join(sorted(found))
    raise InvalidInput(f'sync.interface = "{name}" has no IPv4 address on {socket.gethostname()}, which has {has}')


def has_own_address() -> bool:
    """Whether this process has an address for other hosts, as each worker has in a run that `may_cross_hosts`."""
    return INTERFACE in os.environ or ADDRESS in os.environ


def may_cross_hosts(config: Config) -> bool:
    """Whether the weight link of this run may have ends on several hosts: with Ray, an interface or remote servers."""
    return config.runtime.kind == "ray" or bool(link_environment(config))


def address_towards(host: str) -> str:
    """The address from which this process sends to `host`, where `host` can reach it. Raises `OSError`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def link_environment(config: Config) -> dict[str, str]:
    """Environment variables by which trainer and engines of a run choose the network of its weight link.

    Raises `ConfigError` for a server on a host that can't be reached.
    """
    if name := config.sync.interface:
        return {INTERFACE: name, "NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name}
    if not config.generator.remote or config.runtime.kind != "local":
        return {}
    try:
        return {ADDRESS: address_towards(urlsplit(f"//{config.generator.remote}").hostname or "")}
    except OSError as error:
        raise ConfigError(f"generator.servers: {config.generator.remote} can't be reached: {error}") from None


def interfaces() -> dict[str, str]:
    """IPv4 addresses of this host's network interfaces by name (Linux only)."""
    import fcntl  # which Windows lacks; `run_directory` says so

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_of(address: str) -> str:
    """Name of the network interface with this IPv4 address, or "" (Linux only)."""
    return next((name for name, found in interfaces().items() if found == address), "")


def private_store(address: str, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """A rendezvous store at a free port of this address alone, for trainer ranks on Ray and the `nccl` link."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its import takes seconds

    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )
