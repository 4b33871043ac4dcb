"""What is said of an error where it is a reason, and not raised."""

from npu_trainer_kernels.support.errors import one_line


def test_an_error_in_one_line():
    assert one_line(ValueError("\n first of them \nthe second")) == "ValueError: first of them"
    assert one_line(ValueError("x" * 500), 120) == "ValueError: " + "x" * 120
    # As `raise NotImplementedError` has it.
    assert one_line(NotImplementedError()) == "NotImplementedError"
