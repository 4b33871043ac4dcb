"""The experts of a mixture as one op on rows.

`moe_experts.py` has the formulas, the reference and the public function. Rows are sorted by expert
(`row_kernels.py`), multiplied (`grouped.py`), gated (`gate_kernels.py`), multiplied again and added up; `steps.py` does
the same one step at a time for gates that no kernel has.
"""

from .moe_experts import moe_experts, moe_experts_reference, unserved

__all__ = ["moe_experts", "moe_experts_reference", "unserved"]
