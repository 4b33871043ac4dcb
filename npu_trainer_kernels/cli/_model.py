"""Reads `--model` (a folder with a config.json, a JSON file, or a hub id), and has the names of `--dtype`."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import UsageError

if TYPE_CHECKING:
    from ..descriptions import ModelShapes

__all__ = ["DTYPES", "HELP", "config_of", "shapes_of", "zero_sizes"]

# The values of `--dtype`, and torch's names of them.
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}

# NAME or OWNER/NAME; neither begins or ends with a dot, so that `./model` and `../model` are paths.
_HUB_ID = re.compile(r"(?:\w(?:[\w.-]*\w)?/)?\w(?:[\w.-]*\w)?", re.ASCII)
_SIZES = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers", "intermediate_size",
    "vocab_size",
)  # fmt: skip
_IS_SIZE = re.compile(r"^n_|^num_|_size$|_dim$|_heads$")
HELP = "folder with a config.json, the JSON file itself, or a hub id"


def config_of(model: str, option: str = "--model") -> Any:
    """Returns the config of a model, which an option names. Raises `UsageError` if it cannot be loaded, or has a
    negative size."""
    _check_path(model, option)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except ZeroDivisionError as error:
        raise UsageError(f"{option} {model!r}: {zero_sizes(model)}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        # The whole message, since the cause is often in its last line.
        kind = "" if isinstance(error, OSError | ValueError | StrictDataclassError) else f"{type(error).__name__}: "
        here = "" if Path(model).exists() else "there is no such folder here; "
        raise UsageError(f"{option} {model!r}: {here}{kind}{str(error).strip()}") from error
    text = config.get_text_config()
    for name in _SIZES:
        if type(size := getattr(text, name, 0)) is int and size < 0:
            raise UsageError(f"{option} {model!r}: {name} of its config must not be negative; got {size}")
    return config


def zero_sizes(model: str) -> str:
    """Returns a sentence with the sizes of a model's config that are 0: a division by one of them failed."""
    from transformers import PretrainedConfig

    given, _ = PretrainedConfig.get_config_dict(model)
    text = given.get("text_config")
    whole = {**given, **(text if isinstance(text, dict) else {})}
    found = [f"{name} = 0" for name, size in whole.items() if type(size) is int and size == 0 and _IS_SIZE.search(name)]
    return (
        f"its code divides by a size of its config, which must be at least 1; got {', '.join(found) or 'a size of 0'}"
    )


def _check_path(model: str, option: str) -> None:
    """Raises `UsageError` for a path of a missing file or folder, which `AutoConfig` would look up on the hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{option}: the folder {model!r} has no config.json; name a folder that has one")
    elif not path.is_file() and (path.suffix == ".json" or not _HUB_ID.fullmatch(model)):
        raise UsageError(f"{option}: there is no file or folder {model!r}, and it is not a hub id; name a {HELP}")


def shapes_of(model: str) -> "ModelShapes":
    """Returns the shapes of a model, from its config alone. Raises `UsageError` if it cannot be loaded, or is not of a
    causal LM."""
    config = config_of(model)
    from ..descriptions import ModelShapes

    try:
        return ModelShapes.of_config(config)
    except ValueError as error:
        raise UsageError(f"--model {model!r}: {error}; name a causal language model") from error
