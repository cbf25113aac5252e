"""Products by oneDNN against torch's own."""

import platform
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hiddenstore.targets import matmul
from hiddenstore.targets.matmul import Linear, linear

needs_onednn = pytest.mark.skipif(not matmul.HAS_ONEDNN, reason="needs an AMD CPU with AVX-512")


@pytest.fixture(autouse=True)
def _small_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "FEWEST_WITH_GRADIENT", 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(0, 40), width=st.integers(1, 70), out=st.integers(1, 70), seed=st.integers(0, 99))
def test_values_and_gradients_are_those_of_torch(rows: int, width: int, out: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, width, requires_grad=True), torch.randn(out, width, requires_grad=True)
    found, expected = linear(x, weight), F.linear(x, weight)
    slope = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(y, (x, weight), slope) for y in (found, expected))
    for a, b in zip((found, *ours), (expected, *theirs), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 5, 16), (16,), (0, 16)])
def test_rows_of_any_shape_are_taken(shape: tuple[int, ...]) -> None:
    x, layer = torch.randn(shape, requires_grad=True), Linear(16, 8)
    expected = F.linear(x, layer.weight)
    found = layer(x)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-5)
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torch_s_to_the_bit(dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 16, dtype=dtype), torch.randn(8, 16, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_a_slice_of_columns_and_rows_that_are_not_contiguous_are_right() -> None:
    x, weight = torch.randn(16, 12).T, torch.randn(8, 48)[:, 16:32]
    assert torch.allclose(linear(x, weight), x @ weight.T, atol=1e-5)
    assert torch.allclose(linear(x, weight.contiguous()), x @ weight.T, atol=1e-5)


def test_autocast_decides_over_the_dtype() -> None:
    layer = Linear(16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(4, 16)).dtype == torch.bfloat16


@needs_onednn
def test_fp32_rows_go_to_onednn_and_column_slices_do_not() -> None:
    x, weight = torch.randn(9, 16), torch.randn(8, 48)
    assert matmul.onednn_pays(x, weight[:, :16].contiguous())
    assert matmul.onednn_pays(x[:, :8], weight[:, :16].contiguous().T)
    assert not matmul.onednn_pays(x, weight[:, :16])


@pytest.mark.parametrize("trained", ["x", "weight"])
def test_only_what_a_gradient_needs_is_kept(trained: str) -> None:
    x = torch.randn(9, 16, requires_grad=trained == "x")
    weight = torch.randn(8, 16, requires_grad=trained == "weight")
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = linear(x, weight)
    assert [sorted(tensor.shape) for tensor in kept] == [sorted(weight.shape if trained == "x" else x.shape)]
    found.sum().backward()
    expected = weight.sum(0).expand(9, -1) if trained == "x" else x.sum(0).expand(8, -1)
    grad = x.grad if trained == "x" else weight.grad
    assert grad is not None
    assert torch.allclose(grad, expected, atol=1e-5)


def test_a_width_that_does_not_fit_is_refused_in_torch_s_words() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(torch.randn(4, 15), torch.randn(12, 16))
    assert linear(torch.randn(4, 0), torch.randn(12, 0)).abs().sum() == 0


@needs_onednn
def test_onednn_switched_off_is_left_alone() -> None:
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        assert not matmul.onednn_pays(torch.randn(4, 16), torch.randn(12, 16))


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_a_cpu_multiplies_bf16_where_the_system_names_instructions_for_it() -> None:
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    own = {"avx512_bf16", "amx_bf16"} & set(flags)
    assert bool(own) is matmul.HAS_BF16
