"""The state of linear-attention and state-space layers: the gated delta rule.

`gated_delta_rule.py` has the formulas, the reference and the public function. `grid.py` cuts rows and segments into
chunks, `chunks.py` computes the op in them, `states.py` the states between them, in torch or by the kernels of
`kernels.py`. `slices.py` runs it over slices of heads, forward and backward, and `fla.py` calls flash-linear-attention.
"""

from .fla import DeltaRuleForm, unserved_by_fla
from .gated_delta_rule import gated_delta_rule, gated_delta_rule_reference

__all__ = ["DeltaRuleForm", "gated_delta_rule", "gated_delta_rule_reference", "unserved_by_fla"]
