"""Every reason of a guard is quoted by a test: a guard whose reason no test names could be taken out unseen.

A reason is a sentence by which a function of `patching/` or `training/` says why something is not served or not done.
Reasons are read from the source: what a function returns, what it assigns to a name that holds reasons, and what it
gives to `LateRefusal`, `HarmlessReason`, `Unserved` and `formed`. A string of a test quotes a reason if it has four
consecutive words of it that no other reason has. A sentence that two guards give needs two strings.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import npu_trainer_kernels

PACKAGE, TESTS = Path(npu_trainer_kernels.__file__).parent, Path(__file__).parents[1]
WORDS, SHORTEST = 4, 12
TAKE_REASONS = ("LateRefusal", "HarmlessReason", "Unserved", "formed")
HOLD_REASONS = ("reason", "off", "read")
GAP = "\0"  # stands for what an f-string fills in

UNREACHABLE = {
    "with a tensor of another kind": "a number in a tensor without dimensions changes no dtype of logits, which have "
    "one at least; the guard is for a rule of promotion that torch may change",
}

Run = tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------------------
# The package's reasons
# ---------------------------------------------------------------------------------------------------------------------


def text_of(node: ast.expr) -> str | None:
    """Returns a string's text, or None for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
    return None


def sentences(node: ast.expr | None, constants: dict[str, ast.expr]) -> Iterator[str]:
    """Yields the sentences that an expression may be."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    elif isinstance(node, ast.BoolOp):
        parts = node.values
    elif isinstance(node, ast.Name) and node.id in constants:
        parts = [constants[node.id]]
    elif node is not None and (text := text_of(node)) is not None and " " in text.strip() and len(text) >= SHORTEST:
        yield text
    for part in parts:
        yield from sentences(part, constants)


def name_of(node: ast.AST) -> str | None:
    """Returns the last name of an expression like `a.b.name`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def assigned_to(node: ast.AST) -> set[str | None]:
    """Returns the last names of what a statement assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return set(map(name_of, targets))


def reasons_in(source: str) -> Iterator[str]:
    """Yields the reasons in a file. What `__str__` returns describes something, and is none."""
    tree = ast.parse(source)
    constants = {str(name): node.value for node in tree.body if isinstance(node, ast.Assign)
                 for name in assigned_to(node)}  # fmt: skip
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__str__"]
    describing = {part for function in functions for part in ast.walk(function)}
    for node in ast.walk(tree):
        if node in describing:
            continue
        if isinstance(node, ast.Call) and name_of(node.func) in TAKE_REASONS:
            for given in node.args:
                yield from sentences(given, constants)
        if isinstance(node, ast.Return) or assigned_to(node) & {*HOLD_REASONS}:
            yield from sentences(getattr(node, "value", None), constants)


# ---------------------------------------------------------------------------------------------------------------------
# Quotes
# ---------------------------------------------------------------------------------------------------------------------


def strings_in(source: str) -> Iterator[str]:
    """Yields the strings in a file of tests, without docstrings; strings that are broken over lines are one."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    left_out = {node.value for node in nodes if isinstance(node, ast.Expr)}
    left_out |= {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr) and node not in left_out:
            yield text_of(node) or ""


def runs_of(text: str, length: int) -> set[Run]:
    """Returns all consecutive words of a length. Punctuation and the escapes of regular expressions are no words."""
    parts = [re.findall(r"\w+", part) for part in text.split(GAP)]
    return {tuple(part[i : i + length]) for part in parts for i in range(len(part) - length + 1)}


def signs_of(reason: str) -> set[Run]:
    """Returns the words by which a quote is known: four consecutive ones, or all of the longest part between gaps."""
    return next(found for length in range(WORDS, 0, -1) if (found := runs_of(reason, length)))


def unquoted(sources: list[str], tests: list[str]) -> list[str]:
    """Returns the reasons in files of the package that have more places there than quotes in files of tests."""
    places = Counter(reason for source in sources for reason in reasons_in(source))
    shared = Counter(sign for reason in places for sign in signs_of(reason))
    lengths = {len(sign) for sign in shared}
    strings = [text for test in tests for text in strings_in(test) if " " in text]
    found = [shared.keys() & set().union(*(runs_of(text, length) for length in lengths)) for text in strings]
    found = [signs for signs in found if signs]
    missing = []
    for reason, count in places.items():
        own = {sign for sign in signs_of(reason) if shared[sign] == 1} or signs_of(reason)
        if sum(not own.isdisjoint(signs) for signs in found) < count:
            missing.append(reason)
    return missing


def test_every_reason_is_quoted_by_a_test():
    # The report has no reasons of its own.
    paths = [path for root in ("patching", "training") for path in (PACKAGE / root).rglob("*.py")]
    sources = [path.read_text() for path in paths if path.name != "report.py"]
    tests = [path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__)]
    assert set(unquoted(sources, tests)) == set(UNREACHABLE)


GUARDS = '''
_ELSEWHERE = "it is somewhere else than it was"


class Guard:
    def __str__(self):
        return "describes what nobody quotes"

    def declines(self, x):
        """A sentence that no test quotes."""
        if x < 0:
            return f"it is a number below {x} that is none of ours"
        if x == 0:
            return _ELSEWHERE if self.moved else "it was never here before"
        self.off = self.why(x) or "it has been switched off by hand"
        raise Unserved("its layers are " "of another kind")

    def again(self, x):
        return "it was never here before" if x else LateRefusal(f"it has {x} of a kind")
'''
# For each of them a test that quotes it.
QUOTES = {
    f"it is a number below {GAP} that is none of ours": 'said = f"{n} that is none of {m}"',
    "it is somewhere else than it was": 'said = "somewhere else than it"',
    "it was never here before": 'said = "it was never here", "was never here before"',
    "it has been switched off by hand": 'said = r"been switched off\\. by"',
    "its layers are of another kind": 'said = ("its layers are "\n        "of another kind")',
    f"it has {GAP} of a kind": 'said = "none of a kind"',
}
NONE = {
    "three words of four": 'said = "never here before", "was never here"',
    "a docstring": '"""it was never here before"""\n"it was never here before"',
    "a comment": "# it was never here before",
    "one string for two guards": 'said = "it was never here before"',
}


def test_a_reason_that_nobody_quotes_is_found():
    assert unquoted([GUARDS], list(QUOTES.values())) == []
    for reason in QUOTES:
        others = [quote for name, quote in QUOTES.items() if name != reason]
        assert unquoted([GUARDS], others) == [reason]
    for quote in NONE.values():
        tests = [quote, *(quote for name, quote in QUOTES.items() if "never" not in name)]
        assert unquoted([GUARDS], tests) == ["it was never here before"]
