"""Configurations: every fault is one line that names the option and the remedy."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slipstream.config.loading import (
    dump,
    join_flags,
    load_config,
    option_names,
    validate,
    with_absolute_paths,
)
from slipstream.config.schema import SECTIONS, ConfigError
from slipstream.config.suggestions import RENAMED

MINIMAL = '[model]\npath = "m"\n[environment]\nname = "addition"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_flags_override_the_file(file: Path) -> None:
    flags = ["--loop.max_lag", "3", "--trainer.betas=[0.8, 0.9]", "--environment.options.digits", "1"]
    flags += ["--sampling.stop", '["a b", "c"]', "--run.dir", "out/a b", "--algorithm.normalize_advantages=true"]
    config = load_config(file, flags)
    assert config.loop.max_lag == 3 and config.trainer.betas == (0.8, 0.9)
    assert config.environment.options == {"digits": 1}
    assert (
        config.sampling.stop == ["a b", "c"] and config.run.dir == "out/a b" and config.algorithm.normalize_advantages
    )


def test_dump_round_trips(file: Path) -> None:
    config = load_config(
        file, ["--environment.options", '{ data = "a\\"b\\u007f", shots = 2, deep = { x = [1, 2.5] } }']
    )
    assert validate(tomllib.loads(dump(config))) == config


@pytest.mark.parametrize("text", ["2024", "true", "1979-05-27", "[1]", 'a"b', "nan"])
def test_text_options_are_taken_literally(file: Path, text: str) -> None:
    config = load_config(file, ["--run.dir", text])
    assert config.run.dir == text
    assert validate(tomllib.loads(dump(config))) == config


def test_integers_are_valid_floats(file: Path) -> None:
    assert load_config(file, ["--lora.alpha", "7", "--lora.rank", "4", "--trainer.betas", "[0, 0]"]).lora.alpha == 7.0


def test_values_are_joined_to_their_flags() -> None:
    given = [
        "train",
        "--resume",
        "runs/x",
        "--loop.steps",
        "200",
        "--quiet",
        "--a.b",
        "-1",
        "--c.d=3",
        "e",
        "--environments",
        "[]",
        "--f.g",
    ]
    joined = [
        "train",
        "--resume",
        "runs/x",
        "--loop.steps=200",
        "--quiet",
        "--a.b=-1",
        "--c.d=3",
        "e",
        "--environments=[]",
        "--f.g",
    ]
    assert join_flags(given) == joined == join_flags(joined)


def test_every_option_is_documented_once() -> None:
    names = option_names()
    assert len(names) == len(set(names)) > 40
    for section in SECTIONS.values():
        for name, option in section.model_fields.items():
            assert option.description and option.description.endswith("."), name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--loop.step", "3"], "unknown option loop.step (did you mean loop.steps?); `slipstream config` lists all"),
        (["--learning_rate", "3"], "unknown option --learning_rate (did you mean trainer.learning_rate?)"),
        (["--foo.bar", "1"], "unknown option foo"),
        (
            ["--evaluation.tasks=0", "--evaluation.every=5", "--evaluation.temperature=1.0"],
            "evaluation.every = 5, evaluation.temperature = 1.0 do nothing without evaluation.tasks above 0; set that,",
        ),
        (["--loop.steps"], "--loop.steps has no value; give one: --loop.steps VALUE"),
        (["--loop.steps", "--loop.seed", "1"], "--loop.steps has no value"),
        (["loop.steps", "3"], "'loop.steps' is not an option; options look like --section.option value"),
        (["--loop.steps", "many"], 'loop.steps = "many": it must be a whole number'),
        (["--loop.steps", "0"], "loop.steps = 0: it must be greater than or equal to 1"),
        (["--loop.group_size", "1"], "loop.group_size = 1: it must be greater than or equal to 2"),
        (["--sampling.temperature", "0"], "sampling.temperature = 0: it must be greater than 0"),
        (
            ["--sampling.temperature", "0.001"],
            "sampling.temperature = 0.001 must be from 0.01 to 100, or 0 (greedy) outside of training",
        ),
        (["--sampling.top_p", "1.5"], "sampling.top_p = 1.5: it must be less than or equal to 1"),
        (["--trainer.schedule", "sudden"], "'constant', 'linear' or 'cosine'"),
        (["--model.dtype", "int3"], "'auto', 'float32' or 'bfloat16'"),
        (
            ["--loop.buffer_size", "2"],
            "loop.buffer_size = 2 can't hold the 8 groups of one step; raise it to at least 8",
        ),
        (["--trainer.warmup_steps", "100"], "trainer.warmup_steps = 100 leaves nothing of loop.steps = 100"),
        (["--trainer.betas", "[1, 2]"], "trainer.betas = [1.0, 2.0] must be two numbers in [0, 1)"),
        (["--generator.max_model_len", "64"], "generator.max_model_len = 64 leaves no room for a prompt"),
        (["--generator.engine=vllm", "--sampling.top_p=0.9"], "sampling.top_p = 0.9 alone can't be replayed with vLLM"),
        (["--generator.engine", "vlm"], 'generator.engine = "vlm" is unknown; give "torch"'),
        (
            ["--trainer.ranks=4", "--trainer.fsdp_shard_size=3"],
            "trainer.fsdp_shard_size = 3 must divide trainer.ranks = 4",
        ),
        (
            ["--lora.rank=600", "--sync.link=lora", "--generator.engine=vllm"],
            "lora.rank = 600 is more than the 512 that",
        ),
        (
            ["--lora.rank=8", "--generator.engine=vllm", "--sync.link=nccl"],
            'can\'t bring adapters (lora.rank = 8) to vLLM; use "auto"',
        ),
        (["--lora.rank=8", "--sync.link=lora"], 'for lora.rank above 0 with generator.engine = "vllm"'),
        (
            ["--trainer.ranks=2", "--trainer.parallel=ddp", "--trainer.fsdp_shard_size=2"],
            'trainer.fsdp_shard_size = 2 does not go with trainer.parallel = "ddp"; set it to 0',
        ),
        (
            ["--trainer.ranks=2", "--trainer.parallel=ddp", "--trainer.keep_compute_copy=false"],
            'trainer.keep_compute_copy = false does not go with trainer.parallel = "ddp"; leave one of them out',
        ),
        (
            ["--trainer.ranks=2", "--trainer.expert_parallel=2", "--lora.rank=4", "--lora.quantization=4bit"],
            'trainer.expert_parallel = 2 does not go with lora.quantization = "4bit"; leave one of them out',
        ),
        (["--lora.quantization=4bit"], "does not go with lora.rank = 0, which trains every weight"),
        (
            ["--lora.quantization=4bit", "--lora.rank=8", "--trainer.ranks=2"],
            'does not go with trainer.parallel = "fsdp"',
        ),
        (["--trainer.ranks=4", "--trainer.context_parallel=3"], "context_parallel = 3 must divide trainer.ranks = 4"),
        (
            ["--trainer.master_weights=bfloat16", "--model.dtype=float32"],
            'trainer.master_weights = "bfloat16" does not go with model.dtype = "float32"; set that to "bfloat16"',
        ),
        (
            ["--trainer.master_weights=bfloat16", "--lora.rank=8"],
            "does not go with lora.rank = 8: adapters are small, and stay float32; leave it out",
        ),
        (
            ["--trainer.master_weights=bfloat16", "--algorithm.kl_coef=0.1", "--algorithm.reference=average"],
            'does not go with algorithm.reference = "average"',
        ),
        (["--trainer.optimizer=muon", "--lora.rank=8"], 'use "adamw", or set lora.rank = 0'),
        (
            ["--trainer.keep_compute_copy=false", "--trainer.master_weights=bfloat16"],
            'does not go with trainer.master_weights = "bfloat16", which needs none; leave it out',
        ),
        (
            ["--trainer.keep_compute_copy=false", "--model.dtype=float32"],
            'keep_compute_copy = false does not go with model.dtype = "float32"',
        ),
        (
            ["--trainer.keep_compute_copy=false", "--trainer.ranks=2"],
            "keep_compute_copy = false does not go with trainer.ranks = 2",
        ),
        (["--trainer.keep_compute_copy=false", "--trainer.parallel=ddp"], 'does not go with trainer.parallel = "ddp"'),
        (["--trainer.keep_compute_copy=false", "--lora.rank=4", "--model.dtype=bfloat16"], "go with lora.rank = 4"),
        (["--trainer.ranks=2", "--trainer.expert_parallel=2", "--trainer.parallel=ddp"], 'parallel = "ddp"; set it to'),
        (["--trainer.ranks=2", "--trainer.expert_parallel=2", "--lora.experts=true"], "with lora.experts; set it to"),
        (["--trainer.ranks=2", "--trainer.parallel=tensor", "--lora.rank=4"], "can't train adapters"),
        (
            ["--trainer.ranks=2", "--trainer.parallel=fsdp", "--trainer.fsdp_shard_size=1"],
            'which is trainer.parallel = "ddp"',
        ),
        (["--sync.link=single_copy", "--model.dtype=bfloat16", "--trainer.ranks=2"], "needs trainer.ranks = 1"),
        (["--sync.link=single_copy", "--generator.replicas=auto"], 'generator.replicas = "auto"; give a number'),
        (["--sync.link=single_copy", "--model.dtype=bfloat16", "--generator.replicas=2"], "needs trainer.ranks = 2"),
        (
            [
                "--sync.link=single_copy",
                "--model.dtype=bfloat16",
                "--generator.replicas=2",
                "--trainer.ranks=2",
                "--trainer.parallel=fsdp",
            ],
            'trainer.parallel = "ddp"',
        ),
        (
            [
                "--sync.link=single_copy",
                "--model.dtype=bfloat16",
                "--generator.engine=vllm",
                "--trainer.ranks=2",
                "--generator.tensor_parallel_size=2",
            ],
            'needs trainer.ranks = 2 and trainer.parallel = "tensor"',
        ),
        (["--sync.link", "fast"], 'sync.link = "fast" is unknown; give "auto", "shared", "single_copy"'),
        (["--loop", "3"], "unknown option --loop"),
        (
            ["--trainer.device=mps"],
            'trainer.device = "mps": it must be "auto", "cpu", "cuda" or "cuda:N": Slipstream comp',
        ),
        (["--generator.device=gpu"], 'generator.device = "gpu": it must be "auto", "cpu", "cuda" or "cuda:N"'),
        (["--teacher.path=t", "--teacher.device=cuda:x"], 'teacher.device = "cuda:x": it must be "auto", "cpu"'),
        (
            ["--scoring.kind=model", "--scoring.options={ path = 'r', device = 'mps' }"],
            'scoring.options.device = "mps": it must be "auto", "cpu"',
        ),
        (["--loop.steps", '"7"'], 'loop.steps = "7": it must be a whole number'),
        (["--loop.steps", "true"], "loop.steps = true: it must be a whole number"),
        (["--loop.max_lag", "auto2"], 'loop.max_lag = "auto2": it must be a whole number or "auto"'),
        (
            ["--algorithm.normalize_advantages", "yes"],
            'algorithm.normalize_advantages = "yes": it must be true or false',
        ),
        (["--algorithm.normalize_advantages", "1"], "algorithm.normalize_advantages = 1: it must be true or false"),
        (["--lora.alpha", "inf"], "lora.alpha = inf: it must be a finite number"),
        (["--trainer.betas", "[nan, 0.9]"], "trainer.betas.0 = nan: it must be a finite number"),
        (
            ["--environment.options.day", "1979-05-27"],
            "options.day = datetime.date(1979, 5, 27) is no text",
        ),
        (
            ["--generator.engine_args.day", "1979-05-27"],
            "generator.engine_args.day = datetime.date(1979, 5, 27) is no text",
        ),
        (
            ["--environment.options.x", "[{ y = inf }]"],
            "options.x = [{'y': inf}] is no text, finite number",
        ),
        (["--sampling.stop", '["a", ""]'], 'sampling.stop.1 = "": it must not be empty'),
        (
            ["--algorithm.kl_coef", "1", "--algorithm.kl_estimator", "k1"],
            'k1" has no gradient on average; set algorithm.kl_w',
        ),
        (["--algorithm.kl_coef", "1", "--algorithm.kl_estimator", "k4"], "'k1', 'k2' or 'k3'"),
        (["--algorithm.los", "grpo"], "unknown option algorithm.los (did you mean algorithm.loss?)"),
        (["--algorithm.loss.day", "1979-05-27"], "algorithm.loss.day = datetime.date(1979, 5, 27) is no text"),
        (["--algorithm.loss", "3"], "algorithm.loss = 3: it must be a table, such as"),
        (["--sync.every", "3"], "checkpoint.every = 50 is no multiple of sync.every = 3"),
        (["--loop.steps.more", "3"], "loop.steps"),
        (
            ["--model.chat_template_kwargs", "{ max_length = 8 }"],
            'chat_template_kwargs = {"max_length" = 8}: max_length is no argument of a chat template',
        ),
    ],
)
def test_faults_are_one_line(file: Path, flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, flags)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "needed", "then"),
    [
        (["--lora.targets=['q_proj']"], "lora.rank", ["--lora.rank=4"]),
        (["--scoring.concurrency=3"], "scoring.kind", ["--scoring.kind=mine.py:score"]),
        (["--scoring.requests_per_second=2"], "scoring.kind", ["--scoring.kind=mine.py:score"]),
        (["--scoring.weights={ score = 1.0 }"], "scoring.kind", ["--scoring.kind=mine.py:score"]),
        (["--teacher.threads=2"], "teacher.path or teacher.lag", ["--teacher.lag=1"]),
        (
            ["--teacher.gpu_memory_utilization=0.2", "--teacher.path=x"],
            'teacher.engine = "vllm"',
            ["--teacher.engine=vllm"],
        ),
        (
            ["--algorithm.process_reward_coef=0.5"],
            "scoring.kind, a scorer that rewards steps",
            ["--scoring.kind=mine.py:score"],
        ),
        (
            ["--algorithm.process_reward_coef=1"],
            "scoring.kind, a scorer that rewards steps",
            ["--environment.name=mine.py:Mine"],
        ),
        (["--trainer.parallel=ddp"], "trainer.ranks above 1", ["--trainer.ranks=2"]),
        (["--evaluation.every=5", "--evaluation.tasks=0"], "evaluation.tasks above 0", ["--evaluation.tasks=9"]),
        (["--evaluation.every_tokens=5", "--evaluation.tasks=0"], "evaluation.tasks above 0", ["--evaluation.tasks=9"]),
        (["--sync.in_flight=drain", "--loop.max_lag=0"], "loop.max_lag above 0", ["--loop.max_lag=1"]),
        (["--loop.force_max_lag=true", "--loop.max_lag=0"], "loop.max_lag above 0", ["--loop.max_lag=1"]),
        (["--loop.buffer_size=8", "--loop.max_lag=0"], "loop.max_lag above 0", ["--loop.max_lag=1"]),
        (["--loop.buffer_size=8", "--loop.max_lag=0"], "loop.max_lag above 0", ["--sync.every=2"]),
        (["--environment.reward_error=fail"], "a reward function", ["--environment.name=mine.py:reward"]),
        (["--environment.reward_error=fail"], "a reward function", ["--scoring.kind=mine.py:score"]),
        (["--sync.in_flight=drain", "--loop.max_lag=0"], "loop.max_lag above 0", ["--sync.placement=colocated"]),
        (["--algorithm.replay_sampling_mask=false"], "sampling.top_k or top_p", ["--sampling.top_p=0.9"]),
        (
            ['--observe.ignore=["no-signal"]', "--observe.health=false"],
            "observe.health = true",
            ["--observe.health=true"],
        ),
        (["--algorithm.overlong_buffer=4"], 'algorithm.overlong = "penalty"', ["--algorithm.overlong=penalty"]),
        (
            ["--algorithm.max_filtered_in_a_row=4"],
            "algorithm.filter_zero_advantage = true",
            ["--algorithm.filter_zero_advantage=true"],
        ),
        (["--algorithm.reference=average"], "algorithm.kl_coef", ["--algorithm.kl_coef=0.1"]),
        (["--algorithm.kl_estimator=k2"], "algorithm.kl_coef", ["--algorithm.kl_coef=0.1"]),
        (
            ["--algorithm.reference_decay=0.9", "--algorithm.kl_coef=0.1"],
            'algorithm.reference = "average"',
            ["--algorithm.reference=average"],
        ),
    ],
)
def test_an_option_without_effect_is_refused(file: Path, flags: list[str], needed: str, then: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, flags)
    name = flags[0].removeprefix("--").partition("=")[0]
    assert str(caught.value).startswith(f"{name} = ") and "\n" not in str(caught.value)
    assert f"does nothing without {needed}; set that, or leave {name.partition('.')[2]} at" in str(caught.value)
    load_config(file, [*flags, *then])


def test_paths_of_existing_files_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("models/m", "train", "start", "gsm8k"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("own.py", "tasks.jsonl"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    options = '{data = "tasks.jsonl", more = ["./train"], split = "train", said = "a/b", long = "%s"}' % ("x/" * 3000)
    flags = ["--model.path=models/m", "--environment.name=own.py:Own", f"--environment.options={options}"]
    config = with_absolute_paths(load_config(None, [*flags, "--algorithm.loss=own.py:loss", "--sampling.stop=['.']"]))
    assert config.model.path == f"{tmp_path}/models/m"
    assert config.environment.name == f"{tmp_path}/own.py:Own"
    assert config.algorithm.loss == {"name": f"{tmp_path}/own.py:loss"}
    assert config.environment.options["data"] == f"{tmp_path}/tasks.jsonl"
    assert config.environment.options["more"] == [f"{tmp_path}/train"]
    # Text that is no path, or may be another name, is unchanged.
    assert (config.environment.options["split"], config.environment.options["said"]) == ("train", "a/b")
    assert (config.algorithm.reference, config.sampling.stop) == ("start", ["."])
    assert with_absolute_paths(load_config(None, ["--model.path=a/hub", "--environment.name=gsm8k"])) == load_config(
        None, ["--model.path=a/hub", "--environment.name=gsm8k"]
    )


FP8 = "--generator.engine_args.quantization=fp8_per_channel"
VLLM = ["--generator.engine=vllm", "--teacher.path=t", "--teacher.engine=vllm"]


@pytest.mark.parametrize(
    ("flags", "said", "then"),
    [
        (["--generator.engine_args.pipeline_parallel_size=0"], "= 0 must be an integer of at least 1", []),
        (["--generator.engine_args.pipeline_parallel_size=auto"], '= "auto" must be an integer', []),
        (
            ["--generator.engine_args.pipeline_parallel_size=2", "--sync.link=nccl_direct"],
            'can\'t be served by sync.link = "nccl_direct"; use sync.link = "nccl", or one stage',
            ["--sync.link=nccl", "--generator.tensor_parallel_size=2"],
        ),
        (
            ["--generator.engine_args.pipeline_parallel_size=2", "--sync.link=single_copy", "--model.dtype=bfloat16"],
            'can\'t be served by sync.link = "single_copy"; use sync.link = "nccl", or one stage',
            ["--sync.link=lora", "--lora.rank=8"],
        ),
        (
            [
                "--generator.engine_args.pipeline_parallel_size=2",
                "--sync.placement=colocated",
                "--sync.in_flight=recompute",
            ],
            'can\'t be served with sync.placement = "colocated"; use "disaggregated", or one stage',
            ["--sync.placement=disaggregated"],
        ),
        (["--generator.engine_args.data_parallel_size=2"], "one replica; use generator.replicas", []),
        (["--generator.engine_args.data_parallel_backend=ray"], "one replica; use generator.replicas", []),
        (["--generator.engine_args.distributed_executor_backend=ray"], 'workers run on this host; use "mp"', []),
        (["--generator.engine_args.enable_expert_parallel=true"], "experts are updated in place on one GPU", []),
        (
            ["--generator.engine_args.quantization=fp8"],
            '= "fp8" can\'t be served: links write weights as',
            ["--lora.rank=8"],
        ),
        (
            ["--generator.engine_args.quantization=fp8"],
            "set sync.restart",
            ["--sync.restart=true", "--sync.in_flight=retry"],
        ),
        (
            [FP8, "--model.dtype=float32"],
            'served with model.dtype = "float32", which vLLM does not quantize; set model.dtype = "bfloat16"',
            ["--model.dtype=bfloat16"],
        ),
        ([FP8, "--sync.link=single_copy"], 'by sync.link = "single_copy", which writes', ["--sync.link=delta"]),
        (
            ['--generator.engine_args.quantization_config={"linear": "fp8_per_block"}', FP8],
            "and at most quantization_config.ignore; use that",
            ['--generator.engine_args.quantization_config={"ignore": ["lm_head"]}'],
        ),
        (
            ["--generator.engine_args.tensor_parallel_size=2"],
            "is set by the run; set generator.tensor_parallel_size instead",
            [],
        ),
        (["--generator.engine_args.max_model_len=9"], "= 9 is set by the run; set generator.max_model_len instead", []),
        (["--generator.engine_args.enable_lora=true"], "= true is set by the run; set lora.rank instead", []),
        (["--generator.engine_args.worker_extension_cls=a.B"], '= "a.B" is set by the run; leave it out', []),
        (
            ["--generator.engine_args.kv_cache_dtype=fp8", "--model.dtype=float32"],
            "rounds keys and values, so that log-probabilities differ",
            ["--trainer.logprob_tolerance=0.1"],
        ),
        (
            ['--generator.engine_args.speculative_config={"method": "ngram"}'],
            "can't be served: versions of accepted draft tokens are not tracked; leave it out",
            [],
        ),
        (["--teacher.engine_args.model=m"], '= "m" is set by the run; set teacher.path instead', []),
        (["--teacher.engine_args.gpu_memory_utilization=0.5"], "set teacher.gpu_memory_utilization instead", []),
        (["--teacher.engine_args.data_parallel_size=2"], "= 2 can't be served: a teacher is one replica", []),
    ],
)
def test_engine_arguments_set_by_the_run_or_not_supported_are_refused(
    file: Path, flags: list[str], said: str, then: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [*VLLM, *flags])
    name = flags[0].removeprefix("--").partition("=")[0]
    assert str(caught.value).startswith(f"{name} = ") and said in str(caught.value)
    assert "\n" not in str(caught.value)
    if then:
        load_config(file, [*VLLM, *flags, *then])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("section", ["generator", "teacher"])
def test_an_unknown_engine_argument_is_answered_with_the_nearest(file: Path, section: str) -> None:
    """Without an import of vLLM, which takes seconds."""
    for given, nearest in (("block_sise=32", "block_size"), ("kv-cache-dtype=auto", "kv_cache_dtype")):
        name = f"{section}.engine_args.{given.partition('=')[0]}"
        with pytest.raises(ConfigError) as caught:
            load_config(file, [*VLLM, f"--{section}.engine_args.{given}"])
        hint = f"did you mean {section}.engine_args.{nearest}?"
        assert str(caught.value) == f"{name} is no engine argument of the installed vLLM ({hint})"
    own = ["--generator.engine=mine.py:Engine", "--generator.engine_args.block_sise=32"]
    assert load_config(file, own).generator.engine_args == {"block_sise": 32}


@pytest.mark.parametrize("given", ['{"a": {"b": [1, true]}}', "{ a = { b = [1, true] } }"])
def test_a_table_is_given_as_toml_or_json(file: Path, given: str) -> None:
    flags = ["--generator.engine_args.hf_overrides", given]
    assert load_config(file, [*VLLM, *flags]).generator.engine_args == {"hf_overrides": {"a": {"b": [1, True]}}}
    with pytest.raises(ConfigError, match=r"^environment.options.text = None is no text, finite number"):
        load_config(file, ["--environment.options", '{"text": null}'])
    assert load_config(file, ["--environment.options.text={no table"]).environment.options == {"text": "{no table"}


def test_other_engine_arguments_are_passed_on(file: Path) -> None:
    given = '{ pipeline_parallel_size = 1, kv_cache_dtype = "fp8", block_size = 32, max_num_batched_tokens = 128 }'
    assert load_config(file, [*VLLM, "--generator.engine_args", given]).generator.engine_args["block_size"] == 32


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_answered_with_the_new_one(file: Path, old: str, new: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [f"--{old}=1"])
    new = f"{old.partition('.')[0]}.{new}"
    assert str(caught.value) == f"unknown option {old} (did you mean {new}?); `slipstream config` lists all"
    assert new in option_names() and old not in option_names()


def test_missing_options_and_files(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path is not set; add it to the file or give --model.path VALUE"):
        load_config(None, ["--environment.name", "addition"])
    with pytest.raises(ConfigError, match=r"environments is an empty list, and environment.name is not set; give one"):
        load_config(None, ["--model.path=m", "--environments=[]"])
    with pytest.raises(ConfigError, match=r"gone.toml: No such file or directory; give the path of a TOML file"):
        load_config(tmp_path / "gone.toml")
    file.write_text("[model\n")
    with pytest.raises(ConfigError, match=r"run.toml: not valid TOML"):
        load_config(file)
    file.write_text(MINIMAL + "[loop]\nmax_lagg = 2\nsteps = 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert sorted(str(caught.value).splitlines()) == [
        "loop.steps = 0: it must be greater than or equal to 1",
        "unknown option loop.max_lagg (did you mean loop.max_lag?); `slipstream config` lists all",
    ]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, slipstream, slipstream.config.schema\n"
        "slipstream.load_config\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'datasets', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
