"""How a process that trains is set up: its libraries print nothing, and it is as repeatable as its device."""

import logging
import warnings

import datasets
import torch
import transformers

__all__ = ["prepare", "quiet"]


def quiet() -> None:
    """Silences progress bars and remarks of the libraries, which would tear the table apart."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", UserWarning)


def prepare(device: str) -> None:
    """Silences the libraries of this process, and makes its training as repeatable as the device allows."""
    quiet()
    if device == "cpu":
        # These models are too small to gain from a second thread.
        torch.set_num_threads(1)
    torch.manual_seed(0)
