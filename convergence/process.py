"""Sets up a process that trains: its libraries print nothing, and it is as reproducible as its device."""

import logging
import warnings

import datasets
import torch
import transformers

__all__ = ["prepare", "quiet"]


def quiet() -> None:
    """Silences progress bars and warnings of the libraries, which would disturb the live display."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", UserWarning)


def prepare(device: str) -> None:
    """Silences the libraries of this process, and makes its training as reproducible as the device allows."""
    quiet()
    if device == "cpu":
        # These models are too small to benefit from a second thread.
        torch.set_num_threads(1)
    torch.manual_seed(0)
