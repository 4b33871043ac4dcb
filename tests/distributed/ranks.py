"""How ranks end, of whatever has launched them."""

import gc

import torch

__all__ = ["end_ranks"]


def end_ranks() -> None:
    """Ends the process group of this rank, if it has one; what was wrapped must not be referred to any more.

    gloo's threads live as long as a wrapped model does, and may hold tensors of Python. Without this, one process of
    twenty that left its interpreter aborted in them ("terminate called without an active exception"), with the kernels
    and without; PyTorch asks every script for the call.
    """
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
