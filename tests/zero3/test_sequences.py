"""Rows that are spread over two gloo ranks, by DeepSpeed's Ulysses (ALST) and by PyTorch's context parallelism: the
losses and the steps of one process that sees whole rows.

Context parallelism is here for its start of the ranks, which takes longer than any case; it needs no DeepSpeed.
"""

from tests.distributed.test_distributed import on_two_ranks

WHOSE = {"Ulysses": "deepspeed.runtime.sequence_parallel.ulysses_sp", "context": "__main__"}


def test_rows_over_ranks(tmp_path, monkeypatch):
    """Three steps of two micro-batches, whatever a rank has of labels; the body steps aside on both ranks, always."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    cases = ("Trainer, context", "SFTTrainer, context", "Trainer, Ulysses", "Trainer, Ulysses, ZeRO-2",
             "loss outside, Ulysses", "SFTTrainer, Ulysses")  # fmt: skip
    found = on_two_ranks("sequences", tmp_path / "found.json", *cases)
    assert set(found) == set(cases)
    for name, case in found.items():
        reason = f"its attention (sdpa) is that of {WHOSE[name.split(', ')[1]]}"
        head = "linear_logprob" if name.startswith("SFT") else "linear_cross_entropy"
        for served, declined in zip(case["served"], case["declined"], strict=True):
            ran = [served[op] for op in (head, "embedding", "rope", "varlen_attention")]
            assert ran == [6, 6, 12, 0], name
            assert [why for op, why in declined if op in (head, "varlen_attention")] == [reason], name
