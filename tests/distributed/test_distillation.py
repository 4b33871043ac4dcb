"""Distillation on two gloo ranks on the CPU: labels that ranks count, and heads whose vocabulary they share out."""

import pytest

from tests.distributed.test_distributed import on_two_ranks

# How often our divergence runs, by the case of `distillation.py`.
RAN = {
    "distillation, DDP": 2,
    "distillation, DDP, micro-batches": 4,
    "gkd, DDP": 4,
    "iw-opd, DDP, some tokens": 2,
    "distillation, FSDP2": 2,
    "gkd, FSDP2": 2,
    "gkd, both shared": 2,
    "gkd, forward KL, both shared": 2,
    "gkd, the student's shared": 2,
}
DECLINED = "iw-opd, some tokens, both shared"


@pytest.mark.full("all")
@pytest.mark.parametrize("names", [["distillation, DDP"], [*RAN, DECLINED]], ids=["one", "all"])
def test_same_parameters_as_trls(tmp_path, names):
    """All in one start of the ranks."""
    found = on_two_ranks("distillation", tmp_path / "found.json", *names)
    assert list(found) == names
    if DECLINED in found:
        of_some = found.pop(DECLINED)
        assert of_some["ran"] == 0
        assert "linear_divergence: a head is sharded" in of_some["declined"]
    assert {name: case["ran"] for name, case in found.items()} == {name: RAN[name] for name in found}
    assert not [name for name, case in found.items() if case["declined"]]
