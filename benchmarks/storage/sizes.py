"""Stored bytes a token: every recipe with and without unsupervised final rows, beside bf16 files and fp8 a token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.storage.ours import write_store
from benchmarks.storage.states import LAYERS, RawStates, layer_statistics
from hiddenstore.codecs import RECIPES
from hiddenstore.store import Store


def recipe_sizes(raw: RawStates, folder: Path, count: int) -> list[dict[str, Any]]:
    """Bytes a token of the first ``count`` samples as one unit of each recipe, everything on disk counted."""
    lengths, rows = raw.lengths[:count], []
    tokens = sum(lengths)

    def samples() -> Iterator[np.ndarray]:
        return (raw.sample(index) for index in range(count))

    for recipe in RECIPES:
        row: dict[str, Any] = {"recipe": recipe, "tokens": tokens}
        for final in ("all", "supervised"):
            store = write_store(folder / f"{recipe}-{final}", recipe, samples, lengths, raw.width, final)  # type: ignore[arg-type]
            row[f"final_{final}"] = sum(record.bytes_stored for record in store.commits()) / tokens
        rows.append(row)
    return rows


def peer_sizes(raw: RawStates, folder: Path) -> dict[str, float]:
    """Bytes a token of one ``torch.save`` file of bf16, and of fp8 E4M3 with one fp32 scale a token."""
    states = torch.from_numpy(raw.sample(0)).view(torch.bfloat16)
    tokens = states.shape[1]
    ids = torch.zeros(tokens, dtype=torch.int64)
    scale = states.float().abs().amax(dim=2, keepdim=True) / 448
    codes = (states.float() / scale).to(torch.float8_e4m3fn)
    found = {}
    for name, held in (
        ("pt bf16 per sample", {"hidden_states": states}),
        ("fp8 per token", {"codes": codes, "scale": scale}),
    ):
        path = folder / "one.pt"
        torch.save({**held, "input_ids": ids, "loss_mask": ids}, path)
        found[name] = path.stat().st_size / tokens
        path.unlink()
    return found


def store_sizes(location: Path) -> dict[str, Any]:
    """What a store of genuine states takes, and the statistics of its layers over up to 4,096 tokens."""
    store = Store.open(location)
    records = store.commits()
    tokens = sum(record.tokens for record in records)
    stored = sum(record.bytes_stored for record in records)
    width, layers = store.capture.target.hidden_size, len(store.capture.aux_layers) + 1
    picked, seen = [], 0
    for sample_id in store.sample_ids:
        picked.append(store.read(sample_id, final=False).aux)
        seen += picked[-1].shape[1]
        if seen >= 4096:
            break
    aux = torch.cat(picked, dim=1)
    return {
        "target": location.name.removesuffix(f"-{store.manifest.recipe}"),
        "recipe": store.manifest.recipe,
        "width": width,
        "supervised": sum(entry.supervised for _, entry in store.entries) / tokens,
        "bytes_per_token": stored / tokens,
        "bf16_bytes_per_token": layers * width * 2,
        "layers": {name: layer_statistics(layer) for name, layer in zip(store.capture.aux_fields, aux, strict=True)},
    }


def synthetic_statistics(raw: RawStates) -> dict[str, Any]:
    """The same statistics of the synthetic data, over its first 4,096 tokens or fewer."""
    count = max(1, int(np.searchsorted(np.cumsum(raw.lengths), 4096)))
    states = torch.from_numpy(np.concatenate([raw.sample(index) for index in range(count)], axis=1))
    layers = states.view(torch.bfloat16)
    return {f"layer {k}": layer_statistics(layers[k]) for k in range(LAYERS)}
