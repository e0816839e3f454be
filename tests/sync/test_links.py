"""Weight links: after a publish an engine serves bit-identical weights of one version."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.config.loading import load_config
from slipstream.config.schema import Config, ConfigError, TrainerConfig
from slipstream.errors import InvalidInput
from slipstream.generators.served_weights import ServedWeights, local_shards
from slipstream.model.inspection import trained_parameters
from slipstream.runtime.addresses import ADDRESS
from slipstream.sync import adapters, frames, nccl_direct, shared
from slipstream.sync.checksum import checksum
from slipstream.sync.link import ParameterShard, PublishHandle, find_link
from slipstream.trainers.master_weights import compute_on
from slipstream.trainers.parallel import TrainerRanks
from tests.conftest import build_model
from tests.sync.test_delta import Proxy

LINKS = ("shared", "checkpoint", "nccl", "delta")
DEVICE = torch.device("cpu")


def config_of(dtype: torch.dtype) -> Config:
    name = str(dtype).removeprefix("torch.")
    return load_config(None, ["--model.path=m", "--environment.name=e", f"--model.dtype={name}"])


class Pair:
    """A trainer's model and an engine's model, connected by a link."""

    def __init__(self, link: str, directory: Path, dtype: torch.dtype = torch.float32, family: str = "qwen3") -> None:
        sender, _ = find_link(link)
        self.trained = build_model(family, seed=1)
        self.served = copy.deepcopy(build_model(family, seed=2)).to(dtype)
        self.sender = sender(trained_parameters(self.trained), config_of(dtype), directory, 1)
        places = local_shards(trained_parameters(self.served))
        self.receiver = ServedWeights(link, self.sender.connection_info(), places, 1, rebind=True)
        self.publish(0)

    def train(self, amount: float) -> None:
        """Update parameters in place, as an optimizer does."""
        self.sender.before_update()
        with torch.no_grad():
            for parameter in self.trained.parameters():
                parameter.add_(amount)

    def stage(self, version: int) -> PublishHandle:
        """Stage a version and prepare it in the engine."""
        handle = self.sender.stage(version)
        self.receiver.prepare(handle)
        self.sender.send(handle)
        while not self.receiver.prepared():
            time.sleep(0.001)
        return handle

    def publish(self, version: int) -> None:
        handle = self.stage(version)
        self.receiver.apply()
        self.sender.release(handle)

    def equal(self) -> bool:
        pairs = zip(self.trained.parameters(), self.served.parameters(), strict=True)
        return all(torch.equal(a.to(b.dtype), b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("link", LINKS)
def test_published_weights_arrive_bit_identical(link: str, family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pair = Pair(link, tmp_path, dtype, family)
    assert pair.equal()
    for version in range(1, 6):
        pair.train(0.01 * version)
        assert not pair.equal()
        if version != 3:  # two updates between two publishes
            pair.publish(version)
            assert pair.equal()
    pair.sender.close()


@pytest.mark.parametrize("link", LINKS)
def test_engines_see_no_update_before_its_publish(link: str, tmp_path: Path) -> None:
    """Served weights stay bit-identical while the trainer updates, stages, and updates again."""
    pair = Pair(link, tmp_path)
    for version in range(1, 4):
        before = [p.clone() for p in pair.served.parameters()]
        pair.train(0.1)
        handle = pair.stage(version)
        assert all(torch.equal(a, b) for a, b in zip(before, pair.served.parameters(), strict=True))
        pair.receiver.apply()
        pair.sender.release(handle)
    pair.sender.close()


def test_shared_link_shares_memory(tmp_path: Path) -> None:
    """On a CPU in float32, trainer and engine compute on the same memory."""
    pair = Pair("shared", tmp_path)
    trained, served = next(pair.trained.parameters()), next(pair.served.parameters())
    with torch.no_grad():
        trained.data.view(-1)[0] = 1234.5
    assert served.view(-1)[0] == 1234.5
    pair.sender.close()


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    pair = Pair("shared", tmp_path)
    pair.train(0.1)
    pair.publish(1)
    for model in (pair.trained, pair.served):
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    pair.sender.close()


def test_a_model_on_shared_memory_still_trains_and_saves(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from slipstream.trainers.checkpoint import export

    pair = Pair("shared", tmp_path)
    pair.train(0.1)
    alone = TrainerRanks(TrainerConfig(), torch.device("cpu"))
    export(tmp_path / "policy", pair.trained, trained_parameters(pair.trained), alone)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, pair.trained(ids).logits)
    pair.sender.close()


def test_release_removes_all_but_the_newest_checkpoints(tmp_path: Path) -> None:
    pair = Pair("checkpoint", tmp_path)
    for version in range(1, 4):
        pair.train(0.1)
        pair.publish(version)
        assert [p.name for p in (tmp_path / "weights").iterdir()] == [f"version_{version}.safetensors"]
    pair.sender.close()
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("keep", [1, 3])
def test_close_keeps_sync_keep_versions_checkpoints(keep: int, tmp_path: Path) -> None:
    """The newest versions are kept; newer files of a killed run are removed at the first publish.

    Directories are versions of a run with `sync.restart`.
    """
    config = load_config(
        None, ["--model.path=m", "--environment.name=e", "--sync.link=checkpoint", f"--sync.keep_versions={keep}"]
    )
    sender, _ = find_link("checkpoint")
    weights = tmp_path / "weights"
    weights.mkdir()
    for left in ("version_19.safetensors", "version_10.partial"):
        (weights / left).write_bytes(b"")
    for left in ("version_6", "version_7", "version_8", "version_20", "version_8.partial"):
        (weights / left).mkdir()
        (weights / left / "model").write_bytes(b"")
    sending = sender(trained_parameters(build_model()), config, tmp_path, 1)
    for version in range(8, 13):
        sending.release(sending.stage(version))
        files = {path.name for path in weights.iterdir()}
        kept = range(version - keep + 1, version + 1)
        assert files == {f"version_{v}.safetensors" if v >= 8 else f"version_{v}" for v in kept}
    sending.close()
    assert {path.name for path in weights.iterdir()} == files


@pytest.mark.parametrize("keep", [0, 2])
def test_close_without_a_publish_keeps_no_extra_checkpoints(keep: int, tmp_path: Path) -> None:
    flags = ["--model.path=m", "--environment.name=e", "--sync.link=checkpoint", f"--sync.keep_versions={keep}"]
    sender, _ = find_link("checkpoint")
    for left in ("version_6", "version_7", "version_8"):
        (tmp_path / "weights" / left).mkdir(parents=True)
    sender(trained_parameters(build_model()), load_config(None, flags), tmp_path, 1).close()
    kept = sorted(path.name for path in tmp_path.glob("weights/*"))
    assert kept == ["version_7", "version_8"][2 - keep :]


@pytest.mark.parametrize("link", LINKS)
def test_each_worker_receives_its_shard(link: str, tmp_path: Path) -> None:
    """Shards are columns of a matrix, or empty for padding."""
    whole = {"a": torch.randn(6, 8), "b": torch.randn(5)}
    sender, _ = find_link(link)
    sending = sender({n: torch.nn.Parameter(t) for n, t in whole.items()}, config_of(torch.float32), tmp_path, 1)
    index = {"a": (slice(0, 6), slice(2, 5)), "b": (slice(5, 5),)}
    places = {n: ParameterShard(torch.zeros(t[index[n]].shape), tuple(t.shape), index[n]) for n, t in whole.items()}
    receiving = ServedWeights(link, sending.connection_info(), places, 1, rebind=False)
    handle = sending.stage(0)
    receiving.prepare(handle)
    sending.send(handle)
    while not receiving.prepared():
        time.sleep(0.001)
    receiving.apply()
    for name, place in places.items():
        assert torch.equal(place.tensor, whole[name][index[name]])
    sending.close()


def test_a_publish_that_cannot_be_read_leaves_the_old_version(tmp_path: Path) -> None:
    pair = Pair("checkpoint", tmp_path)
    before = [p.clone() for p in pair.served.parameters()]
    pair.train(0.1)
    handle = pair.sender.stage(1)
    Path(handle["path"]).write_bytes(b"torn")
    pair.receiver.prepare(handle)
    with pytest.raises(Exception, match=r"(?i)header|metadata"):
        while not pair.receiver.prepared():
            time.sleep(0.001)
    assert all(torch.equal(a, b) for a, b in zip(before, pair.served.parameters(), strict=True))


def test_a_missing_checkpoint_file_names_run_dir(tmp_path: Path) -> None:
    pair = Pair("checkpoint", tmp_path)
    handle = pair.sender.stage(1)
    shutil.rmtree(tmp_path / "weights")
    pair.receiver.prepare(handle)
    with pytest.raises(InvalidInput, match=r"^run.dir must be on .* the same path: .*version_1.safetensors here$"):
        while not pair.receiver.prepared():
            time.sleep(0.001)


@pytest.mark.parametrize("link", LINKS)
def test_another_model_is_refused_by_name(link: str, tmp_path: Path) -> None:
    sender, _ = find_link(link)
    sending = sender(trained_parameters(build_model()), config_of(torch.float32), tmp_path, 1)
    with pytest.raises(
        ValueError, match=r"model.layers.0.mlp.gate_proj.weight is \[64, 32\] in the trainer and \[48, 32\]"
    ):
        ServedWeights(
            link,
            sending.connection_info(),
            local_shards(trained_parameters(build_model(intermediate_size=48))),
            1,
            True,
        )
    sending.close()


@pytest.mark.parametrize("name", ["sharedd", "no_such_module:Link", "json:Link"])
def test_unknown_links_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f'sync.link = "{name}"'):
        find_link(name)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory has a name here")
def test_shared_memory_is_freed_with_its_process(tmp_path: Path) -> None:
    """The system frees the memory when the trainer ends, also by a kill: it has no name in a file system."""
    code = (
        "import os, signal, torch\n"
        "from slipstream.sync.shared import SharedSender\n"
        "from pathlib import Path\n"
        "from slipstream.config.loading import load_config\n"
        "config = load_config(None, ['--model.path=m', '--environment.name=e'])\n"
        "sender = SharedSender({'w': torch.nn.Parameter(torch.zeros(8))}, config, Path('.'), 1)\n"
        "print(sender.connection_info()['path'], os.path.exists(sender.connection_info()['path']), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = set(Path("/dev/shm").iterdir()) | set(tmp_path.iterdir())
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    path, existed = died.stdout.split()
    assert existed == "True"
    assert not Path(path).exists()
    assert set(Path("/dev/shm").iterdir()) | set(tmp_path.iterdir()) <= before


def test_an_update_before_release_is_refused(tmp_path: Path) -> None:
    """An update between stage and release would write into memory that engines read, so it is refused."""
    pair = Pair("shared", tmp_path)
    pair.train(0.1)
    handle = pair.stage(1)
    with pytest.raises(RuntimeError, match="before every generator serves"):
        pair.sender.before_update()
    pair.receiver.apply()
    pair.sender.release(handle)
    pair.sender.before_update()
    pair.sender.close()


@pytest.mark.parametrize("shape", [(10, 12), (10, 12, 3)])
def test_checksums_of_shards_add_up(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape)
    sums = [
        checksum(whole[a:b, c:d], (slice(a, b), slice(c, d)))
        for a, b in ((0, 4), (4, 10))
        for c, d in ((0, 5), (5, 12))
    ]
    assert sum(sums) % 2**64 == checksum(whole)
    other = whole.clone()
    other[[0, 1]] = other[[1, 0]]
    assert checksum(other) != checksum(whole)
    for dtype in (torch.float64, torch.bfloat16):
        assert checksum(whole.to(dtype)) != checksum(torch.nextafter(whole.to(dtype), torch.tensor(9.0).to(dtype)))


def test_a_model_on_exported_weights_trains_its_masters() -> None:
    """Gradients of several passes reach float32 masters; tied weights stay tied; only a publish changes shared
    weights.
    """
    model, plain = build_model(seed=1), build_model(seed=1)
    for parameter in plain.parameters():  # not the buffers of rotary embeddings
        parameter.data = parameter.data.to(torch.bfloat16)
    masters = trained_parameters(model)
    lent = {name: p.detach().to(torch.bfloat16) for name, p in masters.items()}
    compute_on(model, masters, lent)
    ids = torch.tensor([[5, 6, 7, 8]])
    sums = {name: torch.zeros_like(p) for name, p in masters.items()}
    for scale in (1.0, 0.25):
        for one in (model, plain):
            (one(ids, labels=ids).loss * scale).backward()
        for name, p in trained_parameters(plain).items():
            sums[name] += p.grad.float()
            p.grad = None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, master in masters.items():
        assert master.dtype == master.grad.dtype == torch.float32
        if "embed" in name:  # tied: both parts are added in float32 here, and in bfloat16 there
            torch.testing.assert_close(master.grad, sums[name], rtol=0.02, atol=0.02 * float(sums[name].abs().max()))
        else:
            assert torch.equal(master.grad, sums[name]), name
    before = {name: p.clone() for name, p in lent.items()}
    torch.optim.SGD(masters.values(), lr=0.1).step()
    assert all(torch.equal(before[name], p) for name, p in lent.items())
    assert all(p.data_ptr() == lent[name].data_ptr() for name, p in model.named_parameters())


def make_lora(seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(build_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def lora_config(*flags: str) -> Config:
    """Of a run that sends adapters to vLLM."""
    lora = ["--lora.rank=4", "--sync.link=lora", "--generator.engine=vllm"]
    return load_config(None, ["--model.path=m", "--environment.name=e", *lora, *flags])


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory has a name here")
def test_adapter_memory_is_freed_with_its_process(tmp_path: Path) -> None:
    """Engines read PEFT files; a killed trainer leaves dangling symlinks, and the next trainer removes them."""
    from slipstream.sync.adapters import AdapterSender, read_adapter

    config, parameters = lora_config(), {"a.lora_A.default.weight": torch.nn.Parameter(torch.randn(4, 8))}
    before = set(Path("/dev/shm").iterdir())
    if not (child := os.fork()):
        try:
            AdapterSender(parameters, config, tmp_path, 1).stage(3)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert len(files) == 2 and not any(path.exists() for path in files)
    assert set(Path("/dev/shm").iterdir()) <= before
    sender = AdapterSender(parameters, config, tmp_path, 1)
    handle = sender.stage(4)
    there = read_adapter(Path(handle["path"]), torch.device("cpu"))
    assert torch.equal(there["a.lora_A.weight"], next(iter(parameters.values())))
    assert json.loads((Path(handle["path"]) / "adapter_config.json").read_text())["r"] == 4
    sender.release(handle)
    assert not (tmp_path / "adapters").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staged_adapters_are_a_valid_safetensors_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """With odd sizes and several versions; each parameter is read once, since reading gathers it."""
    from safetensors.torch import load_file

    from slipstream.sync.adapters import AdapterSender, read_adapter

    class Read(dict[str, torch.Tensor]):
        def values(self) -> Any:
            return [self[name] for name in self]

        def __getitem__(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().__getitem__(name)

    read: list[str] = []
    shapes = {"b": (3, 5), "a": (5, 3), "c": (1, 7)}
    parameters = Read({f"m.{n}.lora_A.default.weight": torch.randn(shape) for n, shape in shapes.items()})
    sender = AdapterSender(parameters, lora_config(f"--model.dtype={str(dtype)[6:]}"), tmp_path, 1)
    for version in range(3):
        for parameter in dict(parameters).values():
            parameter.normal_()
        read.clear()
        handle = sender.stage(version)
        assert sorted(read) == sorted(parameters)
        assert Path(handle["path"]).name == f"policy-v{version}"
        wanted = {name.replace(".default", ""): p.to(dtype) for name, p in dict(parameters).items()}
        read_here = read_adapter(Path(handle["path"]), torch.device("cpu"))
        files = load_file(Path(handle["path"]) / "adapter_model.safetensors"), read_here
        for found in files:
            assert found.keys() == wanted.keys()
            assert all(found[n].dtype == dtype and torch.equal(found[n], wanted[n]) for n in wanted)
        sender.release(handle)
        assert not Path(handle["path"]).exists()
        assert all(torch.equal(files[1][n], wanted[n]) for n in wanted), "what an engine has loaded is its own"
    sender.close()


def test_random_cuts_and_flips_leave_only_published_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two engines on other hosts, which fetch each version at the same time; one has a slow network."""
    monkeypatch.setenv(ADDRESS, "127.0.0.2")  # not the loopback address of one host
    monkeypatch.setattr(frames, "RETRY_S", 0.001)
    monkeypatch.setattr(adapters, "FRAME", 1024)
    parameters = {"a.lora_A.default.weight": torch.nn.Parameter(torch.zeros(64, 64))}
    sender, draw = adapters.AdapterSender(parameters, lora_config(), tmp_path, 2), random.Random(0)

    def read(address: Any) -> torch.Tensor:
        with adapters.adapter_files(handle | {"server": address}) as path:
            return adapters.read_adapter(path, DEVICE)["a.lora_A.weight"]

    with ThreadPoolExecutor(2) as pool:
        for version in range(25):
            parameters["a.lora_A.default.weight"].data.fill_(version)
            handle = sender.stage(version)
            sent = sender.send(handle)
            assert sent["bytes"] > parameters["a.lora_A.default.weight"].nbytes
            assert sent["sums"] == {name: str(checksum(p)) for name, p in parameters.items()}
            proxies = [Proxy(handle["server"], [draw.randrange(1, 20000)], draw.randrange(1, 9000)) for _ in range(2)]
            proxies[0].rate = 2e6
            found = pool.map(read, [proxy.address for proxy in proxies])
            assert all(bool((tensor == version).all()) for tensor in found)
            assert all(proxy.connections > 1 for proxy in proxies)
            sender.release(handle)
            for proxy in proxies:
                proxy.close()
    sender.close()


def test_each_policy_is_fetched_from_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, "127.0.0.2")
    names = ["one", "other"]
    parameters = {
        f"a.lora_A.policy-{name}.weight": torch.nn.Parameter(torch.full((4, 8), float(i)))
        for i, name in enumerate(names)
    }
    config = lora_config("--policies=[{name='one'}, {name='other'}]")
    sender = adapters.AdapterSender(parameters, config, tmp_path, 1)
    handle = sender.stage(0)
    for i, name in enumerate(names):
        with adapters.adapter_files(handle, name) as path:
            assert path.name == name and bool((adapters.read_adapter(path, DEVICE)["a.lora_A.weight"] == i).all())
    sender.close()


def test_only_adapters_are_published(tmp_path: Path) -> None:
    trained, served = make_lora(1), make_lora(2)
    sender, _ = find_link("shared")
    sending = sender(trained_parameters(trained), config_of(torch.float32), tmp_path, 1)
    assert all("lora" in name for name in sending.connection_info()["shapes"])
    receiving = ServedWeights(
        "shared", sending.connection_info(), local_shards(trained_parameters(served)), 1, rebind=True
    )
    receiving.prepare(sending.stage(0))
    receiving.apply()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(trained(ids).logits, served(ids).logits)
    sending.close()


def test_a_taken_port_is_reported_while_receivers_connect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`nccl_direct` reserves its port; if another process binds it with SO_REUSEADDR, connecting
    fails with an error.
    """

    def opened(address: dict[str, Any]) -> socket.socket:
        return listen(address["master_port"])  # as vLLM's does

    def listen(port: int) -> socket.socket:
        door = socket.socket()
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((nccl_direct.LOOPBACK, port))
        door.listen()
        return door

    monkeypatch.setattr(nccl_direct, "import_transfer", lambda: (opened, None))
    senders = [nccl_direct.NcclDirectSender({}, config_of(torch.float32), tmp_path, 1) for _ in range(2)]
    good, bad = senders
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((nccl_direct.LOOPBACK, good._port))
    with listen(bad._port):
        offers = [sender.connection_info() for sender in senders]
        assert offers[0]["gate"]["port"] != offers[1]["gate"]["port"]
        good._group.result(10).close()
        good.check_connection()
        bad._group.exception(10)
        with pytest.raises(RuntimeError, match=f"nccl_direct.* at 127.0.0.1:{bad._port}: .*in use"):
            bad.check_connection()
    for sender in senders:
        sender.close()


def test_publishes_measure_time_by_a_clock_that_can_not_be_set_back() -> None:
    """The wall clock only dates what is shown, and files that another run left."""
    source, wall = Path(slipstream.__file__).parent, re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.|from time import")
    packages = ("sync", "generators", "trainers", "scheduling", "controller", "runtime")
    paths = itertools.chain(*((source / package).rglob("*.py") for package in packages))
    found = {str(path.relative_to(source)) for path in paths if wall.search(path.read_text())}
    assert found <= {"controller/control.py", "runtime/run_directory.py"}


@pytest.mark.parametrize("error", [0, 1])
def test_memory_that_cuda_does_not_lock_is_used_as_it_is(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory that was locked is unlocked once, even if CUDA then reports an error of the device."""
    calls = list[str]()

    class Runtime:
        def cudaHostRegister(self, *_: int) -> int:
            calls.append("lock")
            return error

        def cudaHostUnregister(self, _: int) -> int:
            calls.append("unlock")
            return 700

    monkeypatch.setattr(shared, "_cuda_runtime", Runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(16)))
    files = shared.SharedFiles(torch.device("cuda"))
    assert files.map(path).tolist() == files.map(path).tolist() == [*range(16)]
    files.close()
    assert calls == (["lock"] if error else ["lock", "unlock"])
    assert ("can't page-lock 0.0 GB (error 1)" in capsys.readouterr().err) == bool(error)
