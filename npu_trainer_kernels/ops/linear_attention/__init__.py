"""The state of linear-attention and state-space layers: the gated delta rule.

`gated_delta_rule.py` has the formulas, the reference and the public function. `grid.py` cuts rows and segments into
chunks, `delta_rule_chunks.py` computes the op in them, `chunk_states.py` the states between them, in torch or by the
kernels of `delta_rule_kernels.py`. `head_slices.py` runs it over slices of heads, forward and backward, and `fla.py`
calls flash-linear-attention.
"""

from .fla import DeltaRuleForm, unserved_by_fla
from .gated_delta_rule import gated_delta_rule, gated_delta_rule_reference

__all__ = ["DeltaRuleForm", "gated_delta_rule", "gated_delta_rule_reference", "unserved_by_fla"]
