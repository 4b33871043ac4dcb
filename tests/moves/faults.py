"""Changes of model files that change what a model computes: none of what they touch may be served."""

import ast
from collections.abc import Callable, Mapping

from .sources import Move
from .trees import blocks, classes, forward_of, forwards, functions, layers

__all__ = ["FAULTS"]


def _times(value: ast.expr, factor: float) -> ast.expr:
    return ast.BinOp(value, ast.Mult(), ast.Constant(factor))


def _returned(function: ast.FunctionDef, change: Callable[[ast.expr], ast.expr]) -> None:
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            node.value = change(node.value)


def norm_scaled(tree: ast.Module) -> None:
    """Norms return 1.5 times what they did."""
    for cls in layers(tree):
        if cls.name.endswith("Norm"):
            _returned(forward_of(cls), lambda value: _times(value, 1.5))


def rotation_scaled(tree: ast.Module) -> None:
    """The second of what rotations return, the keys, is 1.25 times what it was."""

    def change(value: ast.expr) -> ast.expr:
        assert isinstance(value, ast.Tuple)
        value.elts[1] = _times(value.elts[1], 1.25)
        return value

    _returned(functions(tree)["apply_rotary_pos_emb"], change)


class _Gate(ast.NodeTransformer):
    """Puts a factor before the product of an activation and another value."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return _times(node, 0.5) if isinstance(node.op, ast.Mult) and "act_fn" in ast.unparse(node.left) else node


def gate_scaled(tree: ast.Module) -> None:
    """Gated products of MLPs and of experts are half of what they were."""
    for function in forwards(tree):
        _Gate().visit(function)


def _sums(function: ast.FunctionDef) -> list[tuple[list[ast.stmt], int]]:
    """The places of `hidden = residual + hidden`, `residual = hidden`, `hidden = self.norm(hidden)`."""

    def is_sum(first: ast.stmt, second: ast.stmt, third: ast.stmt) -> bool:
        added = getattr(first, "value", None)
        follows = ast.unparse(second) == "residual = hidden_states" and "norm(hidden_states)" in ast.unparse(third)
        return isinstance(added, ast.BinOp) and isinstance(added.op, ast.Add) and follows

    return [(block, i) for block in blocks(function) for i in range(len(block) - 2) if is_sum(*block[i : i + 3])]


def norm_before_add(tree: ast.Module) -> None:
    """Layers norm hidden states before the residual is added, not behind it."""
    for function in forwards(tree):
        for block, i in _sums(function):
            block[i], block[i + 1], block[i + 2] = block[i + 2], block[i], block[i + 1]


def residual_scaled(tree: ast.Module) -> None:
    """The next residual is half of the sum that is normed."""
    for function in forwards(tree):
        for block, i in _sums(function):
            block[i + 1] = ast.parse("residual = hidden_states * 0.5").body[0]


def sum_changed_behind(tree: ast.Module) -> None:
    """The sum is changed in place between the addition and the norm."""
    for function in forwards(tree):
        for block, i in _sums(function):
            block.insert(i + 2, ast.parse("residual.mul_(1.5)").body[0])


def other_residual(tree: ast.Module) -> None:
    """What is normed is the sum, and the next residual is what was added to it."""
    for function in forwards(tree):
        for block, i in _sums(function):
            block[i : i + 2] = ast.parse("added = hidden_states\nhidden_states = residual + hidden_states").body
            block.insert(i + 3, ast.parse("residual = added").body[0])


def tokens_mixed(tree: ast.Module) -> None:
    """Attention adds the mean over all columns, padding among them."""
    for name, cls in classes(tree).items():
        function = forward_of(cls)
        if name.endswith("Attention") and function is not None:
            at = next(i for i, node in enumerate(function.body) if "self.o_proj" in ast.unparse(node))
            text = "attn_output = attn_output + attn_output.mean(1, keepdim=True)"
            function.body.insert(at + 1, ast.parse(text).body[0])


FAULTS: Mapping[str, tuple[str, str, Move]] = {
    "norm scaled": ("llama", "rms_norm", norm_scaled),
    "rotation scaled": ("llama", "rope", rotation_scaled),
    "gate scaled": ("llama", "swiglu", gate_scaled),
    "experts scaled": ("mixtral", "moe_experts", gate_scaled),
    "norm before add": ("llama", "add_rms_norm", norm_before_add),
    "residual scaled": ("llama", "add_rms_norm", residual_scaled),
    "sum changed behind": ("llama", "add_rms_norm", sum_changed_behind),
    "other residual": ("llama", "add_rms_norm", other_residual),
    "tokens mixed": ("llama", "varlen_attention", tokens_mixed),
}
"""By name: a family, the op that serves there what is changed, and the change."""
