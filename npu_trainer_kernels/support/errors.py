"""What is said of an error where it is a reason, and not raised."""

__all__ = ["one_line"]


def one_line(error: BaseException, most: int = 400) -> str:
    """Its kind and the first line of its message, of which at most `most` letters; some have no message."""
    line = str(error).strip().partition("\n")[0].strip()[:most]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
