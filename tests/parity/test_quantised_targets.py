"""Targets in the forms that installed quantisers read: captured as transformers runs them, equal to decoded weights.

Checkpoints are written here by each form's definition; bitsandbytes makes its own codes. Needs the environment of
`make test-parity` (tests/parity/requirements.txt).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from collectors.engines import CaptureRequest, EngineOptions
from collectors.engines.hf import HfEngine
from collectors.targets.load import LoadOptions, load_weights
from hiddenstore.errors import ConfigError
from hiddenstore.targets.folder import open_target
from tests.collectors.tiny import VOCAB, save_target

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

GROUP, NF4_BLOCK = 32, 64
Packed = tuple[dict[str, Tensor], Tensor]
"""What a checkpoint holds of a weight [out, in], by the end of the name; and what it stands for."""


def int4_groups(weight: Tensor) -> Packed:
    """``pack-quantized``: eight codes + 8 an int32, a scale for 32 inputs."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).to(torch.bfloat16)
    codes = (groups / scale.float()).round().clamp(-8, 7).to(torch.int32)
    packed = torch.zeros(len(weight), weight.shape[1] // 8, dtype=torch.int32)
    for place in range(8):
        packed |= (codes.flatten(1)[:, place::8] + 8) << (4 * place)
    shape = torch.tensor(weight.shape)
    return {"_packed": packed, "_scale": scale.squeeze(-1), "_shape": shape}, (codes * scale.float()).flatten(1)


def fp8_rows(weight: Tensor) -> Packed:
    """``float-quantized``: E4M3 with a scale for each output."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    codes = (weight.float() / scale.float()).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scale}, codes.float() * scale.float()


def nf4(weight: Tensor) -> Packed:
    """bitsandbytes: two places of a table of sixteen a byte, the first above, times the largest value of 64."""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4")
    places = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=-1).long()
    values = state.code[places].view(-1, NF4_BLOCK) * state.absmax[:, None]
    parts = {f".{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return {"": packed, **parts}, values.view(weight.shape)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        **{"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"},
        **{"ignore": ["lm_head", "re:.*down_proj"], "config_groups": {"group_0": scheme}},
    }


CASES: dict[str, tuple[str, Callable[[Tensor], Packed], dict[str, Any]]] = {
    "W4A16": (
        "compressed_tensors",
        int4_groups,
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
    ),
    "FP8": (
        "compressed_tensors",
        fp8_rows,
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "NF4": (
        "bitsandbytes",
        nf4,
        {
            **{"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            **{"bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": ["lm_head", "down_proj"]},
        },
    ),
}


def captured(folder: Path) -> Tensor:
    """Aux states fp32 [L, T, D] of three texts."""
    engine = HfEngine(load_weights(open_target(str(folder)), LoadOptions(device="cpu")), EngineOptions((-1, 1, 3), 64))
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, VOCAB, length).astype(np.int32) for length in (5, 17, 30)]
    return engine.capture([CaptureRequest(ids, np.array([len(ids) - 1], np.int32)) for ids in rows]).aux.float()


def save_packed(
    root: Path, form: Callable[[Tensor], Packed], quantisation: dict[str, Any], whole: tuple[str, ...]
) -> list[Path]:
    """Three targets: quantised but for the projections ``whole``, what it stands for, and what it was made of."""
    folders = [save_target(root / name, dtype=torch.bfloat16) for name in ("packed", "decoded", "original")]
    packed: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for name, weight in load_file(folders[0] / "model.safetensors").items():
        is_packed = name.endswith("_proj.weight") and not any(part in name for part in whole)
        parts, restored = form(weight) if is_packed else ({"": weight}, weight)
        packed |= {name + end: tensor.contiguous() for end, tensor in parts.items()}
        decoded[name] = restored.to(torch.bfloat16).contiguous()
    for folder, tensors in zip(folders, (packed, decoded), strict=False):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return folders


@pytest.mark.parametrize("case", CASES)
def test_a_quantised_target_is_captured_as_its_weights_decode(case: str, tmp_path: Path) -> None:
    package, form, quantisation = CASES[case]
    pytest.importorskip(package)
    # bitsandbytes takes no rows of 96 on a CPU.
    folders = save_packed(tmp_path, form, quantisation, ("down_proj",))
    quantised, decoded, original = map(captured, folders)
    # bf16 products, summed in another order by the kernels of NF4.
    torch.testing.assert_close(quantised, decoded, rtol=2**-5, atol=5e-2)
    assert (quantised - original).abs().mean() > 10 * (quantised - decoded).abs().mean()


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(),
    reason="without AVX512-BF16 bitsandbytes multiplies by torch, which refuses no shape",
)
def test_a_form_whose_kernels_refuse_a_shape_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    quantisation = CASES["NF4"][2] | {"llm_int8_skip_modules": ["lm_head"]}
    folder = save_packed(tmp_path, nf4, quantisation, ())[0]
    with pytest.raises(ConfigError, match=r"quantised \(bitsandbytes\), which cannot be applied here") as caught:
        captured(folder)
    assert caught.value.kind == "quantisation-unsupported"
