"""Dumps of every format in the documented keys, written plainly from one forward of a tiny target; no code of ours.

Shapes: N layers, T tokens, D width.
"""

import gzip
import io
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.collectors.tiny import VOCAB, WIDTH, tiny_model


@dataclass(frozen=True, eq=False)
class Spoken:
    """One conversation: ids and mask int64 [T], states bf16 [N+1, T, D] of layers -1 …, normed bf16 [T, D]."""

    ids: Tensor
    mask: Tensor
    states: Tensor
    normed: Tensor

    def columns(self, layers: Sequence[int]) -> Tensor:
        """Layers side by side, [T, C·D]."""
        return torch.cat([self.states[layer + 1] for layer in layers], dim=-1)


def speak(count: int, seed: int = 0, family: str = "llama") -> list[Spoken]:
    """Random conversations and what ``output_hidden_states`` and a hook on the last block say of them, in bf16.

    Ids are never 0 and end supervised, as an answer ends in its end token.
    """
    model = tiny_model(family, dtype=torch.bfloat16)
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        tokens = int(rng.integers(12, 40))
        answer = int(rng.integers(3, tokens - 3))
        ids = torch.from_numpy(rng.integers(1, VOCAB, tokens))
        mask = torch.from_numpy((np.arange(tokens) >= answer).astype(np.int64))
        last: list[Tensor] = []
        handle = model.model.norm.register_forward_pre_hook(lambda _m, args, kept=last: kept.append(args[0][0]))
        with torch.no_grad():
            out = model(input_ids=ids[None], output_hidden_states=True).hidden_states
        handle.remove()
        states = torch.stack([*(layer[0] for layer in out[:-1]), last[0]])
        found.append(Spoken(ids, mask, states, out[-1][0]))
    return found


def saved(path: Path, content: object) -> None:
    """``torch.save``, gzipped when the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(gzip.compress(buffer.getvalue()) if path.suffix == ".gz" else buffer.getvalue())


def padded(rows: Tensor, length: int, fill: float = 0.0) -> Tensor:
    """Rows [T, …] and then ``fill`` up to ``length``."""
    more = torch.full((length - len(rows), *rows.shape[1:]), fill, dtype=rows.dtype)
    return torch.cat([rows, more])


def specforge(
    folder: Path, spoken: list[Spoken], layers: Sequence[int], suffix: str = ".ckpt", strategy: str = "eagle3"
) -> None:
    """Batches of 4, padded to the longest; padding has run through the engine, so its states are no zeros."""
    for first in range(0, len(spoken), 4):
        batch = spoken[first : first + 4]
        longest = max(len(one.ids) for one in batch)
        for index, one in enumerate(batch):
            entry = {
                "input_ids": padded(one.ids, longest),
                "loss_mask": padded(one.mask, longest),
                **_strategy(one, layers, longest, strategy),
            }
            saved(folder / "rows_0-2000" / f"data_{first + index}{suffix}", entry)


def _strategy(one: Spoken, layers: Sequence[int], longest: int, strategy: str) -> dict[str, Tensor]:
    aux, final = padded(one.columns(layers), longest, 0.5)[None], padded(one.normed, longest, 0.5)[None]
    if strategy == "eagle3":
        return {"aux_hidden_state": aux, "hidden_state": final}
    return {"hidden_states": aux} | ({"target_last_hidden_states": final} if strategy == "dspark" else {})


def vllm_extract(
    folder: Path, spoken: list[Spoken], layers: Sequence[int], names: Callable[[int], str] = "req-{}".format
) -> None:
    """One file a request: [T, C+1, D], the last slot before the norm."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, one in enumerate(spoken):
        states = torch.stack([one.states[layer + 1] for layer in layers] + [one.states[-1]], dim=1)
        save_file({"token_ids": one.ids, "hidden_states": states}, folder / f"{names(index)}.safetensors")


def speculators(folder: Path, spoken: list[Spoken], layers: Sequence[int]) -> None:
    """A ``datasets`` folder with the connector's files beside it."""
    from datasets import Dataset

    rows = {
        "input_ids": [one.ids.tolist() for one in spoken],
        "loss_mask": [one.mask.tolist() for one in spoken],
        "seq_len": [len(one.ids) for one in spoken],
    }
    Dataset.from_dict(rows).save_to_disk(str(folder))
    vllm_extract(folder / "hidden_states", spoken, layers, "hs_{}".format)


def modelopt(folder: Path, spoken: list[Spoken], layers: Sequence[int], post: bool = True, **more: object) -> None:
    """``<conversation_id>.pt``; ``more`` entries go into every file."""
    for index, one in enumerate(spoken):
        entry = {
            "input_ids": one.ids,
            "hidden_states": one.normed if post else one.states[-1],
            "aux_hidden_states": one.columns(layers),
            "conversation_id": f"c{index}",
            "loss_mask": one.mask,
        }
        saved(folder / f"c{index}.pt", entry | more)


def trtllm_raw(folder: Path, spoken: list[Spoken], layers: Sequence[int]) -> None:
    """Lists of one or two requests; the counter starts anywhere."""
    entries = [
        {"id": index, "input_ids": one.ids, "hidden_state": one.normed, "aux_hidden_states": one.columns(layers)}
        for index, one in enumerate(spoken)
    ]
    saved(folder / "data_2.pt", entries[:2])
    for index, entry in enumerate(entries[2:]):
        saved(folder / f"data_{index + 9}.pt", [entry])


def automodel(folder: Path, spoken: list[Spoken], layers: Sequence[int], kind: str, shard_size: int = 4) -> None:
    """Both caches: every sample padded to 48; the EAGLE-3 one shifted to the left by one before it is written."""
    folder.mkdir(parents=True, exist_ok=True)
    length = 48
    rows: list[dict[str, Tensor]] = []
    for one in spoken:
        ids, mask = padded(one.ids, length), padded(one.mask, length)
        row = {"attention_mask": padded(torch.ones_like(one.ids), length)}
        if kind == "eagle3":
            zero = torch.zeros(1, dtype=torch.long)
            row |= {"input_ids": torch.cat([ids[1:], zero]), "loss_mask": torch.cat([mask[1:], zero])}
            row |= {
                "aux_hidden_states": padded(one.columns(layers), length, 0.25),
                "position_mask": torch.ones(length, 1, dtype=torch.bool),
                "target_probs": torch.rand(length, 8).bfloat16(),
            }
        else:
            row |= {"input_ids": ids, "loss_mask": mask}
            row |= {
                "target_hidden_states": padded(one.columns(layers), length, 0.25),
                "target_last_hidden_states": padded(one.normed, length, 0.25),
            }
        rows.append(row)
    for first in range(0, len(rows), shard_size):
        shard = rows[first : first + shard_size]
        tensors = {name: torch.stack([row[name] for row in shard]).contiguous() for name in shard[0]}
        save_file(tensors, folder / f"shard-{first // shard_size:06d}.safetensors")
    named = (
        {"aux_layer_ids": list(layers)}
        if kind == "eagle3"
        else {"target_layer_ids": list(layers), "hidden_size": WIDTH}
    )
    manifest = {
        "format_version": 2 if kind == "eagle3" else 1,
        "target_model": "org/tiny",
        "target_vocab_size": VOCAB,
        "num_samples": len(rows),
        "shard_size": shard_size,
        **named,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    save_file({"weight": torch.zeros(VOCAB, 4)}, folder / "target_embeddings.safetensors")


def deepspec(folder: Path, spoken: list[Spoken], layers: Sequence[int], per_shard: int = 4) -> None:
    """Raw shards and a ``<QIIQQQQQ`` index."""
    folder.mkdir(parents=True, exist_ok=True)
    index, shards = b"", []
    for number, one in enumerate(spoken):
        shard = number // per_shard
        name = f"shard-{shard:05d}.bin"
        if len(shards) == shard:
            shards.append({"shard_id": shard, "file_name": name})
            (folder / name).write_bytes(b"")
        parts = [
            one.ids.to(torch.int32).numpy().tobytes(),
            bytes([1] * len(one.ids)),
            one.mask.to(torch.uint8).numpy().tobytes(),
            one.columns(layers).contiguous().view(torch.uint16).numpy().tobytes(),
            one.normed.contiguous().view(torch.uint16).numpy().tobytes(),
        ]
        start = (folder / name).stat().st_size
        offsets = [start + sum(map(len, parts[:k])) for k in range(5)]
        with (folder / name).open("ab") as file:
            file.write(b"".join(parts))
        index += struct.pack("<QIIQQQQQ", number, shard, len(one.ids), *offsets)
    (folder / "samples.idx").write_bytes(index)
    manifest = {
        "version": 2,
        "num_samples": len(spoken),
        "num_shards": len(shards),
        "target_layer_ids": list(layers),
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": WIDTH,
        "shards": shards,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def eagle1(folder: Path, spoken: list[Spoken]) -> None:
    """``data_<i>.ckpt`` in fp16."""
    for index, one in enumerate(spoken):
        saved(
            folder / f"data_{index}.ckpt",
            {"input_ids": one.ids, "hidden_state": one.normed.half(), "loss_mask": one.mask},
        )
