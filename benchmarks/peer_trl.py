"""The same work in TRL's asynchronous GRPO trainer (1.10) and in Slipstream: trainers alone, or with vLLM generating.

    python benchmarks/peer_trl.py rollouts [--with ours full lean defaults large unchecked] [--json FILE]   # one GPU
    python benchmarks/peer_trl.py run [--with defaults unchecked] [--json FILE]                   # two GPUs

`rollouts` trains on prepared rollouts, the same for all trainers, so that no trainer waits. `run` uses TRL's own
rollout worker and weight transfer, with a `vllm serve` started as in TRL's documentation; compare it with
`benchmarks/end_to_end.py`. Each trainer runs in a process of its own. The settings have equal numbers of tokens in an
optimizer step; the first three are Slipstream's, the others TRL's:

    ours        defaults
    full        full activation checkpointing
    lean        least memory: full activation checkpointing, one copy of the weights, small micro-batches (bfloat16, so
                only on a GPU)
    defaults    activation checkpointing, micro-batches of the server's longest sequence, 4,096 tokens
    large       the same with micro-batches of 40,960 tokens
    unchecked   no activation checkpointing, micro-batches of 10,240 tokens

`--set NAME=VALUE` gives further options of `AsyncGRPOConfig` to all settings. Both sides use torch's variable-length
attention; TRL would download a kernel from the Hub. The first `--warmup` steps are excluded. `utilisation` is the
model's arithmetic, by the formula of `trainers/flops.py`, relative to a matrix product in the same process;
`memory_gb` is the peak memory of tensors in a step. `busy` of the trainer is the share of time without waits for
rollouts and without weight transfer; `busy` of the server is the share of time with requests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from trainer import DTYPE, GPU, make_rollouts
from work import at_least_one, conditions, prompts, rewards, save_model

GROUP, LONGEST = 8, 4096
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "large": {"token_budget": 40960},
    "unchecked": {"token_budget": 10240, "gradient_checkpointing": False},
}
OURS = {
    "ours": [],
    "full": ["--trainer.activation_checkpointing=full"],
    "lean": ["--trainer.keep_compute_copy=false", "--trainer.activation_checkpointing=full",
             "--trainer.tokens_per_microbatch=6144"],
}  # fmt: skip
# What vLLM's transfer engine is told on both sides: TRL leaves it all to vLLM, packed into buffers of 1 GiB.
TRANSFERS: dict[str, dict[str, Any]] = {
    "own": {"packed": True},
    "one_buffer": {"packed": True, "packed_buffer_size_bytes": 1 << 40},
    "one_by_one": {"packed": False},
}
HERE = Path(__file__).parent


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("what", choices=["rollouts", "run", "one"])  # "one" is a trainer's own process
    found.add_argument("--with", dest="settings", nargs="+", default=[])
    found.add_argument("--set", dest="changes", nargs="*", default=[], metavar="NAME=VALUE")
    found.add_argument("--shape", default="1.7B")
    found.add_argument("--model", type=Path, help="a model saved before, instead of one of this shape")
    found.add_argument("--groups", type=int, default=16)
    found.add_argument("--prompt", type=int, default=128)
    found.add_argument("--completion", type=int, default=512)
    found.add_argument("--warmup", type=at_least_one, default=2)
    found.add_argument("--steps", type=int, default=4)
    found.add_argument("--seconds", type=float, default=300.0, help="that one trainer may take")
    found.add_argument("--transfer", choices=[*TRANSFERS], default="own", help="how TRL sends weights")
    found.add_argument("--default-stream", action="store_true", help="keep TRL on the stream that vLLM takes it from")
    found.add_argument("--url", default="", help="of a server, for the process of a trainer")
    found.add_argument("--logs", type=Path, default=Path(), help="folder for what trainers and servers print")
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # not without ending what it started
    if options.what == "one":
        print(json.dumps(train(options)), flush=True)
        os._exit(0)  # whatever threads are left
    settings = options.settings or (list(OURS) if options.what == "rollouts" and GPU else []) + list(SETTINGS)
    options.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        server: Server | None = None
        model = options.model or Path(folder) / "model"
        if not model.exists():
            save_model(options.shape, model, getattr(torch, DTYPE))
            if GPU:
                torch.cuda.empty_cache()
        options.model = model.resolve()
        results: list[dict[str, Any]] = []
        described = {**conditions(), "shape": options.shape, "results": results}
        for setting in settings:
            try:
                if options.what == "run" and server is None:
                    server = servers.enter_context(Server(options.model, options.logs / "trl_server.log"))
                found = ours(options, setting) if setting in OURS else theirs(options, setting, server)
            except Exception as error:
                traceback.print_exc()
                found, server = {"error": str(error)[-2000:]}, None
                servers.close()  # the next setting has another
            results.append({"setting": setting, **found})
            print(json.dumps({k: v for k, v in results[-1].items() if k != "each"}), flush=True)
            if options.json:
                options.json.write_text(json.dumps(described, indent=1) + "\n")


# The processes


def ours(options: argparse.Namespace, setting: str) -> dict[str, Any]:
    """Results of Slipstream's trainer on the rollouts of `Ready`, by `benchmarks/trainer.py`."""
    command = [
        sys.executable, str(HERE / "trainer.py"), "--shape", options.shape, "--model", str(options.model), "--lengths",
        str(options.prompt), str(options.completion), "--tokens", str(tokens_a_step(options)),
        "--warmup", str(options.warmup), "--steps", str(options.steps), *OURS[setting],
    ]  # fmt: skip
    return finish(command, options.logs / f"{setting}.log", options.seconds, own_gpu(0))


def theirs(options: argparse.Namespace, setting: str, server: Server | None) -> dict[str, Any]:
    """Results of TRL's trainer with one of its settings, with a server or on the rollouts of `Ready`."""
    passed_on = ("groups", "prompt", "completion", "warmup", "steps", "transfer")
    command = [
        sys.executable, str(HERE / "peer_trl.py"), "one", "--with", setting, "--model", str(options.model),
        *(f"--{name}={getattr(options, name)}" for name in passed_on),
        *(["--set", *options.changes] if options.changes else []),
        *(["--default-stream"] if options.default_stream else []),
    ]  # fmt: skip
    log = options.logs / f"trl_{options.what}_{setting}.log"
    if server is None:
        return finish(command, log, options.seconds, own_gpu(0))
    address = {"VLLM_HOST_IP": "127.0.0.1"}
    found = finish([*command, "--url", server.url], log, options.seconds, own_gpu(1) | address)
    return found | {"transfer": options.transfer} | server.describe(*found["window"])


def own_gpu(number: int) -> dict[str, str]:
    """The environment of a process that sees one GPU, of those that are visible here."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": seen[number] if number < len(seen) and seen[0] else str(number)} if GPU else {}


def finish(command: list[str], log: Path, seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """Run a command to its end; its last line of output is its result."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=out, start_new_session=True
        )
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        end(process)
    with log.open("ab") as out:
        out.write(said)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its child processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(15)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


class Server:
    """A vLLM server, started as in TRL's documentation. Its metrics are sampled four times a second."""

    def __init__(self, model: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", log
        self._command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1",
            "--port", str(port), "--max-model-len", str(LONGEST), "--logprobs-mode", "processed_logprobs",
        ]  # fmt: skip
        if GPU:
            self._command += ["--weight-transfer-config", '{"backend":"nccl"}', "--gpu-memory-utilization", "0.85"]
        else:
            self._command += ["--enforce-eager", "--dtype", "float32", "--max-num-seqs", "16"]
        self._seen: list[tuple[float, float, float]] = []  # time, requests, tokens drawn so far
        self._closed = threading.Event()

    def __enter__(self) -> Server:
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1", **own_gpu(0)}
        if not GPU:
            environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, env=os.environ | environment, stdout=out, stderr=out, start_new_session=True
            )
        try:
            began = time.monotonic()
            while not self._answers("/health"):
                if self._process.poll() is not None or time.monotonic() - began > 240:
                    raise RuntimeError(f"vLLM's server did not start:\n{self._log.read_text()[-3000:]}")
                time.sleep(0.5)
        except BaseException:
            end(self._process)
            raise
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        end(self._process)

    def describe(self, began: float, ended: float) -> dict[str, Any]:
        """Metrics of the server between two times."""
        seen = [entry for entry in self._seen if began <= entry[0] <= ended]
        if len(seen) < 2:
            return {}
        drawn, seconds = seen[-1][2] - seen[0][2], seen[-1][0] - seen[0][0]
        return {
            "generated_tokens_per_s": drawn / seconds,
            "generator_busy": statistics.mean(float(entry[1] > 0) for entry in seen),
            "generator_requests": statistics.mean(entry[1] for entry in seen),
        }

    def _watch(self) -> None:
        while not self._closed.wait(0.25):
            lines = [line.split() for line in self._answers("/metrics").splitlines() if line.startswith("vllm:")]
            values = {line[0].partition("{")[0]: float(line[-1]) for line in lines if len(line) > 1}
            drawn = values.get("vllm:generation_tokens_total", values.get("vllm:generation_tokens", 0.0))
            self._seen.append((time.time(), values.get("vllm:num_requests_running", 0.0), drawn))

    def _answers(self, path: str) -> str:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return str(answer.read().decode()) or "yes"
        except OSError:
            return ""


# TRL, in a process of its own


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train with TRL for the requested steps. Returns the measurements."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig

    use_varlen_attention()
    if options.transfer != "own" or options.default_stream:
        use_transfer(TRANSFERS[options.transfer], options.default_stream)
    (setting,) = options.settings
    changes = SETTINGS[setting] | {
        name: json.loads(value) for name, _, value in (change.partition("=") for change in options.changes)
    }
    length = options.prompt + options.completion
    samples = options.groups * GROUP
    micro_batches = max(1, round(samples / (changes.get("token_budget", LONGEST) // length)))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.eos_token = "w0"  # TRL's parser needs one; the server has none, so that no completion ends early
    tokenizer.chat_template = chat_template()
    alone = {} if options.url else {"token_budget": LONGEST}  # nobody to ask for it
    if setting != "defaults":
        alone |= {"max_inflight_tasks": 4 * samples}  # what the default means, counted in samples
    with tempfile.TemporaryDirectory() as folder:
        arguments = AsyncGRPOConfig(
            output_dir=folder, report_to="none", save_strategy="no", disable_tqdm=True,
            max_steps=options.warmup + options.steps, gradient_accumulation_steps=micro_batches,
            num_generations=GROUP, max_completion_length=options.completion,
            **({"vllm_server_base_url": options.url} if options.url else {}),
            **({} if GPU else {"use_cpu": True, "bf16": False}), **(alone | changes),
        )  # fmt: skip
        rows = [{"prompt": [{"role": "user", "content": text}]} for text in conversations(tokenizer, options.prompt)]
        ready = {} if options.url else {"rollout_worker": Ready(options), "weight_transfer": Nowhere()}
        if not GPU:
            ready["weight_transfer"] = Nowhere()
        trainer = measured_trainer()(
            model=str(options.model), args=arguments, reward_funcs=rewards, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer, **ready,
        )  # fmt: skip
        trainer.measure()
        trainer.train()
    return {"micro_batches": micro_batches, **changes, **trainer.describe(options.warmup)}


def use_varlen_attention() -> None:
    """Register torch's variable-length attention in place of the kernel that TRL loads from the Hub."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from trl.experimental.async_grpo import async_grpo_trainer

    from slipstream.model.attention import Segments, attend

    known: dict[str, Any] = {}

    def segments(positions: torch.Tensor) -> dict[str, Any]:
        """Boundaries of sequences, computed once for all layers of a pass."""
        if known.get("positions") is not positions:
            starts = [*(positions[0] == 0).nonzero().flatten().tolist(), positions.shape[1]]
            runs = [(range(a, b), (range(a, b),)) for a, b in pairwise(starts)]
            known.update(positions=positions, arguments=Segments.from_ranges(runs, positions.device).arguments())
        arguments: dict[str, Any] = known["arguments"]
        return arguments

    def varlen(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        kind = torch.get_autocast_dtype(query.device.type) if torch.is_autocast_enabled(query.device.type) else None
        bf16_copies = [tensor.to(kind or tensor.dtype) for tensor in (query, key, value)]  # as its flash attention does
        return attend(module, *bf16_copies, None, others.get("scaling"), **segments(others["position_ids"]))

    class WithVarlen:
        @staticmethod
        def from_pretrained(*arguments: Any, **options: Any) -> Any:
            return AutoModelForCausalLM.from_pretrained(*arguments, **options | {"attn_implementation": "torch_varlen"})

    ALL_ATTENTION_FUNCTIONS.register("torch_varlen", varlen)
    async_grpo_trainer.AutoModelForCausalLM = WithVarlen


def use_transfer(settings: dict[str, Any], default_stream: bool) -> None:
    """Have TRL send weights with these settings of vLLM's engine, and only when its step is over on the device.

    vLLM's communicator makes a stream of its own the current one; with `default_stream` steps go on in the usual one.
    """
    from trl.experimental.async_grpo import async_grpo_trainer, weight_transfer
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs

    class Client(weight_transfer.WeightTransferClient):  # type: ignore[misc]
        def __init__(self, *, weight_update_info: dict[str, Any], **others: Any) -> None:
            super().__init__(weight_update_info=weight_update_info | settings, **others)

        def init_weight_transfer(self) -> None:
            super().init_weight_transfer()
            if default_stream:
                torch.cuda.synchronize()
                torch.cuda.set_stream(torch.cuda.default_stream())

        def send_weights(self, iterator: Any) -> None:
            torch.cuda.synchronize()  # vLLM reads in streams of its own, which wait for no step
            super().send_weights(iterator)

    def arguments(group: Any, packed: bool) -> Any:
        return NCCLTrainerSendWeightsArgs(group=group, **settings)

    weight_transfer.NCCLTrainerSendWeightsArgs = arguments
    async_grpo_trainer.WeightTransferClient = Client


def measured_trainer() -> Any:
    """TRL's trainer class, extended to record the work and the waits of each step."""
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    from slipstream.trainers.flops import FlopsModel, peak_matmul_flops

    class Measured(AsyncGRPOTrainer):  # type: ignore[misc]
        def measure(self) -> None:
            self.notes: list[dict[str, Any]] = []
            self.waiting = Waiting(self.rollout_queue)
            self.rollout_queue = self.waiting
            self.operations, device = FlopsModel.of(self.model), self.accelerator.device
            self.most = peak_matmul_flops(device) if GPU else 0.0
            self.counts = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
            self.syncing = 0.0
            self.add_callback(Note(self))

        def compute_loss(self, model: Any, inputs: Any, **others: Any) -> Any:
            if not self.notes:
                drawn = inputs["old_log_probs"][inputs["completion_mask"].bool()]
                bad = int((~drawn.isfinite()).sum())
                assert not bad, f"the server gave {bad} of {len(drawn)} log-probabilities that are not finite"
            real = inputs["attention_mask"].bool()
            places = inputs["position_ids"][real] + 1  # a token sees as many keys
            counted = (real.sum(), inputs["completion_mask"].sum(), places.sum())
            self.counts += torch.stack([c.double() for c in counted])
            return super().compute_loss(model, inputs, **others)

        def _sync_weight(self) -> None:
            if len(self.notes) <= 1:  # in the warm-up, whose time does not count
                self.validate_not_finite("before they are sent")
            began = time.perf_counter()
            super()._sync_weight()
            self.syncing += time.perf_counter() - began

        def validate_not_finite(self, when: str) -> None:
            """Raise for weights that are not finite, which change no step's time, but make the server fail."""
            bad = [name for name, p in self.model.named_parameters() if not bool(p.isfinite().all())]
            said = {name: values[-1] for name, values in self._metrics["train"].items() if values}
            assert not bad, f"{len(bad)} weights are not finite {when}, {bad[:3]}; the last step says {said}"

        def note(self) -> None:
            if GPU:
                torch.cuda.synchronize()
            tokens, trained, pairs = self.counts.tolist()
            note = {"time": time.time(), "tokens": tokens, "trained": trained, "pairs": pairs}
            note |= {"waited": self.waiting.seconds, "synced": self.syncing, "memory_gb": 0.0}
            if GPU:
                note["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
                torch.cuda.reset_peak_memory_stats()
            self.notes.append(note)

        def describe(self, warmup: int) -> dict[str, Any]:
            """Metrics from the end of the warm-up to the end of the last step."""
            first, last = self.notes[warmup - 1], self.notes[-1]
            done = {name: last[name] - first[name] for name in first}
            self.validate_not_finite("at the end")
            seconds, steps = done["time"], len(self.notes) - warmup
            operations = self.operations.flops(done["tokens"], done["trained"], done["pairs"])
            said = [entry for entry in self.state.log_history if "weight_sync_time_s" in entry][warmup:]
            names = ("weight_sync_time_s", "training_tok/s", "iteration_time_s", "ratio", "kl", "queue_wait_time_s")
            return {
                "steps": steps, "seconds": seconds, "step_s": seconds / steps,
                "trained_tokens_per_s": done["trained"] / seconds, "tokens_per_s": done["tokens"] / seconds,
                "tokens_a_step": done["trained"] / steps,
                "utilisation": operations / seconds / self.most if self.most else None,
                "memory_gb": max(note["memory_gb"] for note in self.notes[warmup:]),
                "trainer_busy": 1 - (done["waited"] + done["synced"]) / seconds,
                "waited_s": done["waited"] / steps, "sync_s": done["synced"] / steps,
                "says": {n: statistics.median(e[n] for e in said) for n in names if said and n in said[0]},
                "window": [first["time"], last["time"]],
                "each": self.notes,
            }  # fmt: skip

    class Note(TrainerCallback):  # type: ignore[misc]
        def __init__(self, trainer: Measured) -> None:
            self._trainer = trainer

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._trainer.note()

    return Measured


class Waiting:
    """A queue that sums the time of waits in `get`."""

    def __init__(self, queue: Any) -> None:
        self._queue, self.seconds = queue, 0.0

    def get(self, timeout: float) -> Any:
        began = time.perf_counter()
        try:
            return self._queue.get(timeout=timeout)
        finally:
            self.seconds += time.perf_counter() - began

    def qsize(self) -> int:
        return int(self._queue.qsize())


class Ready:
    """A rollout worker for TRL whose queue repeats the rollouts of `benchmarks/trainer.py` without end."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoConfig

        vocabulary = AutoConfig.from_pretrained(options.model).vocab_size
        lengths, steps = (options.prompt, options.completion), options.warmup + options.steps
        batches = [make_rollouts(tokens_a_step(options), vocabulary, seed, lengths) for seed in range(steps)]
        self._samples = [
            (step * options.groups + i // GROUP, s) for step, b in enumerate(batches) for i, s in enumerate(b.samples())
        ]
        self._next = self._version = 0
        self.rollout_buffer = self

    def get(self, timeout: float) -> Any:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        group, sample = self._samples[self._next % len(self._samples)]
        self._next += 1
        before = len(sample.prompt_ids)
        return RolloutSample(
            prompt=[], completion=[], input_ids=list(sample.token_ids),
            completion_mask=[0] * before + [1] * len(sample.logprobs),
            old_log_probs=[0.0] * before + [*sample.logprobs],
            advantage=sample.advantages[0], model_version=self._version, group_id=group, metrics={"reward": 0.0},
        )  # fmt: skip

    def qsize(self) -> int:
        return len(self._samples)

    def update_model_version(self, version: int) -> None:
        self._version = version

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


class Nowhere:
    """A weight transfer for TRL without receivers."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def tokens_a_step(options: argparse.Namespace) -> int:
    return int(options.groups * GROUP * (options.prompt + options.completion))


def chat_template() -> str:
    """A chat template that TRL can parse."""
    from trl.chat_template_utils import qwen3_chat_template

    return str(qwen3_chat_template)


def conversations(tokenizer: Any, length: int) -> list[str]:
    """Prompts of `length` tokens, chat template included."""
    around = [{"role": "user", "content": "w1 w2"}]
    added = len(tokenizer.apply_chat_template(around, add_generation_prompt=True, return_dict=False)) - 2
    return prompts(512, length - added)


if __name__ == "__main__":
    main()
