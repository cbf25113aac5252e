"""The path of a GPU with its kernel replaced by plain softmax on the CPU, and the kernel as far as shapes go."""

import pytest
import torch
from torch import Tensor

from tests.trainer.test_ttt_attention import E, G, N, dense, problem
from trainer.attention import ttt as module
from trainer.attention.ttt import ttt_attention


def _pieces(spans: module.Spans) -> list[tuple[slice, slice]]:
    q, k = spans.queries.tolist(), spans.keys.tolist()
    return [(slice(q[i], q[i + 1]), slice(k[i], k[i + 1])) for i in range(len(q) - 1)]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[N, A, S], the last query on the last key."""
    scores = torch.einsum("ane,sne->nas", q, k.repeat_interleave(N // G, 1)) / E**0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    return scores.masked_fill(hidden, float("-inf"))


class Plain(module.Flash):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, spans: module.Spans) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(N, q.shape[0])
        for at, seen in _pieces(spans):
            scores = _scores(q[at], k[seen])
            out[at] = torch.einsum("nas,sne->ane", scores.softmax(-1), v[seen].repeat_interleave(N // G, 1))
            lse[:, at] = scores.logsumexp(-1)
        return out, lse

    @staticmethod
    def backward(do: Tensor, saved: tuple[Tensor, ...], spans: module.Spans) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = saved
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for at, seen in _pieces(spans):
            keys, values = (x[seen].repeat_interleave(N // G, 1) for x in (k, v))
            p = (_scores(q[at], k[seen]) - lse[:, at, None]).exp()
            dp = torch.einsum("ane,sne->nas", do[at], values)
            ds = p * (dp - (do[at] * out[at]).sum(-1).T[:, :, None]) / E**0.5
            dq[at] = torch.einsum("nas,sne->ane", ds, keys)
            dk[seen] = torch.einsum("nas,ane->sne", ds, q[at]).unflatten(1, (G, -1)).sum(2)
            dv[seen] = torch.einsum("nas,ane->sne", p, do[at]).unflatten(1, (G, -1)).sum(2)
        return dq, dk, dv


@pytest.mark.parametrize("keys", [module.KEYS_AT_ONCE, 0.7, 0.0])
@pytest.mark.parametrize("steps", [0, 3])
def test_calls_over_all_runs_equal_one_dense_softmax_however_many_they_are(
    steps: int, keys: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "fits", lambda q: True)
    monkeypatch.setattr(module, "Flash", Plain)
    monkeypatch.setattr(module, "KEYS_AT_ONCE", keys)
    (q, k0, v0, *rest), runs = problem(steps, torch.float64)
    assert len({run.document for run in runs}) < len(runs)
    later = list(zip(rest[0::2], rest[1::2], strict=True))
    found, expected = ttt_attention(q, k0, v0, later, runs), dense(q, k0, v0, later, runs)
    assert torch.allclose(found, expected, atol=1e-10)
    weights = torch.randn_like(expected)
    a = torch.autograd.grad((found * weights).sum(), [q, k0, v0, *rest])
    b = torch.autograd.grad((expected * weights).sum(), [q, k0, v0, *rest])
    for x, y in zip(a, b, strict=True):
        # Shared keys are summed in fp32.
        assert torch.allclose(x, y, atol=1e-5)


def test_keys_of_one_call_stay_within_twice_the_pack_however_many_turns_a_conversation_has() -> None:
    tokens, turns = 3000, 100
    ranges = tuple(module.SlotRange(0, 30 * turn + 10, 30 * turn + 30, 20 * turn) for turn in range(turns))
    parts = list(module._together(ranges, tokens))
    assert [one for part, _ in parts for one in part] == list(ranges)
    assert [at.stop for _, at in parts[:-1]] == [at.start for _, at in parts[1:]]
    assert (parts[0][1].start, parts[-1][1].stop) == (0, 20 * turns)
    assert max(sum(one.end - one.document for one in part) for part, _ in parts) <= 2 * tokens
    assert len(parts) < 40


def test_torch_accepts_what_the_flash_kernel_is_called_with() -> None:
    (q, k0, v0, *_), runs = problem(0, torch.float32)
    real = module.spans_of(runs, torch.device("cpu"))
    spans = module.Spans(
        real.queries.to("meta"), real.keys.to("meta"), real.longest_query, real.longest_key, real.rows.to("meta")
    )
    q, k, v = (x.detach().bfloat16().to("meta") for x in (q, k0[real.rows], v0[real.rows]))
    out, lse = module.Flash.forward(q, k, v, spans)
    assert (out.shape, lse.shape) == (q.shape, (N, q.shape[0]))
    gradients = module.Flash.backward(torch.empty_like(out), (q, k, v, out, lse), spans)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
