"""The text of an error that is reported as a reason instead of being raised."""

__all__ = ["one_line"]


def one_line(error: BaseException, most: int = 400) -> str:
    """Returns the type of an error and at most `most` characters of the first line of its message, if it has one."""
    line = str(error).strip().partition("\n")[0].strip()[:most]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
