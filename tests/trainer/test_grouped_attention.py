"""Attention with fewer key heads: what torch is asked on a GPU, and that it is the same everywhere."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.attention import block, ttt
from trainer.slots import Blocks

N, G, E = 8, 2, 64
Asked = list[tuple[int, bool, bool]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Key heads, whether there is a mask and whether groups share, of every attention that torch is asked for."""
    calls: Asked = []

    def attention(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, enable_gqa: bool) -> Tensor:
        assert k.shape == v.shape
        calls.append((k.shape[1], attn_mask is not None, enable_gqa))
        return torch.empty_like(q)

    monkeypatch.setattr(ttt.F, "scaled_dot_product_attention", attention)
    return calls


def _blocks_on(device: str) -> None:
    """Two blocks of three slots after two and four rows of context."""
    blocks = Blocks.of([(0, 2), (0, 4)], torch.device(device))
    q, *kv = (torch.empty(n, heads, E, device=device) for n, heads in ((6, N), (4, G), (4, G), (6, G), (6, G)))
    block.attend_groups(q, (kv[0], kv[1]), (kv[2], kv[3]), block.Sight(blocks, 3, 0, 3))


def test_masked_attention_of_blocks_on_a_device_copies_keys_for_the_kernel_that_keeps_no_scores(asked: Asked) -> None:
    _blocks_on("meta")
    assert asked == [(N, True, False)]


def test_groups_on_a_device_come_in_few_lengths_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, real = set(), ttt.F.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        lengths.add((q.shape[2], k.shape[2]))
        return real(q, k, *rest, **options)

    monkeypatch.setattr(ttt.F, "scaled_dot_product_attention", attention)
    for context in range(3, 52, 7):
        blocks = Blocks.of([(0, 2), (0, context)], torch.device("cpu"))
        q, *kv = (torch.randn(n, heads, E) for n, heads in ((6, N), (context, G), (context, G), (6, G), (6, G)))
        for causal in (False, True):
            sight = block.Sight(blocks, 3, 0, 3, causal=causal)
            padded = block.attend_groups(q, (kv[0], kv[1]), (kv[2], kv[3]), sight)
            expected = block.block_attention(q, (kv[0], kv[1]), (kv[2], kv[3]), sight)
            assert torch.allclose(padded, expected, atol=1e-5)
    assert lengths == {(64, 64)}


def test_a_masked_step_of_decoding_on_a_device_copies_keys_for_the_kernel_that_keeps_no_scores(asked: Asked) -> None:
    q, k, v = (torch.empty(3, n, E, device="meta") for n in (N, G, G))
    ttt.attend_cached(q, k, v, ttt.KVCache())
    assert asked == [(N, True, False)]


@pytest.mark.parametrize(
    ("dtype", "width", "masked", "shares"),
    [
        (torch.bfloat16, 128, False, True),
        (torch.bfloat16, 128, True, False),
        (torch.bfloat16, 512, False, False),
        (torch.float32, 128, False, False),
    ],
)
def test_on_a_gpu_groups_share_keys_only_where_flash_attention_takes_them(
    dtype: torch.dtype, width: int, masked: bool, shares: bool
) -> None:
    with FakeTensorMode():
        q = torch.empty(1, N, 4, width, device="cuda", dtype=dtype)
        mask = torch.empty(4, 4, device="cuda", dtype=torch.bool) if masked else None
        assert ttt.shares_keys(q, mask) is shares


def test_on_cpu_groups_share_their_keys(asked: Asked) -> None:
    _blocks_on("cpu")
    assert asked == [(G, True, True)]


@pytest.mark.parametrize("masked", [False, True])
def test_copied_and_shared_keys_give_the_same_values_and_gradients(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, n, 6, 8, dtype=torch.float64, requires_grad=True) for n in (N, G, G)]
    mask = torch.ones(6, 6, dtype=torch.bool).tril() if masked else None
    shared = ttt.attend(*tensors, mask)
    monkeypatch.setattr(ttt, "shares_keys", lambda q, mask: False)
    copied = ttt.attend(*tensors, mask)
    assert torch.allclose(copied, shared, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(shared)
    for a, b in zip(*(torch.autograd.grad(out, tensors, seed) for out in (copied, shared)), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
