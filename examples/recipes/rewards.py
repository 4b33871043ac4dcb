"""A reward that a program verifies: is the answer that a completion puts into a box the right one?

    npu-kernels run trl grpo --config examples/recipes/grpo.yaml

TRL imports the function by its name, `examples.recipes.rewards.same_answer`, from the folder in which the command is
started. It compares text, so that it needs no package: `1/2` and `0.5` are two answers. TRL's own `accuracy_reward`
compares values, and needs the package math-verify.
"""

from typing import Any


def boxed(text: str) -> str | None:
    r"""Returns what stands in the last `\boxed{...}` of a text, without spaces; None if there is no closed box."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, answer = 0, text[start + len(r"\boxed") :]
    for end, character in enumerate(answer):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return "".join(answer[1:end].split())
    return None


def same_answer(completions: list[Any], solution: list[str], **columns: Any) -> list[float]:
    """Returns 1 for each completion whose box holds the solution, else 0.

    Args:
        completions: texts, or conversations of one message.
        solution: the column of the data set: an answer as text, with or without a box or dollars around it.
        columns: the other columns of the data set, which TRL passes as well; they are not used.
    """
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    right = [boxed(text) or "".join(text.strip("$ ").split()) for text in solution]
    return [float(boxed(text) == answer) for text, answer in zip(texts, right, strict=True)]
