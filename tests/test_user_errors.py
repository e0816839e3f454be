"""Corpus of user errors: each is answered in one line with the value, its place and the remedy.

Every case is a command line, and a part of its error message.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config.loading import dump, load_config
from tests.conftest import build_model, build_tokenizer

BASE = '[model]\npath = "MODEL"\n[environment]\nname = "addition"\n'
FILES: dict[str, str | bytes] = {
    "run.toml": BASE + "[sampling]\nmax_tokens = 4\n[loop]\nsteps = 3\ngroups_per_step = 2\n",
    "latin.toml": b'[model]\npath = "caf\xe9"\n', "open.toml": "[model\n",
    "twice.toml": "[model]\npath='a'\npath='b'\n",
    "nul.toml": "[model]\npath='\0'\n", "json.toml": '{"model": 1}', "yaml.toml": "model:\n  path: x\n",
    "section.toml": "model = 3\n[environment]\nname='addition'\n", "array.toml": "[[model]]\n[environment]\nname='a'\n",
    "bare.toml": "[model]\npath = gemma\n", "escape.toml": '[model]\npath = "C:\\models"\n',
    "date.toml": "[model]\npath = 1979-05-27\n[environment]\nname = 'addition'\n", "binary.toml": bytes(range(256)),
    "digits.toml": f"[loop]\nseed = {'9' * 5000}\n", "deep.toml": f"a = {'[' * 5000}{']' * 5000}\n",
    "list.toml": "[trainer]\nbetas = [0.9, 0.99\n", "again.toml": "[model]\n[model]\n",
    "nopath.toml": "[environment]\nname='a'\n",
    "envs.py": """
from slipstream.environments.base import Task
tasks = [Task(str(i), f"{i}+1=") for i in range(4)]
class Mine:
    train = test = tasks
    def __init__(self, size=1): pass
    async def rollout(self, task, policy): return 0.0
class NoTrain:
    test = tasks
    async def rollout(self, task, policy): ...
class NoRollout: train = test = tasks
class Alone:
    train = test = tasks
    async def rollout(self): ...
class Empty:
    train = test = []
    async def rollout(self, task, policy): ...
class Needs(Mine):
    def __init__(self, size): pass
class Away:
    def __init__(self): raise ValueError("the data base is away")
class Ends:
    def __init__(self): raise SystemExit(3)
class Scorer:
    def __init__(self): ...
class Unclosed(Scorer):
    async def score(self, task, rollout): return 1.0
def three(a, b, c): ...
def by_name(*, task, completion): ...
def policy_sync(task, policy): ...
def reward(task, completion): return 1.0
def plain(rewards): return 3
number = 3
""",
    "missing.py": "import nothere\n", "exits.py": "import sys\nsys.exit(1)\n",
    "stops.py": "\nraise KeyboardInterrupt\n", "ctrl_c.py": "import signal\n" + 2 * "signal.raise_signal(2)\n",
    "zero.py": "\n1 / 0\n", "empty.py": "",
    "syntax.py": "def f(:\n", "tabs.py": "def f():\n\treturn 1\n        return 2\n", "latin.py": b'x = "\xe9"\n',
    "blank.jsonl": "\n\n", "cut.jsonl": '{"prompt": "a"}\n{"prompt"\n', "latin.jsonl": b'{"prompt": "caf\xe9"}\n',
    "list.jsonl": "[1]\n", "number.jsonl": "3\n", "typed.jsonl": '{"prompt": 3}\n', "null.jsonl": '{"prompt": null}\n',
    "words.jsonl": '{"prompt": ["a"]}\n', "roles.jsonl": '{"prompt": [{"content": "a"}]}\n',
    "none.jsonl": '{"prompt": ""}\n',
    "ids.jsonl": '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}\n', "array.jsonl": '[{"prompt": "a"},\n{}]\n',
    "half.jsonl": '{"prompt": "\\ud800"}\n', "two.jsonl": '{"prompt": "a"} {"prompt": "b"}\n',
    "zip.jsonl": b"\x1f\x8b\x08",
    "quotes.jsonl": "{'prompt': 'a'}\n", "case.jsonl": '{"Prompt": "a"}\n',
    "math.jsonl": '{"question": "a", "answer": "b"}\n',
    "nothing/file": "", "tasks.csv": "prompt\na\n",
    "nested.jsonl": "[" * 100_000 + "\n", "tasks.jsonl": '{"prompt": "1+1="}\n{"prompt": "2+1="}\n',
    "study/lag.json": "{}", "run/config.toml": "[model\n", "partial/config.toml": BASE.replace("MODEL", "m"),
    "unfinished/config.toml": dump(load_config(None, ["--model.path=m", "--environment.name=addition"])),
}  # fmt: skip
TRAIN = "train run.toml --run.dir out "
EVAL = "eval MODEL --tasks 2 --environment "
REWARD = EVAL + "envs.py:reward --environment.options.train="
CORPUS = {
    "": "the following arguments are required: COMMAND",
    "trian": "argument COMMAND: invalid choice: 'trian' (did you mean train?); see `slipstream --help`",
    "xyz": "invalid choice: 'xyz'; choose from 'train', 'eval'",
    "train": "train needs a CONFIG.toml, or --resume RUN_DIR",
    "train run.toml --resume out": "and not both",
    "train run.toml other.toml": "'other.toml' is not an option",
    "train --quiet": "train needs a CONFIG.toml",
    "train --resmue out": "unknown option --resmue",
    "train --resume": "argument --resume: expected one argument",
    "train --resume gone": "gone holds no run to resume",
    "train --resume nothing": "nothing holds no run to resume",
    "train --resume partial": "partial/config.toml is incomplete: it has no [",
    "eval partial": "partial/config.toml is incomplete: it has no [",
    "train --resume run.toml": "run.toml holds no run to resume",
    "train --resume run": "not valid TOML",
    "train --resume unfinished --run.dir other": "run.dir = 'other' does nothing with --resume: the run stays in unf",
    "train gone.toml": "gone.toml: No such file or directory; give the path of a TOML file",
    "train nothing": "nothing: Is a directory; give the path of a TOML file",
    "train latin.toml": "latin.toml: not UTF-8 at byte 19; save it as UTF-8",
    "train open.toml": "open.toml: not valid TOML: Expected ']'",
    "train twice.toml": "Cannot overwrite a value (at line 3",
    "train again.toml": "twice (at line 2",
    "train nul.toml": "not valid TOML: Found invalid character",
    "train json.toml": "not valid TOML: Invalid statement (at line 1",
    "train yaml.toml": "not valid TOML: Expected '=' after a key",
    "train section.toml": "model = 3: it must be a section of options",
    "train array.toml": "it must be a section of options",
    "train bare.toml": "not valid TOML: Invalid value (at line 2",
    "train escape.toml": "not valid TOML: Unescaped",
    "train date.toml": "model.path = datetime.date(1979, 5, 27): it must be text",
    "train binary.toml": "binary.toml: not UTF-8 at byte 128",
    "train digits.toml": "digits.toml: not valid TOML",
    "train deep.toml": "deep.toml: not valid TOML",
    "train list.toml": "not valid TOML: Unclosed array",
    "train nopath.toml": "model.path is not set; add it to the file or give --model.path VALUE",
    "config nothing": "Is a directory",
    "config --foo": "unknown option --foo",
    "config -x": "'-x' is not an option",
    "config --=3": "see `slipstream --help`",
    "config --loop.=3": "unknown option --loop.",
    "config --LOOP.STEPS=3": "unknown option LOOP (did you mean loop?)",
    "config --loop-steps=3": "(did you mean loop.steps?)",
    "config --loop.steps": "--loop.steps has no value",
    "config --loop.steps=": 'loop.steps = "": it must be a whole number',
    "config --loop.seed=1e23": "loop.seed = 1e+23: it must be a whole number",
    "config --loop.seed=99999999999999999999999": "it must be less than or equal to 9223372036854775807",
    "config --trainer.betas=[0.9]": "trainer.betas = [0.9] must be two numbers in [0, 1); try [0.9, 0.99]",
    "config --trainer.betas=0.9": "trainer.betas = 0.9: it must be a list, such as [0.9, 0.99]",
    "config --trainer.betas '[\"a\", 1]'": 'trainer.betas.0 = "a": it must be a number',
    "config --environment.name.x=1": "--environment.name.x: name is a value, not a section",
    "config --environment.options=3": "environment.options = 3: it must be a table",
    "config --sampling.stop=a": 'sampling.stop = "a": it must be a list',
    "config --sampling.stop=[1]": "sampling.stop.0 = 1: it must be text",
    "config --algorithm.corrections=3": "algorithm.corrections = 3: it must be a list",
    "config --model.path=": 'model.path = "": it must not be empty',
    "eval": "the following arguments are required: CONFIG|RUN_DIR|MODEL",
    "eval gone": "gone does not exist here; of a model, name an environment, too: --environment NAME",
    "eval MODEL": "is no run's directory; of a model, name an environment, too",
    "config --environment.dataset x --environment.rewrad math": "environment.rewrad (did you mean environment.reward?)",
    "data run.toml --tasks -1": "--tasks -1: give 0 or more",
    "eval nothing --environment addition": "has no config.json; give a directory that a model was saved to",
    "eval gone.toml": "gone.toml: No such file or directory; give the path of a TOML file",
    "eval MODEL --environment addition --against gone": "--against: model.path = 'gone': no such directory",
    "eval MODEL --environment addition --against unfinished": "--against: unfinished has no policy/ yet",
    "eval MODEL --environment addition --samples 4": "evaluation.samples = 4 would be the same completion of a task",
    "eval MODEL --environment addition --rollouts no/a.parquet": "there is no directory no; make it first",
    "eval MODEL --environment addition --samples 0": "evaluation.samples = 0: it must be greater than or equal to 1",
    "eval MODEL --environment addition --json --markdown": "argument --markdown: not allowed with argument --json",
    "eval run": "not valid TOML",
    "eval unfinished": "has no policy/ yet, since the run has not ended; `slipstream status unfinished` shows it",
    "eval MODEL --environment addition --tasks x": 'evaluation.tasks = "x": it must be a whole number',
    "eval MODEL --environment addition --tasks 0 --samples 2": "--tasks 0: there is nothing to evaluate on",
    "generate": "the following arguments are required: MODEL|RUN_DIR, --prompt",
    "generate gone --prompt x": "model.path = 'gone': no such directory, and not a Hub name",
    "generate nothing --prompt x": "has no config.json",
    "generate MODEL --prompt x --max-tokens -3": "sampling.max_tokens = -3: it must be greater than or equal to 1",
    "generate MODEL --prompt x --temperature hot": 'evaluation.temperature = "hot": it must be a number',
    "generate MODEL --prompt x --temperature -1": "evaluation.temperature = -1: it must be greater than or equal to 0",
    "generate MODEL --prompt x --seed 1.5": "loop.seed = 1.5: it must be a whole number",
    "generate MODEL --prompt ''": "the prompt is empty",
    "generate MODEL --prompt \udce9": "half of a surrogate pair",
    f"generate MODEL --prompt {'x' * 100_000}": "shorten the prompt or raise generator.max_model_len",
    "verify": "the following arguments are required: MODEL|RUN_DIR",
    "verify gone": "no such directory, and not a Hub name",
    "verify MODEL --prompts 0": "--prompts 0 --tokens 64 --after 16 compares nothing",
    "verify MODEL --tokens -5": "compares nothing; give at least 1 prompt and token",
    "verify MODEL --after -5": "--after -5 compares nothing",
    "verify MODEL --prompts x": "argument --prompts: invalid int value: 'x'",
    "study": "the following arguments are required: STUDY",
    "study lga": "invalid choice: 'lga'",
    "study lag": "study lag needs a CONFIG.toml, or --draw",
    "study lag run.toml": "loop.max_tokens is not set; add --loop.max_tokens N",
    "study lag run.toml --lags x": "--lags x is no list of different whole numbers",
    "study lag run.toml --lags 1,1": "--lags 1,1 is no list of different whole numbers",
    "study lag run.toml --lags 1,01": "--lags 1,01 is no list of different whole numbers",
    "study lag run.toml --corrections zz": "zz is unknown; give default, none, importance",
    "study lag run.toml --seeds 0": "--seeds 0: give at least 1 of each",
    "study lag run.toml --loop.max_tokens 9 --seeds 100000000": "--seeds 100000000: give at least 1 of each, and at",
    "study lag run.toml --loop.max_tokens 9 --target nan": "--target nan: give a finite number",
    "study lag run.toml --loop.max_tokens 9 --dir run.toml": "--dir run.toml: File exists; name another directory",
    "config run.toml --environment.workers=100000": "environment.workers = 100000: it must be less than or equal to",
    "study lag run.toml --loop.max_lag 2": "--loop.max_lag is set by the study; give --lags",
    "study lag --draw --dir gone": "gone/lag.json holds no study",
    "study lag --draw --dir run.toml": "run.toml/lag.json holds no study",
    "study lag --draw --dir study": "study/lag.json holds no study",
    TRAIN + "--model.path=/gone": "model.path = '/gone': no such directory, and not a Hub name",
    TRAIN + "--model.path=a/b/c": "no such directory, and not a Hub name",
    TRAIN + "--model.path=~/gone": "no such directory, and not a Hub name",
    TRAIN + "--model.path=nothing": "has no config.json",
    TRAIN + "--model.path=https://huggingface.co/Qwen/Qwen3-0.6B": "not a Hub name (owner/name)",
    TRAIN + "--model.path=broken": "is not a valid JSON file",
    TRAIN + "--model.path=mute": "no tokenizer can be loaded",
    TRAIN + "--model.path=cut": "model.path = 'cut' has damaged files (model.safetensors: ",
    TRAIN
    + "--teacher.path=lacks": "teacher.path = 'lacks' has no b.safetensors, which model.safetensors.index.json names",
    TRAIN + "--model.path=bits": '{"bits": 4} of its config.json names no quant_method that transformers has; remove',
    TRAIN + "--model.path=four": "which can't be trained; train adapters (lora.rank = 16)",
    TRAIN + "--model.path=torn": "model.safetensors.index.json is damaged: it has no table weight_map of file names",
    TRAIN + "--teacher.path=/gone": "teacher.path = '/gone': no such directory",
    TRAIN + "--algorithm.kl_coef=0.1 --algorithm.reference=gone": "algorithm.reference = 'gone': no such directory",
    TRAIN + "--scoring.kind=model --scoring.options.path=/gone": "scoring.options.path = '/gone': no such directory",
    TRAIN + "--run.dir=run": "run.dir = 'run' holds a run; resume it with `slipstream train --resume run`",
    TRAIN + "--environment.reward_workers=2": "environment.reward_workers = 2 does nothing without a reward function",
    TRAIN + "--run.dir=run.toml": "name another directory",
    TRAIN + "--run.dir=/proc/none": "name another directory",
    TRAIN + "--generator.device=cuda:0": 'generator.device = "cuda:0", but there are 0 GPUs here; try "auto"',
    TRAIN + "--trainer.device=mps": 'trainer.device = "mps": it must be "auto", "cpu", "cuda" or "cuda:N"',
    TRAIN + "--generator.device=cuda:99999999999999999999": 'it must be "auto", "cpu", "cuda" or "cuda:N"',
    TRAIN + "--generator.device=": 'generator.device = "": it must be "auto"',
    TRAIN + "--generator.replicas=0": "generator.replicas = 0: it must be greater than or equal to 1",
    TRAIN + "--trainer.ranks=-2": "trainer.ranks = -2: it must be greater than or equal to 1",
    TRAIN
    + "--generator.replicas=5000": "generator.replicas = 5000 are more engines than a run can start; give at most",
    TRAIN
    + "--generator.max_num_seqs=1000000": "generator.max_num_seqs = 1000000: it must be less than or equal to 655",
    TRAIN + "--loop.group_size=1000000000000": "group_size = 1000000000000: it must be less than or equal to 65536",
    TRAIN + "--trainer.threads=100000": "trainer.threads = 100000: it must be less than or equal to 4096",
    TRAIN + "--generator.threads=1.5": "generator.threads = 1.5: it must be a whole number",
    TRAIN + "--generator.engine=vllm --generator.tensor_parallel_size=2": "_size = 2, but there are 0 GPUs here",
    TRAIN + "--sync.link=nccl_direct": "is vLLM's own; set generator.engine",
    TRAIN + "--sync.link=single_copy": "needs a GPU, and there is none for it here",
    TRAIN + "--sync.placement=colocated --sync.link=nccl": 'whose ends run at once; use "shared"',
    TRAIN + "--sync.every=3": "checkpoint.every = 50 is no multiple of sync.every = 3",
    TRAIN + "--generator.servers='[\"x\"]' --generator.engine=vllm": "each is a URL such as http://host:8000",
    TRAIN + "--generator.servers='[\"http://[::1\"]' --generator.engine=vllm": "each is a URL such as http://host:8000",
    TRAIN + "--generator.engine=torhc": 'generator.engine = "torhc" is unknown; give "torch", "vllm" or your own',
    TRAIN + "--sync.link=gone.py:Link": "can't be loaded: there is no file",
    TRAIN + "--lora.rank=100000000": "it must be less than or equal to 4096",
    TRAIN + "--loop.buffer_size=1": "loop.buffer_size = 1 can't hold the 2 groups of one step",
    TRAIN + "--algorithm.loss=gpro": "no such function (did you mean gspo?)",
    TRAIN + "--algorithm.loss=dapo": "dapo is no single function here but",
    TRAIN + "--algorithm.loss.clip_lo=1": "grpo has no option clip_lo (did you mean clip_low?)",
    TRAIN + "--algorithm.loss.clip_low=x": 'clip_low = "x" of grpo must be a finite number',
    TRAIN + "--algorithm.loss=envs.py:Nope": "has no attribute 'Nope'",
    TRAIN + "--algorithm.loss=envs.py:number": "is not a function",
    TRAIN + "--algorithm.loss=envs.py:three": "algorithm.loss failed on two tokens: TypeError",
    TRAIN + "--algorithm.advantage=mean": "no such function; there are group_mean",
    TRAIN + "--algorithm.advantage=envs.py:plain": "algorithm.advantage returned int",
    TRAIN + "--algorithm.aggregation=constant": "constant needs length",
    TRAIN + "--algorithm.corrections='[\"icepp\"]'": "(did you mean icepop?)",
    TRAIN + "--algorithm.corrections=[{}]": "algorithm.corrections has no name",
    TRAIN + "--algorithm.corrections='[\"truncate_tokens\"]'": "would count the ratio twice",
    TRAIN + "--algorithm.clip_low=0.2": "unknown option algorithm.clip_low",
    TRAIN + "--scoring.kind=mdoel": 'scoring.kind = "mdoel" is unknown; give "http", "model" or your own',
    TRAIN + "--scoring.kind=http": "scoring.options.url is not set",
    TRAIN + "--scoring.kind=http --scoring.options.url=x": "is not a URL; give one such as",
    TRAIN
    + "--scoring.kind=http --scoring.options.url=http://h:99999": "'http://h:99999' is not a URL; give one such as",
    TRAIN + "--scoring.kind=envs.py:number": "is neither a function nor a class",
    TRAIN + "--scoring.kind=envs.py:three": "write `def score(task, rollout)`",
    TRAIN + "--scoring.kind=envs.py:Scorer": "has no `async def score(self, task, rollout)`",
    TRAIN + "--scoring.kind=envs.py:Unclosed": "has no `async def close(self)`",
    EVAL + "gsm9k": "no such environment (did you mean gsm8k?)",
    EVAL + "envs.py": "your own is 'module:thing' or 'path/to/file.py:thing'",
    EVAL + "gone.py:Mine": "there is no file",
    EVAL + "evns.py:Mine": "(did you mean envs.py?)",
    EVAL + "envs.py:Mien": "has no attribute 'Mien' (did you mean Mine?)",
    EVAL + "nothing.py:x": "there is no file",
    EVAL + "no_such_module:x": "No module named 'no_such_module'",
    EVAL + "missing.py:x": "missing.py, line 1)",
    EVAL + "exits.py:x": "SystemExit: 1 (",
    EVAL + "stops.py:x": "stops.py, line 2)",
    EVAL + "zero.py:x": "zero.py, line 2)",
    EVAL + "empty.py:x": "has no attribute 'x'",
    EVAL + "syntax.py:f": "invalid syntax (syntax.py, line 1)",
    EVAL + "tabs.py:f": "(tabs.py, line 3)",
    EVAL + "latin.py:x": "(latin.py, line 1)",
    EVAL + "envs.py:number": "has no 'train'; an environment needs it",
    EVAL + "envs.py:NoTrain": "has no 'train'; an environment needs it",
    EVAL + "envs.py:NoRollout": "has no 'rollout'; an environment needs it",
    EVAL + "envs.py:Alone": "rollout can't be called with 2 arguments (too many positional arguments); write `async",
    EVAL + "envs.py:Empty": "has no training tasks",
    EVAL + "envs.py:Needs": "environment.options.size must be set: envs.py:Needs needs it",
    EVAL + "code": "environment.options.train is not set; give a JSONL file",
    EVAL + "envs.py:Away": "can't be loaded: ValueError: the data base is away (",
    EVAL + "envs.py:Ends": "can't be loaded: SystemExit: 3 (",
    EVAL + "envs.py:Mine --environment.options.sise=1": "sise is unknown to envs.py:Mine (did you mean size?)",
    EVAL + "envs.py:three": "takes 3 arguments; write `async def rollout(task, policy)`",
    EVAL + "envs.py:by_name": "can't be called with 2 arguments (too many positional arguments); write `async def",
    EVAL + "envs.py:policy_sync": "write it as `async def`",
    EVAL + "envs.py:reward": "environment.dataset is not set; a function needs the file of its tasks",
    EVAL + "envs.py:reward --environment.dataset=gone.jsonl": "dataset 'gone.jsonl': there is no such file",
    EVAL + "addition --environment.options.digits=0": "environment.options.digits = 0 can't be; give 1 to 9",
    EVAL + "gsm8k --environment.options.data=gone/": "dataset 'gone/': there is no such file or directory",
    EVAL + "gsm8k --environment.options.data=tasks.csv": "tasks.csv, row 1: not a task: it has no column 'question'",
    EVAL + "gsm8k --environment.options.data=math.jsonl": "line 1: not a task: its answer is 'b', neither a number",
    EVAL + "gsm8k --environment.options.data=blank.jsonl": "dataset 'blank.jsonl', split train, holds no tasks",
    REWARD + "gone.jsonl": "dataset 'gone.jsonl': there is no such file",
    REWARD + "task.jsonl": "no such file or directory (did you mean tasks.jsonl?)",
    REWARD + "nothing": "the directory has no file of the formats .jsonl, .csv",
    REWARD + "3": "environment.dataset = 3: it must be text",
    REWARD + "tasks.jsonl --environment.options.tset=x": "tset is unknown",
    REWARD + "tasks.jsonl --environment.options.test=gone.jsonl": "dataset 'gone.jsonl': there is no such file",
    REWARD + "blank.jsonl": "dataset 'blank.jsonl', split train, holds no tasks",
    REWARD + "cut.jsonl": "cut.jsonl, line 2: not a task: not JSON (Expecting ':' delimiter at column 10)",
    REWARD + "latin.jsonl": "latin.jsonl: not UTF-8 at byte 15; save it as UTF-8",
    REWARD + "zip.jsonl": "zip.jsonl: not UTF-8 at byte 1",
    REWARD + "list.jsonl": "list.jsonl, line 1: not a task: it is [1], no table of columns",
    REWARD + "number.jsonl": "line 1: not a task: it is 3, no table of columns",
    REWARD + "case.jsonl": "it has no column 'prompt' (did you mean Prompt?)",
    REWARD + "math.jsonl": "line 1: not a task: it has no column 'prompt'; there are question, answer",
    REWARD + "typed.jsonl": "its 'prompt' is 3, neither text nor a list of messages",
    REWARD + "null.jsonl": "its 'prompt' is None, neither text nor a list of messages",
    REWARD + "words.jsonl": "its 'prompt' is ['a'], neither text nor a list of messages",
    REWARD + "roles.jsonl": 'a message of its \'prompt\' has no "role" or no "content"',
    REWARD + "none.jsonl": "its 'prompt' is empty",
    REWARD + "ids.jsonl": 'ids.jsonl, line 2: not a task: its id "1" is that of ids.jsonl, line 1, too',
    REWARD + "array.jsonl": "array.jsonl, line 1: not a task: not JSON",
    REWARD + "two.jsonl": "not JSON (Extra data at column 17)",
    REWARD + "quotes.jsonl": "not JSON (Expecting property name enclosed in double quotes at column 2)",
    REWARD + "half.jsonl": "half of a surrogate pair",
    REWARD + "nested.jsonl": "nested.jsonl, line 1: not a task: not JSON",
    REWARD + "math.jsonl --environment.options.reward=math": "reward does nothing: the function is the reward",
    EVAL + "dataset": "environment.reward is not set, nor is scoring.kind: give one",
    EVAL + "dataset --environment.dataset=tasks.jsonl --environment.reward=a.py:b": "name a function of yours by",
    EVAL + "dataset --environment.reward=exact": "environment.dataset is not set; give a file",
}


FEWER: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
MORE: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
MODELS: dict[str, dict[str, Any]] = {  # changes of the tiny model's config.json
    "bits": {"quantization_config": {"bits": 4}},
    "four": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "unknown_quant": {"quantization_config": {"quant_method": "marlinn"}},
    "broad": {"intermediate_size": 128}, "fewer": FEWER, "more": MORE, "untied": {"tie_word_embeddings": False},
    "no_type": {"model_type": "qwen9"}, "t5": {"model_type": "t5"},
    "custom": {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}},
    "headless": {"architectures": ["Qwen3ForSequenceClassification"]}, "bare": {}, "eos": {}, "generation": {},
}  # fmt: skip
KL, TEACHER = TRAIN + "--algorithm.kl_coef=0.1 --algorithm.reference=", TRAIN + "--teacher.path="
REWARD_MODEL, MODEL = TRAIN + "--scoring.kind=model --scoring.options.path=", TRAIN + "--model.path="
ADAPTERS, RANKS = TRAIN + "--lora.rank=2 --lora.", TRAIN + "--trainer.ranks="
VLLM = TRAIN + "--generator.engine=vllm --generator.servers='[\"http://a:1\"]' "
REFUSED = {  # without a worker
    "eval MODEL --environment addition --against mute_letters": "--against: model.path = 'mute_letters'",
    "eval MODEL --environment addition --against more": "--against: model.path = 'more': the files lack model",
    MODEL + "bare": "bare': it has no weights (model.safetensors); fetch or save the model again",
    TEACHER + "bare": "bare': it has no weights",
    MODEL + "broad": "(and 8 more) is [32, 64] in the files and [32, 128] by its configuration",
    MODEL + "fewer": "fewer': the files hold model.layers.2.",
    MODEL + "more": "more': the files lack model.layers.3.",
    MODEL + "untied": "the files lack lm_head.weight, which its configuration asks for; fetch or save",
    KL + "more": "more': the files lack model.layers.3.",
    TEACHER + "more": "more': the files lack model.layers.3.",
    REWARD_MODEL + "headless": "scoring.options.path = 'headless': the files lack score.weight",
    MODEL + "no_type": "has model type `qwen9` but Transformers does not recognize this architecture",
    MODEL + "custom": "config.json names custom code (auto_map), which Slipstream does not run; give a model of a type",
    MODEL + "t5": "AutoModelForCausalLM can't load model_type = 't5' of its config.json; give a model with a decoder",
    TEACHER + "t5": "t5': AutoModelForCausalLM can't load model_type = 't5'",
    KL + "letters": "letters' has another vocabulary (60 tokens) than the policy (42 tokens)",
    TEACHER + "letters": "letters' has another vocabulary (60 tokens) than the policy (42 tokens)",
    TEACHER + "mute_letters": "mute_letters' has another vocabulary (60 tokens) than the policy",
    REWARD_MODEL + "more": "'more' is a Qwen3ForCausalLM, no classifier of sequences or tokens; give a reward model",
    ADAPTERS + "targets='[\"nope\"]'": "lora.targets = ['nope']: Target modules {'nope'} not found",
    ADAPTERS + "target_pattern=nope": "Linear layers are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
    ADAPTERS + "targets='[\"lm_head\"]'": "lora.targets = ['lm_head'] adapts the language-model head, which can't",
    ADAPTERS + "targets='[\"embed_tokens\"]'": "adapts the embedding, whose weight is the language-model head's, too",
    ADAPTERS + "experts=true": "lora.experts = true, but the model has no experts that can be adapted; set it to",
    RANKS + "2 --trainer.expert_parallel=2": "trainer.expert_parallel = 2, but the model has no experts; set it to 1",
    RANKS + "3 --trainer.parallel=tensor": "can't share num_attention_heads = 4 between 3 ranks; use fsdp",
    VLLM + "--generator.threads=2": "generator.servers does not go with generator.threads; give it to `vllm serve`",
    VLLM + "--generator.max_restarts=2": "does not go with generator.max_restarts: the run does not start them; leave",
    MODEL + "unknown_quant": '{"quant_method": "marlinn"} of its config.json names no quant_method that transformers',
    MODEL + "generation": "generation/generation_config.json is no table of JSON (Expecting",
    MODEL + "eos": 'eos/generation_config.json: eos_token_id = "</s>" must be a token id or a list of these; change it',
    TRAIN + "--generator.max_model_len=257": "= 257 exceeds the model's context of 256 tokens; lower it",
    TRAIN + "--sampling.max_tokens=256": "sampling.max_tokens = 256 leaves no room for a prompt in the model's context",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("errors")
    for name, content in FILES.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (path / "run.toml").write_text((path / "run.toml").read_text().replace("MODEL", str(tiny)))
    for broken in ("broken/config.json", "mute/tokenizer.json"):
        shutil.copytree(tiny, (path / broken).parent)
        (path / broken).write_text("{")
    for folder, index in (("lacks", '{"weight_map": {"a": "b.safetensors"}}'), ("torn", "{}")):
        shutil.copytree(tiny, path / folder)
        (path / folder / "model.safetensors.index.json").write_text(index)
    for name, changes in MODELS.items():
        shutil.copytree(tiny, path / name)
        described = json.loads((tiny / "config.json").read_text()) | changes
        (path / name / "config.json").write_text(json.dumps(described))
    (path / "bare" / "model.safetensors").unlink()
    (path / "eos" / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    (path / "generation" / "generation_config.json").write_text("{")
    for name in ("letters", "mute_letters"):
        build_model(vocab_size=60, eos_token_id=1, pad_token_id=0).save_pretrained(path / name)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["!"])
    tokenizer.save_pretrained(path / "letters")
    shutil.copytree(tiny, path / "cut")
    (path / "cut" / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:2000])
    return path


@pytest.fixture(autouse=True)
def standing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(folder) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.mark.parametrize(("command", "said"), CORPUS.items(), ids=lambda text: text[:60])
def test_an_error_is_one_line(command: str, said: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([str(tiny) if word == "MODEL" else word for word in shlex.split(command)])
    except SystemExit as end:  # of the parser
        status = int(end.code or 0)
    answer = capsys.readouterr().err
    assert status in (1, 2) and said in answer, answer
    assert answer.startswith("slipstream: ") and answer.count("\n") == 1 and "Traceback" not in answer, answer
    assert not (Path.cwd() / "out" / "config.toml").exists(), "a refused run left its directory"


@pytest.mark.parametrize(("command", "said"), REFUSED.items(), ids=lambda text: text[:60])
def test_a_model_that_cannot_be_used_is_refused_before_workers_start(
    command: str, said: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("slipstream.runtime.worker_process.WorkerProcess.start")
    test_an_error_is_one_line(command, said, tiny, capsys)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--model.path=models/gone", "no such directory in 'models'"),
        ("--model.path=/gone", "no such directory, and not a Hub name"),
        ("--model.path=cut", "has damaged files"),
        ("--loop.steps=none", "loop.steps"),
    ],
)
def test_errors_that_need_no_model_come_before_slow_imports(folder: Path, flag: str, said: str) -> None:
    (folder / "models").mkdir(exist_ok=True)
    program = (
        f"import sys; from slipstream.cli import main; main(['train', 'run.toml', {flag!r}]); "
        "sys.exit(('torch' in sys.modules) + 2 * ('transformers' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1) and said in done.stderr, done.stderr


def test_each_fault_of_a_file_has_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "faults.toml").write_text("[model]\npath = 3\n[loop]\nsteps = 'many'\nmax_lagg = 1\n")
    assert main(["train", "faults.toml"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4


@pytest.mark.usefixtures("folder")
def test_ctrl_c_while_a_file_is_loaded_ends_the_command(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first Ctrl-C cancels the command at its next `await`, the second one raises in the file."""
    assert main([*EVAL.replace("MODEL", str(tiny)).split(), "ctrl_c.py:x"]) == 130
    assert capsys.readouterr().err == "slipstream: stopped at once\n"


def test_a_byte_order_mark_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mark.toml").write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    assert main(["config", "mark.toml"]) == 0
    assert 'path = "MODEL"' in capsys.readouterr().out


DYING = """
import os
from slipstream.trainers.trainer_worker import PytorchTrainerWorker

class Trainer(PytorchTrainerWorker):
    async def step(self, batch):
        os._exit(9)
"""


def test_a_dead_worker_ends_with_the_command_that_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "dying.py").write_text(DYING)
    assert main(["train", "run.toml", "--run.dir", "died", "--trainer.kind", "dying.py:Trainer", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert "trainer died (log: " in said and "Traceback" not in said
    assert said.endswith("Resume from the last checkpoint: slipstream train --resume died\n")


def test_a_resume_with_an_option_that_does_not_fit_is_not_advised_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "run.toml", "--run.dir", "ranked", "--lora.rank", "2", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", "ranked", "--lora.rank", "4", "--loop.steps", "4", "--quiet"]) == 1
    assert capsys.readouterr().err.endswith("; was model.path or lora changed?\n")
