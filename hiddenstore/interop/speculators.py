"""A store as the offline data that speculators 0.9 trains on (``speculators train --data-path OUT``).

Layout, read from ``speculators.train.data.ArrowDataset`` and ``hs_connectors.FileTransfer`` of release 0.9.0:

* ``OUT/`` is a ``datasets`` folder (``save_to_disk``, torch format) with one row per sample: ``input_ids`` int64 [T],
  ``loss_mask`` int64 [T], ``seq_len``.
* ``OUT/hidden_states/hs_<row>.safetensors`` holds ``token_ids`` int64 [T] and ``hidden_states`` bf16 [T, L+1, D]: the
  aux layers ascending, then the final hidden before its norm at every token (speculators norms it itself).
* The split is by position, ``int(rows * train_data_ratio)`` rows first, so training samples are written first.

Shapes: T tokens, L aux layers, D target width.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from hiddenstore.errors import ConfigError, ConflictError, FormatError, StorageError
from hiddenstore.fs import storage_error
from hiddenstore.identity import target_word
from hiddenstore.records import Record
from hiddenstore.store import Store
from schemas.layers import to_convention

STATES_FOLDER = "hidden_states"
ABOUT_FILE = "hiddenstore.json"

MissingFinal = Literal["refuse", "zeros"]


@dataclass(frozen=True)
class ExportedData:
    """What was written. ``layer_ids`` in speculators' convention; ``zero_rows`` final rows the store does not hold."""

    path: Path
    samples: int
    validation_samples: int
    tokens: int
    bytes: int
    layer_ids: list[int]
    train_data_ratio: float
    zero_rows: int

    @property
    def train_command(self) -> list[str]:
        """The peer's command that trains on it without a server."""
        return [
            *("speculators", "train", "--data-path", str(self.path)),
            *("--target-layer-ids", *(str(i) for i in self.layer_ids)),
            *("--train-data-ratio", f"{self.train_data_ratio:.6f}", "--on-missing", "raise"),
        ]


def export_speculators(
    store: Store,
    out: Path,
    *,
    layers: Sequence[int] | None = None,
    missing_final: MissingFinal = "refuse",
    on_sample: Callable[[int], None] | None = None,
) -> ExportedData:
    """Write every sample of a store; the folder appears under its name only when it is complete.

    ``missing_final="zeros"`` accepts a store with ``final: supervised`` and writes zero rows where it holds none.
    speculators' losses are gated by the loss mask and never read them, but a trainer that does not gate would learn
    from zeros, so it has to be asked for. ``on_sample`` is called with the tokens of each sample written.

    Raises:
        FormatError: the store holds no pre-norm final hidden, or not at every token.
        ConfigError: the store is empty, or lacks an asked layer.
        ConflictError: ``out`` exists.
        StorageError: no room, or the disk refused.
    """
    chosen = _chosen_layers(store, layers)
    _require_final(store, missing_final)
    rows = _training_first(store)
    validation = sum(1 for _, split in rows if split == "validation")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConflictError(f"{out} exists and is not empty", kind="out-exists", hint="give another -o folder")
    expected = (
        sum(entry.tokens for _, entry in store.entries) * (len(chosen) + 1) * store.capture.target.hidden_size * 2
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    _require_room(out.parent, expected)
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        tokens, zero_rows = _write(store, partial, [sample_id for sample_id, _ in rows], chosen, on_sample)
        report = ExportedData(
            path=out,
            samples=len(rows),
            validation_samples=validation,
            tokens=tokens,
            bytes=0,
            layer_ids=to_convention(chosen, "vllm"),
            train_data_ratio=_ratio(len(rows), validation),
            zero_rows=zero_rows,
        )
        _write_about(store, partial, report)
        report = replace(report, bytes=sum(file.stat().st_size for file in partial.rglob("*") if file.is_file()))
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise storage_error(error, str(out)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _rows_file(partial).unlink(missing_ok=True)
    return report


def _write(
    store: Store, folder: Path, ids: Sequence[str], layers: Sequence[int], on_sample: Callable[[int], None] | None
) -> tuple[int, int]:
    """Write the rows and state files; returns tokens and final rows that are zero for want of data."""
    from datasets import Dataset, Features, Value
    from datasets import Sequence as ListOf
    from datasets.arrow_writer import ArrowWriter

    states = folder / STATES_FOLDER
    states.mkdir(parents=True)
    # Outside the folder: `datasets` refuses to save a dataset over the file it reads.
    rows_file = _rows_file(folder)
    features = Features(
        {"input_ids": ListOf(Value("int64")), "loss_mask": ListOf(Value("int64")), "seq_len": Value("int64")}
    )
    tokens = zero_rows = 0
    with ArrowWriter(features=features, path=str(rows_file), writer_batch_size=500) as writer:
        for row, sample_id in enumerate(ids):
            record = store.read(sample_id, layers=layers)
            sample = record.sample
            save_file(_tensors(record), states / f"hs_{row}.safetensors")
            writer.write(
                {
                    "input_ids": sample.input_ids.astype("int64"),
                    "loss_mask": sample.loss_mask.astype("int64"),
                    "seq_len": sample.tokens,
                }
            )
            tokens += sample.tokens
            zero_rows += sample.tokens - len(record.final_rows)
            if on_sample:
                on_sample(sample.tokens)
        writer.finalize()
    _save_quietly(Dataset.from_file(str(rows_file)).with_format("torch"), folder)
    return tokens, zero_rows


def _rows_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.rows.arrow")


def _tensors(record: Record) -> dict[str, torch.Tensor]:
    """``token_ids`` int64 [T] and ``hidden_states`` bf16 [T, L+1, D] of one record."""
    layers, tokens, width = record.aux.shape
    states = torch.zeros(tokens, layers + 1, width, dtype=torch.bfloat16)
    states[:, :-1] = record.aux.transpose(0, 1)
    states[torch.from_numpy(record.final_rows.astype("int64")), -1] = record.final
    return {"hidden_states": states, "token_ids": torch.from_numpy(record.sample.input_ids.astype("int64"))}


def _save_quietly(dataset: object, folder: Path) -> None:
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silent = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        dataset.save_to_disk(str(folder))  # type: ignore[attr-defined]
    finally:
        if not silent:
            enable_progress_bars()


def _write_about(store: Store, folder: Path, report: ExportedData) -> None:
    """Beside the peer's files, what they were made from."""
    about = {
        "from_store": Path(str(store.path)).name,
        "target": store.capture.target.model_dump(),
        "aux_hidden_state_layer_ids": report.layer_ids,
        "train_data_ratio": report.train_data_ratio,
        "samples": report.samples,
        "validation_samples": report.validation_samples,
        "final_rows_of_zeros": report.zero_rows,
        "codecs": store.capture.codecs.model_dump(),
    }
    (folder / ABOUT_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _chosen_layers(store: Store, layers: Sequence[int] | None) -> list[int]:
    held = store.capture.aux_layers
    chosen = sorted(set(held if layers is None else layers))
    missing = [layer for layer in chosen if layer not in held]
    if missing:
        raise ConfigError(
            f"{store.path} holds layers {list(held)}, not {missing}",
            kind="layers-missing",
            hint=f"--layers {','.join(str(layer) for layer in held)}",
        )
    if not chosen:
        raise FormatError(f"{store.path} holds no aux layers; speculators needs some", kind="aux-missing")
    return chosen


def _require_final(store: Store, missing_final: MissingFinal) -> None:
    capture = store.capture
    if capture.final_norm != "pre_norm" and capture.final != "none":
        raise FormatError(
            f"{store.path} holds post-norm final hiddens; speculators norms them itself and needs them pre-norm",
            kind="final-norm",
        )
    absent = not capture.holds_final_hidden
    if absent or (capture.final == "supervised" and missing_final == "refuse"):
        held = "the final hidden only around supervised tokens"
        if absent:
            held = "no final hidden" + (", only the target's top tokens in its place" if capture.holds_topk else "")
        layers, target = ",".join(str(layer) for layer in capture.aux_layers), target_word(capture.target)
        raise FormatError(
            f"{store.path} holds {held}; speculators reads it at every token",
            kind="final-missing",
            hint=f"hiddenstore collect DATA -o STORE --target {target} --layers {layers} --final all",
        )


def _training_first(store: Store) -> list[tuple[str, str]]:
    rows = [(entry.id, entry.split) for _, entry in store.entries]
    if not rows:
        raise ConfigError(f"{store.path} holds no samples", kind="store-empty")
    return sorted(rows, key=lambda row: row[1] == "validation")


def _ratio(samples: int, validation: int) -> float:
    """A ratio for which speculators' ``int(samples * ratio)`` is exactly the number of training samples."""
    return 1.0 if not validation else (samples - validation + 0.5) / samples


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"{os.fspath(folder)} has {free / 1e9:.2f} GB free, the export needs {needed / 1e9:.2f} GB",
            kind="disk-full",
        )
