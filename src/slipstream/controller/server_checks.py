"""Checks of the user's vLLM servers: whether a run can use each, and the network from the trainer's node to it."""

from __future__ import annotations

from urllib.parse import urlsplit

from slipstream.config.schema import Config, ConfigError
from slipstream.controller.node_faults import MIN_BANDWIDTH, Fault
from slipstream.controller.node_worker import NodeWorker
from slipstream.errors import UserError
from slipstream.generators.vllm.server_client import RequestFailed, ServerClient, inspect_server
from slipstream.generators.vllm.worker_methods import WorkerMethods

CHECK = "servers"


async def try_servers(trainer: NodeWorker, config: Config) -> tuple[dict[str, float], list[Fault]]:
    """Bytes per second from the worker on the trainer's node to each of `generator.servers`, and the faults."""
    results = [await _try_server(url, trainer, config) for url in config.generator.servers]  # one stream at a time
    rates = {url: rate for url, rate in zip(config.generator.servers, results, strict=True) if isinstance(rate, float)}
    return rates, [Fault(CHECK, found) for found in results if isinstance(found, str)]


async def _try_server(url: str, trainer: NodeWorker, config: Config) -> float | str:
    """The rate, or the fault."""
    client = ServerClient(url)
    try:
        client.open()
        await inspect_server(client, config)
        peer = await trainer.serve_streams(urlsplit(url).hostname or "")
        rates = await client.call_workers("be reached", None, WorkerMethods.slipstream_receive_stream, *peer)
    except ConfigError as error:
        return str(error)
    except UserError as error:
        return f"{client.name}: the trainer's node can't send to it: {error}"
    except RequestFailed as failure:
        return f"{failure}; open the ports of this host for it, or name another network as sync.interface"
    finally:
        await client.close()
    if min(rates) < MIN_BANDWIDTH:
        return f"{client.name} receives {8e-6 * min(rates):.1f} Mbit/s from the trainer's node; check its network"
    return min(rates)
