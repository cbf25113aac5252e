"""Blocks that drafters share, against torch's composed operations."""

import pytest
import torch
from torch.nn import functional as F

from trainer.drafters.blocks import GatedMLP, RMSNorm

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


@pytest.mark.parametrize("of_x", TOLERANCE)
@pytest.mark.parametrize("of_weight", TOLERANCE)
def test_a_norm_and_its_gradients_are_those_of_the_formula(of_x: torch.dtype, of_weight: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(16, 1e-6).to(of_weight)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(5, 16, dtype=of_x, requires_grad=True)
    wide, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight
    found, slope = norm(x), torch.randn(5, 16, dtype=torch.float64)
    found.backward(slope.to(found.dtype))
    expected.backward(slope)
    assert x.grad is not None
    assert norm.weight.grad is not None
    close = max(TOLERANCE[of_x], TOLERANCE[of_weight], TOLERANCE[found.dtype])
    for a, b in ((found, expected), (x.grad, wide.grad), (norm.weight.grad, weight.grad)):
        assert torch.allclose(a.double(), b.double(), rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gated_product_and_its_gradients_are_those_of_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mlp = GatedMLP(16, 24).to(dtype)
    x = torch.randn(5, 16, dtype=dtype)
    expected = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    found = mlp(x)
    ours, theirs = (torch.autograd.grad(y.sum(), list(mlp.parameters())) for y in (found, expected))
    for a, b in zip((found, *ours), (expected, *theirs), strict=True):
        assert torch.allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
