"""Policies of runs for other programs: merged into their base, copied, and uploaded with a model card."""

from __future__ import annotations

import base64
import errno
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.cli import main
from slipstream.config.loading import dump, load_config
from slipstream.model.paths import hub_answers
from slipstream.observe.run_data import load_run
from slipstream.tools.push import model_card
from tests.conftest import build_model, build_tokenizer

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def finished_run(path: Path, family: str = "qwen3", dtype: torch.dtype = torch.float32, **adapter: Any) -> Path:
    """A run directory with an adapter as its policy; without `adapter` options the policy is a whole model."""
    base, run = path / "base", path / "run"
    model = build_model(family, eos_token_id=1).to(dtype)
    model.save_pretrained(base, max_shard_size="30KB")
    build_tokenizer().save_pretrained(base)
    rank = 4 if adapter else 0
    named = [f"--model.path={base}", "--environment.name=addition", f"--lora.rank={rank}", "--scoring.kind=http"]
    secret = '--scoring.options={url = "http://judge", api_key = "hunter2", max_tokens = 7}'
    (run / "policy").mkdir(parents=True)
    (run / "config.toml").write_text(dump(load_config(None, [*named, secret])))
    if adapter:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **adapter))
        model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(run / "policy")
    build_tokenizer().save_pretrained(run / "policy")
    return run


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits.float().log_softmax(-1)
    return found


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("qwen3", {"target_modules": "all-linear"}),
        ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    ],
    ids=["files", "settings of PEFT", "experts"],
)
def test_a_merged_model_is_base_and_adapter(family: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    run = finished_run(tmp_path, family, **adapter)
    assert main(["export", str(run), "--merge"]) == 0
    merged, base = (AutoModelForCausalLM.from_pretrained(path) for path in (run / "merged", tmp_path / "base"))
    start = logprobs(base)
    expected = logprobs(PeftModel.from_pretrained(base, run / "policy"))
    torch.testing.assert_close(logprobs(merged), expected, atol=1e-4, rtol=0)
    assert (expected - start).abs().max() > 0.01
    assert merged.generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(run / "merged").get_vocab() == build_tokenizer().get_vocab()
    assert not list((run / "merged").glob("adapter_*")) and not list(run.glob("*.partial"))


def test_a_merged_model_has_the_files_and_formats_of_its_base(tmp_path: Path) -> None:
    run = finished_run(tmp_path, dtype=torch.bfloat16, target_modules=["q_proj"])
    assert main(["export", str(run), "--merge", "--to", str(tmp_path / "out" / "merged")]) == 0
    files = sorted((tmp_path / "base").glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        old, new = load_file(file), load_file(tmp_path / "out" / "merged" / file.name)
        assert {n: (t.dtype, t.shape) for n, t in old.items()} == {n: (t.dtype, t.shape) for n, t in new.items()}
        assert {n for n in old if not torch.equal(old[n], new[n])} == {n for n in old if "q_proj" in n}


def test_an_adapter_over_4_bits_is_merged_into_whole_weights_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, target_modules=["q_proj"])
    config = run / "config.toml"
    config.write_text(config.read_text().replace('quantization = "whole"', 'quantization = "4bit"'))
    assert main(["export", str(run), "--merge"]) == 0
    assert "were trained over 4-bit weights, and are merged into the whole ones" in capsys.readouterr().err
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"load_in_4bit": True}}))
    assert main(["export", str(run), "--merge", "--to", str(tmp_path / "again")]) == 2
    assert "has quantized weights, which a merge would round again; name" in capsys.readouterr().err


def test_a_policy_is_exported_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path)
    assert main(["export", str(run), "--to", str(tmp_path / "copy")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'copy'}\n"
    assert {f.name: f.read_bytes() for f in (tmp_path / "copy").iterdir()} == {
        f.name: f.read_bytes() for f in (run / "policy").iterdir()
    }


def test_what_cannot_be_exported_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: Any) -> str:
        assert main([*map(str, words)]) in (1, 2)
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "Traceback" not in error, error
        return error

    whole, adapter = finished_run(tmp_path / "whole"), finished_run(tmp_path / "lora", target_modules=["q_proj"])
    tied = {
        name: finished_run(tmp_path / name, target_modules=["q_proj", name]) for name in ("embed_tokens", "lm_head")
    }
    capsys.readouterr()
    (unfinished := tmp_path / "unfinished").mkdir()
    (unfinished / "config.toml").touch()
    (tmp_path / "file").touch()
    assert "nowhere holds no run (no config.toml)" in refused("export", tmp_path / "nowhere")
    assert "has no policy/ yet, since the run has not ended; `slipstream status" in refused("export", unfinished)
    assert "leave --merge out" in refused("export", whole, "--merge")
    for module, run in tied.items():
        assert f"{module}, whose weight is that of embedding and head" in refused("export", run, "--merge"), module
    assert "exists; remove it, or give another directory" in refused("export", whole, "--to", tmp_path)
    assert "can't be written" in refused("export", whole, "--to", tmp_path / "file" / "inside")
    for name, content, said in (
        ("adapter_model.safetensors", b"x" * 9, "has damaged files"), ("adapter_config.json", b"x", "Expecting value"),
        ("adapter_model.safetensors", b"", "No such file"), ("adapter_config.json", b"", "has no config.json"),
    ):  # fmt: skip
        damaged = shutil.copytree(adapter, tmp_path / f"damaged {said}")
        (damaged / "policy" / name).unlink()
        if content:
            (damaged / "policy" / name).write_bytes(content)
        for merge in ([], ["--merge"]):
            assert said in refused("export", damaged, *merge, "--to", tmp_path / "never"), (name, content)
    monkeypatch.setattr("shutil.copyfile", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space")))
    assert "the disk is full" in refused("export", adapter, "--merge", "--to", tmp_path / "full")
    assert not list(tmp_path.glob("full*"))
    (tmp_path / "lora" / "base").rename(tmp_path / "moved")
    assert "the base of" in refused("export", adapter, "--merge", "--to", tmp_path / "full")


def with_several_policies(run: Path) -> Path:
    """The run directory, whose policy becomes the policies "a" and "b"."""
    (run / "policy").rename(run / "a")
    shutil.copytree(run / "a", run / "policy" / "b")
    (run / "a").rename(run / "policy" / "a")
    return run


def test_one_of_several_policies_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path, target_modules=["q_proj"])
    assert main(["export", str(run), "--policy", "a"]) == 2
    assert "--policy a is no policy of" in (error := capsys.readouterr().err) and "leave --policy out" in error
    with_several_policies(run)
    for wrong, message in ((), "has several policies"), (("--policy", "c"), "c is no policy of"):
        assert main(["export", str(run), *wrong]) == 2
        assert message in capsys.readouterr().err
    assert main(["export", str(run), "--policy", "a"]) == main(["export", str(run), "--policy=b", "--merge"]) == 0
    assert capsys.readouterr().out == f"{run / 'export' / 'a'}\n{run / 'merged' / 'b'}\n"
    assert (run / "export" / "a" / "adapter_config.json").exists()
    base, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "base", run / "merged" / "b"))
    expected = logprobs(PeftModel.from_pretrained(base, run / "policy" / "b"))
    torch.testing.assert_close(logprobs(merged), expected, atol=1e-4, rtol=0)


class Hub(BaseHTTPRequestHandler):
    """Records what is committed. All files are "regular" ones, which travel inside the commit."""

    requests: dict[str, Any]

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.requests[self.path] = body
        if "preupload" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif "create" in self.path:
            self._answer({"url": "https://huggingface.co/me/policy"})
        else:
            url = "https://huggingface.co/me/policy/commit/0"
            self._answer({"commitUrl": url, "commitOid": "0", "errors": [], "warnings": []})

    def _answer(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    Hub.requests = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    hub_answers.cache_clear()
    yield Hub.requests
    server.shutdown()
    server.server_close()
    hub_answers.cache_clear()


@pytest.mark.parametrize("merge", [False, True])
def test_a_push_uploads_the_model_with_its_card(
    merge: bool, hub: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, target_modules=["q_proj"])
    evaluation = {"eval/tasks": 100, "intervals": {"eval/score": [0.1, 0.3]}, "eval/score": 0.2, "step": 0}
    later = evaluation | {"eval/score": 0.5, "intervals": {"eval/score": [0.4, 0.6]}, "step": 3}
    (run / "evaluations.jsonl").write_text(f"{json.dumps(evaluation)}\n{json.dumps(later)}\n")
    (run / "summary.json").write_text(json.dumps({"packages": {"torch": "2.9"}}))
    assert main(["push", str(run), "me/policy", *["--merge"] * merge]) == 0
    assert capsys.readouterr().out.endswith("/me/policy\n")
    assert "private" in json.loads(hub["/api/repos/create"]).values()
    commit = [json.loads(line)["value"] for line in hub["/api/models/me/policy/commit/main"].splitlines()]
    files = {entry["path"]: base64.b64decode(entry["content"]) for entry in commit[1:]}
    source = {f.name for f in (run / "policy").iterdir()} | {"README.md", "slipstream.toml"}
    assert files.keys() >= {"config.json", "model.safetensors.index.json"} if merge else files.keys() == source
    assert load_config_text(files["slipstream.toml"], tmp_path).lora.rank == 4
    (tmp_path / "README.md").write_bytes(files["README.md"])
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == ("transformers" if merge else "peft") and "base_model" not in card.data.to_dict()
    for text in ("base", "addition", "0.200 [0.100, 0.300]", "0.500 [0.400, 0.600]", "+0.", "| torch | 2.9 |",
                 "`algorithm.loss`", "slipstream-rl", "100 held-out tasks"):  # fmt: skip
        assert text in card.text, text
    uploaded = files["README.md"] + files["slipstream.toml"]
    assert b"hunter2" not in uploaded and b'"max_tokens" = 7' in uploaded
    assert not list(run.glob("push-*"))


def test_one_of_several_policies_is_pushed(hub: dict[str, Any], tmp_path: Path) -> None:
    run = with_several_policies(finished_run(tmp_path, target_modules=["q_proj"]))
    assert main(["push", str(run), "me/policy", "--policy", "b"]) == 0
    commit = [json.loads(line)["value"] for line in hub["/api/models/me/policy/commit/main"].splitlines()]
    files = {entry["path"]: base64.b64decode(entry["content"]) for entry in commit[1:]}
    assert "adapter_config.json" in files and b"It is the policy `b` of a run that trained" in files["README.md"]


def test_a_card_names_datasets_and_the_objective_of_its_policy(tmp_path: Path) -> None:
    data = 'environments = [{ dataset = "me/sums", reward = "math" }, { dataset = "quiz.csv", reward = "choice" }]'
    (tmp_path / "mine.toml").write_text(f"""
        {data}
        model.path = "base"
        lora.rank = 4
        [[policies]]
        name = "a"
        [[policies]]
        name = "b"
        learning_rate = 0.5
        algorithm = {{ loss = "ppo", kl_coef = 0.25 }}
    """)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(dump(load_config(tmp_path / "mine.toml")))
    cards = [model_card(load_run(tmp_path / "run"), "me/x", True, name).content for name in ("a", "b")]
    assert all("| Environment | me/sums, quiz.csv |" in card for card in cards)
    own = ("| `trainer.learning_rate` | `0.5` |", '| `algorithm.loss` | `{"name" = "ppo"}` |',
           "| `algorithm.kl_coef` | `0.25` |")  # fmt: skip
    assert [[line in card for line in own] for card in cards] == [[False] * 3, [True] * 3]


def load_config_text(text: bytes, folder: Path) -> Any:
    (folder / "uploaded.toml").write_bytes(text)
    return load_config(folder / "uploaded.toml")


def test_a_push_without_token_network_or_name_is_refused_at_once(
    hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr(Hub, "do_POST", lambda self: self.send_error(403))
    for message, change in (
        ("was not uploaded to http://127.0.0.1", lambda: None),
        ("can't be reached; connect this host", lambda: monkeypatch.setattr("slipstream.tools.push.hub_answers", bool)),
        ("run `hf auth login`, or set HF_TOKEN", lambda: monkeypatch.setattr("slipstream.tools.push.get_token", str)),
    ):
        change()
        assert main(["push", str(run), "me/policy"]) in (1, 2)
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert main(["push", str(run), "me/policy/x"]) == 2
    assert "'me/policy/x' is no name of a repository" in capsys.readouterr().err
