"""Two gloo ranks on the CPU: completions of weights that ranks hold parts of, whole for the length of a rollout."""

from tests.distributed.test_distributed import on_two_ranks


def test_weights_of_fsdp2_are_gathered_once_a_rollout(tmp_path):
    """Each rank has prompts of its own, whose rows end when they end; a step is never kept. If one rank cannot make a
    rollout, all of them call `generate`, after which the weights of the outermost module are still gathered."""
    found = on_two_ranks("rollouts", tmp_path / "found.json", "fsdp2")
    for case in ("whole", "in 16 bits", "lora", "trained"):
        assert found[f"fsdp2, {case}"]["ranks"] == [[2, {}, True, True]] * 2, case
    no_room = "half of the free memory (0.0 GiB) has no room for its gathered weights"
    for case, reason in (("another rank cannot", "output_scores is asked for"), ("no room", no_room)):
        assert found[f"fsdp2, {case}"]["ranks"] == [
            [0, {"another rank cannot": 2}, False, True], [0, {reason: 2}, False, True],
        ], case  # fmt: skip
