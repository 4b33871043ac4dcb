"""One family's share of the full run, in a process of its own."""

import warnings

import torch
import transformers

from .compare import compare
from .page import row, unfit_row

__all__ = ["one"]


def one(family: tuple[str, str]) -> tuple[tuple[str, str], list[str], str]:
    """The family, what is wrong with it, and its line of `docs/models.md`."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    try:
        results = compare(*family)
    except Exception as error:  # noqa: BLE001 - the run goes on and lists it
        why = f"{type(error).__name__}: {error}"
        return family, [f"the plain model: {why}"], unfit_row(*family, why)
    wrong = [f"{result.op_set}: {finding}" for result in results for finding in result.findings]
    return family, wrong, row(results)
