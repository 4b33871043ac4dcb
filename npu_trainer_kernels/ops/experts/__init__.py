"""The experts of a mixture as one op on rows.

`moe_experts.py` has the formulas, the reference and the public function. The op sorts rows by expert
(`row_kernels.py`), multiplies them (`grouped.py`), applies the gate (`gate_kernels.py`), multiplies again and sums.
`steps.py` does the same with separate autograd functions, for gates that the kernels do not support.
"""

from .moe_experts import moe_experts, moe_experts_reference, unserved

__all__ = ["moe_experts", "moe_experts_reference", "unserved"]
