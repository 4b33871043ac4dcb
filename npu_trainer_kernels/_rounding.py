"""What rounding does to a computation: it runs once more while the result of every operator is moved."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["Rounded"]


class Rounded(TorchDispatchMode):
    """While it is entered, a result r of any operator is r (1 + eps u), with u drawn evenly from [-1, 1].

    Results that share the memory of what an operator was given stay as they are: views, and what is written in place.
    Nothing is drawn from torch's own random state.

    Args:
        seed: of what is drawn.
        dtype: whose eps it is; None: that of each result.
    """

    def __init__(self, seed: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._seed, self._dtype = seed, dtype
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if any(result.alias_info is not None for result in function._schema.returns):
            return out
        return tree_map_only(torch.Tensor, self._moved, out)

    def _moved(self, t: torch.Tensor) -> torch.Tensor:
        if type(t) is not torch.Tensor or not t.is_floating_point() or t.is_meta:
            return t
        generator = self._generators.get(t.device)
        if generator is None:
            generator = self._generators[t.device] = torch.Generator(t.device).manual_seed(self._seed)
        eps = torch.finfo(self._dtype or t.dtype).eps
        u = torch.rand(t.shape, generator=generator, device=t.device, dtype=torch.promote_types(t.dtype, torch.float32))
        return t.mul(u.mul_(2 * eps).add_(1 - eps)).to(t.dtype)
