"""Configurations: what is wrong is refused in one line that names the option and the remedy."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slipstream.config import (
    Config,
    ConfigError,
    dump,
    join_flags,
    load_config,
    option_names,
    validate,
    with_absolute_paths,
)

MINIMAL = '[model]\npath = "m"\n[environment]\nname = "addition"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_flags_lie_over_the_file(file: Path) -> None:
    flags = ["--loop.max_lag", "3", "--trainer.betas=[0.8, 0.9]", "--environment.options.digits", "1"]
    flags += ["--sampling.stop", '["a b", "c"]', "--run.dir", "out/a b", "--algorithm.whiten=true"]
    config = load_config(file, flags)
    assert config.loop.max_lag == 3 and config.trainer.betas == (0.8, 0.9)
    assert config.environment.options == {"digits": 1}
    assert config.sampling.stop == ["a b", "c"] and config.run.dir == "out/a b" and config.algorithm.whiten


def test_what_is_printed_reads_back_the_same(file: Path) -> None:
    config = load_config(
        file, ["--environment.options", '{ data = "a\\"b\\u007f", shots = 2, deep = { x = [1, 2.5] } }']
    )
    assert validate(tomllib.loads(dump(config))) == config


@pytest.mark.parametrize("text", ["2024", "true", "1979-05-27", "[1]", 'a"b', "nan"])
def test_an_option_that_is_text_takes_what_was_typed(file: Path, text: str) -> None:
    config = load_config(file, ["--run.dir", text])
    assert config.run.dir == text
    assert validate(tomllib.loads(dump(config))) == config


def test_whole_numbers_do_for_fractions(file: Path) -> None:
    assert load_config(file, ["--lora.alpha", "7", "--lora.rank", "4", "--trainer.betas", "[0, 0]"]).lora.alpha == 7.0


def test_values_are_joined_to_their_flags() -> None:
    given = ["train", "--resume", "runs/x", "--loop.steps", "200", "--quiet", "--a.b", "-1", "--c.d=3", "e", "--f.g"]
    joined = ["train", "--resume", "runs/x", "--loop.steps=200", "--quiet", "--a.b=-1", "--c.d=3", "e", "--f.g"]
    assert join_flags(given) == joined == join_flags(joined)


def test_every_option_is_documented_once() -> None:
    names = option_names()
    assert len(names) == len(set(names)) > 40
    for section in Config.model_fields.values():
        assert section.annotation is not None
        for name, option in section.annotation.model_fields.items():
            assert option.description and option.description.endswith("."), name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--loop.step", "3"], "unknown option loop.step (did you mean loop.steps?); `slipstream config` lists all"),
        (["--learning_rate", "3"], "unknown option --learning_rate (did you mean trainer.learning_rate?)"),
        (["--foo.bar", "1"], "unknown option foo"),
        (["--loop.steps"], "--loop.steps has no value; give one: --loop.steps VALUE"),
        (["--loop.steps", "--loop.seed", "1"], "--loop.steps has no value"),
        (["loop.steps", "3"], "'loop.steps' is not an option; options look like --section.option value"),
        (["--loop.steps", "many"], 'loop.steps = "many": it must be a whole number'),
        (["--loop.steps", "0"], "loop.steps = 0: it must be greater than or equal to 1"),
        (["--loop.group_size", "1"], "loop.group_size = 1: it must be greater than or equal to 2"),
        (["--sampling.temperature", "0"], "sampling.temperature = 0: it must be greater than 0"),
        (["--sampling.top_p", "1.5"], "sampling.top_p = 1.5: it must be less than or equal to 1"),
        (["--trainer.schedule", "sudden"], "'constant', 'linear' or 'cosine'"),
        (["--model.dtype", "int3"], "'auto', 'float32' or 'bfloat16'"),
        (["--loop.buffer", "2"], "loop.buffer = 2 can't hold the 8 groups of one step; raise it to at least 8"),
        (["--trainer.warmup_steps", "100"], "trainer.warmup_steps = 100 leaves nothing of loop.steps = 100"),
        (["--trainer.betas", "[1, 2]"], "trainer.betas = [1.0, 2.0] must be two numbers in [0, 1)"),
        (["--generator.context", "64"], "generator.context = 64 leaves no room for a prompt"),
        (["--generator.kind=vllm", "--sampling.top_p=0.9"], "sampling.top_p = 0.9 alone can't be replayed with vLLM"),
        (["--generator.kind", "vlm"], 'generator.kind = "vlm" is unknown; give "torch"'),
        (["--trainer.ranks=4", "--trainer.shards=3"], "trainer.shards = 3 must divide trainer.ranks = 4"),
        (["--lora.rank=600", "--sync.link=lora", "--generator.kind=vllm"], "lora.rank = 600 is more than the 512 that"),
        (
            ["--lora.rank=8", "--generator.kind=vllm", "--sync.link=nccl"],
            "can't bring adapters (lora.rank = 8) to vLLM; leave sync.link out",
        ),
        (["--lora.rank=8", "--sync.link=lora"], 'for lora.rank above 0 with generator.kind = "vllm"'),
        (["--lora.base=4bit"], "does not go with lora.rank = 0, which trains every weight"),
        (["--lora.base=4bit", "--lora.rank=8", "--trainer.ranks=2"], 'does not go with trainer.parallel = "fsdp"'),
        (["--trainer.ranks=4", "--trainer.context_parallel=3"], "context_parallel = 3 must divide trainer.ranks = 4"),
        (
            ["--trainer.compute_copy=false", "--model.dtype=float32"],
            'compute_copy = false does not go with model.dtype = "float32"',
        ),
        (
            ["--trainer.compute_copy=false", "--trainer.ranks=2"],
            "compute_copy = false does not go with trainer.ranks = 2",
        ),
        (["--trainer.compute_copy=false", "--trainer.parallel=ddp"], 'does not go with trainer.parallel = "ddp"'),
        (["--trainer.compute_copy=false", "--lora.rank=4", "--model.dtype=bfloat16"], "go with lora.rank = 4"),
        (["--trainer.ranks=2", "--trainer.expert_parallel=2", "--trainer.parallel=ddp"], 'parallel = "ddp"; set it to'),
        (["--trainer.ranks=2", "--trainer.expert_parallel=2", "--lora.experts=true"], "with lora.experts; set it to"),
        (["--trainer.ranks=2", "--trainer.shards=2", "--trainer.parallel=ddp"], 'with trainer.parallel = "fsdp"'),
        (["--trainer.ranks=2", "--sync.placement=colocated", "--sync.interruption=retry"], "needs trainer.ranks = 1"),
        (["--trainer.ranks=2", "--trainer.parallel=tensor", "--lora.rank=4"], "can't train adapters"),
        (
            ["--trainer.ranks=2", "--trainer.parallel=fsdp", "--trainer.shards=1"],
            'which is trainer.parallel = "ddp"',
        ),
        (["--sync.link=single_copy", "--model.dtype=bfloat16", "--trainer.ranks=2"], "needs trainer.ranks = 1"),
        (
            [
                "--sync.link=single_copy",
                "--model.dtype=bfloat16",
                "--generator.kind=vllm",
                "--trainer.ranks=2",
                "--generator.tensor_parallel=2",
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
        (["--loop.steps", '"7"'], 'loop.steps = "7": it must be a whole number'),
        (["--loop.steps", "true"], "loop.steps = true: it must be a whole number"),
        (["--algorithm.whiten", "yes"], 'algorithm.whiten = "yes": it must be true or false'),
        (["--algorithm.whiten", "1"], "algorithm.whiten = 1: it must be true or false"),
        (["--lora.alpha", "inf"], "lora.alpha = inf: it must be a finite number"),
        (["--trainer.betas", "[nan, 0.9]"], "trainer.betas.0 = nan: it must be a finite number"),
        (
            ["--environment.options.day", "1979-05-27"],
            "options.day = datetime.date(1979, 5, 27) is no text",
        ),
        (["--generator.options.day", "1979-05-27"], "generator.options.day = datetime.date(1979, 5, 27) is no text"),
        (
            ["--environment.options.x", "[{ y = inf }]"],
            "options.x = [{'y': inf}] is no text, finite number",
        ),
        (["--sampling.stop", '["a", ""]'], 'sampling.stop.1 = "": it must not be empty'),
        (
            ["--algorithm.kl", "1", "--algorithm.kl_estimator", "k1"],
            'k1" has no gradient on average; set algorithm.kl_w',
        ),
        (["--algorithm.kl", "1", "--algorithm.kl_estimator", "k4"], "'k1', 'k2' or 'k3'"),
        (["--algorithm.los", "grpo"], "unknown option algorithm.los (did you mean algorithm.loss?)"),
        (["--algorithm.loss.day", "1979-05-27"], "algorithm.loss.day = datetime.date(1979, 5, 27) is no text"),
        (["--algorithm.loss", "3"], "algorithm.loss = 3: it must be a table, such as"),
        (["--sync.every", "3"], "checkpoint.every = 50 is no multiple of sync.every = 3"),
        (["--loop.steps.more", "3"], "loop.steps"),
    ],
)
def test_mistakes_are_one_line(file: Path, flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, flags)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "needed", "then"),
    [
        (["--lora.targets=['q_proj']"], "lora.rank", ["--lora.rank=4"]),
        (["--scoring.concurrency=3"], "scoring.kind", ["--scoring.kind=mine.py:score"]),
        (["--scoring.weights={ score = 1.0 }"], "scoring.kind", ["--scoring.kind=mine.py:score"]),
        (["--teacher.threads=2"], "teacher.path or teacher.lag", ["--teacher.lag=1"]),
        (["--teacher.memory=0.2", "--teacher.path=x"], 'teacher.kind = "vllm"', ["--teacher.kind=vllm"]),
        (["--algorithm.process=0.5"], "scoring.kind, a scorer that rewards steps", ["--scoring.kind=mine.py:score"]),
        (["--algorithm.process=1"], "scoring.kind, a scorer that rewards steps", ["--environment.name=mine.py:Mine"]),
        (["--trainer.parallel=ddp"], "trainer.ranks above 1", ["--trainer.ranks=2"]),
        (["--evaluation.every=5", "--evaluation.tasks=0"], "evaluation.tasks above 0", ["--evaluation.tasks=9"]),
        (["--evaluation.every_tokens=5", "--evaluation.tasks=0"], "evaluation.tasks above 0", ["--evaluation.tasks=9"]),
        (["--sync.interruption=drain", "--loop.max_lag=0"], "loop.max_lag above 0", ["--loop.max_lag=1"]),
        (["--sync.interruption=drain", "--loop.max_lag=0"], "loop.max_lag above 0", ["--sync.placement=colocated"]),
        (["--algorithm.keep_sampling_mask=false"], "sampling.top_k or top_p", ["--sampling.top_p=0.9"]),
        (["--algorithm.overlong_soft=4"], 'algorithm.overlong = "penalty"', ["--algorithm.overlong=penalty"]),
        (["--algorithm.filter_most=4"], "algorithm.filter_equal = true", ["--algorithm.filter_equal=true"]),
        (["--algorithm.reference=average"], "algorithm.kl", ["--algorithm.kl=0.1"]),
        (["--algorithm.kl_estimator=k2"], "algorithm.kl", ["--algorithm.kl=0.1"]),
        (
            ["--algorithm.reference_decay=0.9", "--algorithm.kl=0.1"],
            'algorithm.reference = "average"',
            ["--algorithm.reference=average"],
        ),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(file: Path, flags: list[str], needed: str, then: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, flags)
    name = flags[0].removeprefix("--").partition("=")[0]
    assert str(caught.value).startswith(f"{name} = ") and "\n" not in str(caught.value)
    assert f"does nothing without {needed}; set that, or leave {name.partition('.')[2]} at" in str(caught.value)
    load_config(file, [*flags, *then])


def test_a_run_records_paths_that_mean_the_same_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # What is no path, or may be the name of something else, is left as it is.
    assert (config.environment.options["split"], config.environment.options["said"]) == ("train", "a/b")
    assert (config.algorithm.reference, config.sampling.stop) == ("start", ["."])
    assert with_absolute_paths(load_config(None, ["--model.path=a/hub", "--environment.name=gsm8k"])) == load_config(
        None, ["--model.path=a/hub", "--environment.name=gsm8k"]
    )


VLLM = ["--generator.kind=vllm"]


@pytest.mark.parametrize(
    ("flags", "said", "then"),
    [
        (["--generator.options.pipeline_parallel_size=2"], "= 2 can't be served: a link", []),
        (["--generator.options.data_parallel_size=2"], "one replica; use generator.count", []),
        (["--generator.options.data_parallel_backend=ray"], "one replica; use generator.count", []),
        (["--generator.options.distributed_executor_backend=ray"], 'workers run on this host; use "mp"', []),
        (["--generator.options.enable_expert_parallel=true"], "experts are updated in place on one GPU", []),
        (
            ["--generator.options.quantization=fp8"],
            '= "fp8" can\'t be served: links write weights as',
            ["--lora.rank=8"],
        ),
        (
            ["--generator.options.quantization=fp8"],
            "set sync.restart",
            ["--sync.restart=true", "--sync.interruption=retry"],
        ),
        (
            ["--generator.options.tensor_parallel_size=2"],
            "is set by the run; set generator.tensor_parallel instead",
            [],
        ),
        (["--generator.options.max_model_len=9"], "= 9 is set by the run; set generator.context instead", []),
        (["--generator.options.enable_lora=true"], "= true is set by the run; set lora.rank instead", []),
        (["--generator.options.worker_extension_cls=a.B"], '= "a.B" is set by the run; leave it out', []),
    ],
)
def test_engine_options_that_a_run_sets_or_can_not_serve_are_refused(
    file: Path, flags: list[str], said: str, then: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [*VLLM, *flags])
    name = flags[0].removeprefix("--").partition("=")[0]
    assert str(caught.value).startswith(f"{name} = ") and said in str(caught.value)
    assert "\n" not in str(caught.value)
    if then:
        load_config(file, [*VLLM, *flags, *then])


def test_engine_options_that_change_nothing_of_weights_and_processes_are_passed_on(file: Path) -> None:
    given = '{ pipeline_parallel_size = 1, kv_cache_dtype = "fp8", block_size = 32, max_num_batched_tokens = 128 }'
    assert load_config(file, [*VLLM, "--generator.options", given]).generator.options["block_size"] == 32


def test_missing_options_and_files(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path is not set; add it to the file or give --model.path VALUE"):
        load_config(None, ["--environment.name", "addition"])
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
        "import sys, slipstream, slipstream.config\n"
        "slipstream.load_config\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'datasets', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
