"""gated_delta_rule's gradients of the numbers that make its gates, where these let a state be forgotten within tokens.

Decays are then small beside 1, and so are these gradients beside the sums of a formula that takes a decay between two
tokens from a difference of two cumulated logs.
"""

import pytest
import torch
from torch.nn import functional

from npu_trainer_kernels.ops import Segments, gated_delta_rule, gated_delta_rule_reference
from npu_trainer_kernels.ops.linear_attention import delta_rule_chunks as chunks
from tests.closeness import assert_op_close

HEADS, KEY, VALUE = 4, 8, 12


def close(device, backend, channel=False, lengths=(17, 40, 5)):
    """Compares with the reference: gates of Qwen3-Next, or of Kimi-Linear, with the first values of transformers."""
    segments, tokens = Segments.make(lengths, device), sum(lengths)

    def drawn(*shape):
        return torch.randn(1, tokens, HEADS, *shape, device=device)

    of_gates = (HEADS, KEY) if channel else (HEADS,)
    a_log = torch.empty(HEADS, 1, device=device).uniform_(0.01, 16).log()
    given = [drawn(KEY), drawn(KEY), drawn(VALUE), 0.1 * drawn(*of_gates[1:]), drawn().sigmoid(),
             a_log if channel else a_log[:, 0], torch.ones(of_gates, device=device)]  # fmt: skip

    def with_gates(op, **options):
        def call(q, k, v, a, beta, a_log, dt_bias):
            g = -a_log.exp() * functional.softplus(a + dt_bias)
            return op(q, k, v, g, beta, segments=segments, normalize=True, **options)

        return call

    def upstream(outputs):
        weights = torch.linspace(-1, 1.5, outputs[0].numel(), device=device).view(outputs[0].shape)
        return (outputs[0] * weights.to(outputs[0])).sum()

    ours, reference = with_gates(gated_delta_rule, backend=backend), with_gates(gated_delta_rule_reference)
    assert_op_close(ours, reference, [t.requires_grad_() for t in given], upstream)


@pytest.mark.parametrize("channel", [False, True])
def test_of_a_state_that_is_forgotten_within_tokens(device, backend, channel):
    close(device, backend, channel)


def differences_of_sums(q, k, g, delta):
    """`_by_head` with the decay between two tokens from a difference of two cumulated logs."""
    before = g.cumsum(-2)
    later = torch.ones(g.shape[-2], g.shape[-2], dtype=torch.bool, device=g.device).triu(1)
    decay = (before - before.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
    kk = (k @ k.transpose(-1, -2)) * decay if delta else None
    return kk, (q @ k.transpose(-1, -2)) * decay, before, before[..., -1:, :] - before


def test_differences_of_sums_are_seen(device, monkeypatch):
    monkeypatch.setattr(chunks, "_by_head", differences_of_sums)
    with pytest.raises(AssertionError, match="result 4"):  # the gradient of what the gates are made from
        close(device, "torch", lengths=(24,))
