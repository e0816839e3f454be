"""Loads tokenizers, and reports missing files and other vocabularies as one `ConfigError` that says what to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from slipstream.config.schema import ConfigError
from slipstream.model.images import image_processor
from slipstream.model.inspection import model_sizes
from slipstream.model.loading import explain_damaged_files, first_line, silence_libraries
from slipstream.model.paths import adapter_config, base_of_adapter, check_path

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def load_tokenizer(path: str, option: str = "model.path") -> Any:
    """The tokenizer of the model at `path`; that of the base for an adapter without one.

    Raises `ConfigError`, naming `option`.
    """
    from transformers import AutoTokenizer

    silence_libraries()
    check_path(path, option)
    source = path
    if (adapter := adapter_config(path)) and not any(Path(path).glob("tokenizer*")):
        source = base_of_adapter(path, adapter)
    with explain_damaged_files(path, option):
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)  # None would prompt the user
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{option} = {path!r}: no tokenizer can be loaded: {first_line(error)}") from None
    # transformers returns an empty tokenizer if files are missing.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        remedy = "save the model's tokenizer there, too"
        raise ConfigError(f"{option} = {path!r} has no tokenizer files (tokenizer.json); {remedy}")
    _validate_vocabulary(tokenizer, path, option)
    return tokenizer


def save_tokenizer(path: str, target: Path) -> None:
    """Save the tokenizer of the model at `path`, and its image processor if it has one, in the directory `target`."""
    load_tokenizer(path).save_pretrained(target)
    if image_processor(path):
        for name in PROCESSOR_FILES:
            if file := cached_file(path, name, _raise_exceptions_for_missing_entries=False):
                shutil.copy(file, target)


def _validate_vocabulary(tokenizer: Any, path: str, option: str) -> None:
    """Raise `ConfigError` if the tokenizer has more tokens than the model at `path`.

    Added tokens are not counted: Gemma's tokenizer adds an image token to text-only models.
    """
    if (size := model_sizes(path).get("vocab_size")) and tokenizer.vocab_size > size:
        raise ConfigError(
            f"{option} = {path!r}: the tokenizer has {tokenizer.vocab_size} tokens and the model {size}; save the "
            "model's own tokenizer there"
        )


def validate_same_vocabulary(path: str, option: str, policy: str) -> None:
    """Raise `ConfigError`, naming `option`, unless the model at `path` reads the tokens of the model at `policy`.

    Its embedding may have more rows, which are padding, unless it was saved without a tokenizer.
    """
    ours = model_sizes(policy).get("vocab_size") or 0
    theirs = model_sizes(path).get("vocab_size") or ours  # transformers may not know the type of vLLM's teacher
    if Path(path).is_dir() and not any(Path(path).glob("tokenizer*")):
        same = theirs == ours
    else:
        same = theirs >= ours and load_tokenizer(path, option).get_vocab() == load_tokenizer(policy).get_vocab()
    if not same:
        raise ConfigError(
            f"{option} = {path!r} has another vocabulary ({theirs} tokens) than the policy ({ours} tokens), whose own "
            "tokens it reads; give a model of the same family"
        )
