"""The prefix-plus-own-steps attention against one dense softmax."""

import pytest
import torch
from torch import Tensor

from trainer.attention import ttt as module
from trainer.attention.ttt import dense_attend, dense_attend_backward, ttt_attention
from trainer.slots import SlotRange, map_slots

N, G, E = 4, 2, 8


def dense(q: Tensor, k0: Tensor, v0: Tensor, later: list[tuple[Tensor, Tensor]], runs: tuple[SlotRange, ...]) -> Tensor:
    """Slot by slot."""
    outs = []
    for run in runs:
        for t in range(run.begin, run.end):
            a = run.at + t - run.begin
            heads = []
            for n in range(N):
                g = n // (N // G)
                keys = torch.cat([k0[run.document : t + 1, g], *[k[a : a + 1, g] for k, _ in later]])
                values = torch.cat([v0[run.document : t + 1, g], *[v[a : a + 1, g] for _, v in later]])
                heads.append((keys @ q[a, n] / E**0.5).softmax(0) @ values)
            outs.append(torch.stack(heads))
    return torch.stack(outs)


def problem(steps: int, dtype: torch.dtype) -> tuple[list[Tensor], tuple[SlotRange, ...]]:
    document = torch.cat([torch.full((n,), i) for i, n in enumerate([37, 5, 30])])
    plan = map_slots(torch.tensor([4, 5, 30, 31, 40, 60, 61, 71]), document, 2, join_gap=3)
    total, active = len(document), len(plan.active)
    shapes = [(active, N, E), (total, G, E), (total, G, E)] + [(active, G, E)] * (2 * steps)
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes], plan.ranges


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("flash", [True, False])
def test_values_and_gradients_equal_one_dense_softmax(steps: int, flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not flash:
        monkeypatch.setattr(module, "_attend", dense_attend)
        monkeypatch.setattr(module, "_attend_backward", dense_attend_backward)
        monkeypatch.setattr(module, "ROW_BLOCK", 4)
    (q, k0, v0, *rest), runs = problem(steps, torch.float64)
    later = list(zip(rest[0::2], rest[1::2], strict=True))
    found, expected = ttt_attention(q, k0, v0, later, runs), dense(q, k0, v0, later, runs)
    assert torch.allclose(found, expected, atol=1e-10)
    weights = torch.randn_like(expected)
    a = torch.autograd.grad((found * weights).sum(), [q, k0, v0, *rest])
    b = torch.autograd.grad((expected * weights).sum(), [q, k0, v0, *rest])
    for x, y in zip(a, b, strict=True):
        assert torch.allclose(x, y, atol=1e-10)


def test_bfloat16_stays_close_to_fp32() -> None:
    tensors, runs = problem(2, torch.float32)
    q, k0, v0, *rest = tensors
    exact = ttt_attention(q, k0, v0, list(zip(rest[0::2], rest[1::2], strict=True)), runs)
    q, k0, v0, *rest = [t.detach().bfloat16() for t in tensors]
    rough = ttt_attention(q, k0, v0, list(zip(rest[0::2], rest[1::2], strict=True)), runs)
    assert (rough.float() - exact).abs().max() < 0.06
