"""`--model`: a folder with a config.json, a JSON file, or an id that `AutoConfig` finds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._output import UsageError

if TYPE_CHECKING:
    from ..workloads import ModelShapes

__all__ = ["HELP", "config_of", "shapes_of"]

HELP = "folder with a config.json, the JSON file itself, or a hub id"


def config_of(model: str) -> Any:
    """The config of a model. Raises `UsageError` where there is none."""
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise UsageError(f"--model: the folder {model!r} has no config.json")
    if path.suffix == ".json" and not path.is_file():
        raise UsageError(f"--model: there is no file {model!r}")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UsageError(f"--model {model!r}: {str(error).strip().splitlines()[0]}") from error


def shapes_of(model: str) -> "ModelShapes":
    """The shapes of a model, from its config alone. Raises `UsageError` where there is none, or none of a causal LM."""
    config = config_of(model)
    from ..workloads import ModelShapes

    try:
        return ModelShapes.of_config(config)
    except ValueError as error:
        raise UsageError(f"--model {model!r}: {error}") from error
