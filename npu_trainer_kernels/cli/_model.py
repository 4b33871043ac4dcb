"""Reads `--model` (a folder with a config.json, a JSON file, or a hub id), and has the names of `--dtype`."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import UsageError

if TYPE_CHECKING:
    from ..descriptions import ModelShapes

__all__ = ["DTYPES", "HELP", "config_of", "shapes_of"]

# The values of `--dtype`, and torch's names of them.
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}

# NAME or OWNER/NAME; neither begins or ends with a dot, so that `./model` and `../model` are paths.
_HUB_ID = re.compile(r"(?:\w(?:[\w.-]*\w)?/)?\w(?:[\w.-]*\w)?", re.ASCII)
HELP = "folder with a config.json, the JSON file itself, or a hub id"


def config_of(model: str) -> Any:
    """Returns the config of a model. Raises `UsageError` if it cannot be loaded."""
    _check_path(model)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        # The whole message, since the cause is often in its last line.
        kind = "" if isinstance(error, OSError | ValueError | StrictDataclassError) else f"{type(error).__name__}: "
        here = "" if Path(model).exists() else "there is no such folder here; "
        raise UsageError(f"--model {model!r}: {here}{kind}{str(error).strip()}") from error


def _check_path(model: str) -> None:
    """Raises `UsageError` for a path of a missing file or folder, which `AutoConfig` would look up on the hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"--model: the folder {model!r} has no config.json")
    elif not path.is_file() and (path.suffix == ".json" or not _HUB_ID.fullmatch(model)):
        raise UsageError(f"--model: there is no file or folder {model!r}, and it is not a hub id")


def shapes_of(model: str) -> "ModelShapes":
    """Returns the shapes of a model, from its config alone. Raises `UsageError` if it cannot be loaded, or is not of a
    causal LM."""
    config = config_of(model)
    from ..descriptions import ModelShapes

    try:
        return ModelShapes.of_config(config)
    except ValueError as error:
        raise UsageError(f"--model {model!r}: {error}") from error
