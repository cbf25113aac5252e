"""How long the identity of a large target takes: sparse checkpoints of the shapes of two published ones.

``python benchmarks/target_identity.py``; the files take no room on a disk that knows holes.
"""

import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from hiddenstore.targets.folder import TargetFolder
from hiddenstore.targets.tensors import BLOCK_BYTES, BLOCKS, WHOLE_BELOW_BYTES, checkpoint_sha256

BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
Tensor = tuple[str, str, list[int]]


def llama_70b() -> Iterator[Tensor]:
    """Llama-3.1-70B in bf16."""
    for name in ("embed_tokens", "lm_head"):
        yield name, "BF16", [128256, 8192]
    shapes = {"q": [8192, 8192], "k": [1024, 8192], "v": [1024, 8192], "o": [8192, 8192], "norm": [8192]}
    shapes |= {"gate": [28672, 8192], "up": [28672, 8192], "down": [8192, 28672], "norm2": [8192]}
    for layer in range(80):
        yield from ((f"layers.{layer}.{name}", "BF16", shape) for name, shape in shapes.items())


def deepseek_v3() -> Iterator[Tensor]:
    """The 256 experts of each of 58 layers of DeepSeek-V3, in FP8 with scales of blocks of 128."""
    for layer in range(58):
        for expert in range(256):
            for name, shape in {"gate": [2048, 7168], "up": [2048, 7168], "down": [7168, 2048]}.items():
                yield f"layers.{layer}.experts.{expert}.{name}", "F8_E4M3", shape
                yield f"layers.{layer}.experts.{expert}.{name}.scale", "F32", [count // 128 for count in shape]


def main() -> None:
    for make in (llama_70b, deepseek_v3):
        with TemporaryDirectory(dir=".") as folder:
            tensors = list(make())
            stored, read = write(Path(folder), tensors)
            began = time.perf_counter()
            digest = checkpoint_sha256(TargetFolder(folder, None, None, None, "", "", ""))
            seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{make.__name__}: {len(tensors):,} tensors, {stored / 1e9:,.0f} GB stored, {read / 1e6:,.0f} MB read, "
                f"{seconds:.1f} s, peak {peak:,.0f} MB, {digest}"
            )


def write(folder: Path, tensors: list[Tensor], shards: int = 30) -> tuple[int, int]:
    """Sparse shards of the tensors; bytes they state, and bytes that an identity reads of them."""
    places, stored, read = {}, 0, 0
    for shard in range(shards):
        name, header, end = f"part-{shard}.safetensors", {}, 0
        for tensor, dtype, shape in tensors[shard::shards]:
            start, count = end, BYTES[dtype]
            for length in shape:
                count *= length
            end += count
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            places[tensor] = name
            read += count if count < WHOLE_BELOW_BYTES else BLOCKS * BLOCK_BYTES
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        stored += end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return stored, read


if __name__ == "__main__":
    main()
