"""What every export of a store's samples to another project shares: what it may hold, where it goes, when it appears.

Shapes: T tokens of a sample, L aux layers, D target width.
"""

import json
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hiddenstore.errors import ConfigError, ConflictError, FormatError, StorageError
from hiddenstore.fs import storage_error
from hiddenstore.head import HeadBundle
from hiddenstore.identity import target_word
from hiddenstore.records import Record, Sample
from hiddenstore.store import Store
from schemas.capture import NormState
from schemas.layers import LayerConvention, to_convention

ABOUT_FILE = "hiddenstore.json"
SAMPLES_FILE = "hiddenstore-samples.parquet"
"""What a peer's files cannot say of the samples: columns sample_id, spans, split. An import of the export reads it."""

MissingFinal = Literal["refuse", "zeros"]

_TURNS = pa.list_(pa.struct([("role", pa.int32()), ("start", pa.int32()), ("end", pa.int32())]))
_SAMPLES = pa.schema([("sample_id", pa.string()), ("spans", _TURNS), ("split", pa.string())])


@dataclass(frozen=True, eq=False)
class ExportedSample:
    """One sample as a peer's writer gets it: aux bf16 [L, T, D], layers ascending; final bf16 [T, D], None without."""

    sample: Sample
    aux: Tensor
    final: Tensor | None


@dataclass(frozen=True)
class ExportPlan:
    """What a writer needs to know of all samples. ``layers`` in our numbers; ``samples`` in all, training first."""

    target: str
    width: int
    layers: tuple[int, ...]
    samples: int
    validation_samples: int


class SampleWriter(Protocol):
    """Writes the peer's files of one export, row by row."""

    def write(self, row: int, exported: ExportedSample) -> None: ...

    def close(self, complete: bool) -> None:
        """Let go of open files; ``complete``: every sample was written, so finish them."""
        ...


@dataclass(frozen=True)
class PeerLayout:
    """What a peer reads: ``final`` is the norm state it takes the final hidden in, None when it reads none.

    ``layer_count``: how many layers it insists on. ``name`` is also the import's.
    """

    name: str
    numbering: LayerConvention
    final: NormState | None
    writer: Callable[[Path, ExportPlan], SampleWriter]
    layer_count: int | None = None


@dataclass(frozen=True)
class ExportedData:
    """What was written. ``layer_ids`` as the peer counts; ``zero_rows`` final rows the store does not hold; ``normed``:
    the target's final norm was applied; ``train_data_ratio`` cuts the training samples off a list in order."""

    path: Path
    layout: str
    samples: int
    validation_samples: int
    tokens: int
    bytes: int
    layers: list[int]
    layer_ids: list[int]
    train_data_ratio: float
    zero_rows: int
    normed: bool


@dataclass(frozen=True)
class ExportOptions:
    """``layers`` None is every layer held. ``missing_final`` ``zeros`` writes zero rows where the store holds none.

    A peer whose loss is gated by the mask never reads those; one that does not gate would learn from zeros, so it has
    to be asked for.
    """

    layers: Sequence[int] | None = None
    missing_final: MissingFinal = "refuse"


def export_samples(
    store: Store,
    out: Path,
    layout: PeerLayout,
    options: ExportOptions | None = None,
    on_sample: Callable[[int], None] | None = None,
) -> ExportedData:
    """Write every sample of a store; the folder appears under its name only when it is complete.

    ``on_sample`` is called with the tokens of each sample written.

    Raises:
        FormatError: the store does not hold the final hidden that the peer reads, or only after the norm.
        ConfigError: the store is empty, or lacks an asked layer.
        ConflictError: ``out`` exists.
        StorageError: no room, or the disk refused.
    """
    options = options or ExportOptions()
    layers = _chosen_layers(store, layout, options.layers)
    normed = _require_final(store, layout, layers, options.missing_final)
    rows = _training_first(store)
    validation = sum(1 for _, split in rows if split == "validation")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConflictError(f"{out} exists and is not empty", kind="out-exists", hint="give another -o folder")
    target = store.capture.target
    held = len(layers) + (layout.final is not None)
    out.parent.mkdir(parents=True, exist_ok=True)
    _require_room(out.parent, sum(entry.tokens for _, entry in store.entries) * held * target.hidden_size * 2)
    plan = ExportPlan(target_word(target), target.hidden_size, tuple(layers), len(rows), validation)
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        partial.mkdir()
        report = ExportedData(
            path=out,
            layout=layout.name,
            samples=len(rows),
            validation_samples=validation,
            tokens=sum(entry.tokens for _, entry in store.entries),
            bytes=0,
            layers=layers,
            layer_ids=to_convention(layers, layout.numbering),
            train_data_ratio=train_data_ratio(len(rows), validation),
            zero_rows=0,
            normed=normed,
        )
        report = replace(report, zero_rows=_write(store, partial, layout, plan, on_sample, normed))
        _write_about(store, partial, report)
        report = replace(report, bytes=sum(file.stat().st_size for file in partial.rglob("*") if file.is_file()))
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise storage_error(error, str(out)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def train_data_ratio(samples: int, validation: int) -> float:
    """A ratio for which ``int(samples * ratio)`` is exactly the number of training samples."""
    return 1.0 if not validation else (samples - validation + 0.5) / samples


def _write(
    store: Store,
    folder: Path,
    layout: PeerLayout,
    plan: ExportPlan,
    on_sample: Callable[[int], None] | None,
    normed: bool,
) -> int:
    """Write every sample; returns how many final rows are zero for want of data."""
    head = HeadBundle.load(store) if normed else None
    writer = layout.writer(folder, plan)
    listed: list[dict[str, object]] = []
    zero_rows, complete = 0, False
    try:
        for row, (name, split) in enumerate(_training_first(store)):
            record = store.read(name, layers=plan.layers, final=layout.final is not None)
            final = None if layout.final is None else _every_row(record, head)
            writer.write(row, ExportedSample(record.sample, record.aux, final))
            turns = [{"role": int(r), "start": int(a), "end": int(b)} for r, a, b in record.sample.spans]
            listed.append({"sample_id": name, "spans": turns, "split": split})
            zero_rows += 0 if final is None else record.sample.tokens - len(record.final_rows)
            if on_sample:
                on_sample(record.sample.tokens)
        complete = True
    finally:
        writer.close(complete)
    pq.write_table(pa.Table.from_pylist(listed, schema=_SAMPLES), folder / SAMPLES_FILE, compression="zstd")
    return zero_rows


def _every_row(record: Record, head: HeadBundle | None) -> Tensor:
    """The final hidden [T, D], zero where the store holds none; ``head`` applies the final norm."""
    held = record.final if head is None else head.norm(record.final).to(torch.bfloat16)
    rows = torch.zeros((record.sample.tokens, record.aux.shape[-1]), dtype=torch.bfloat16)
    rows[torch.from_numpy(record.final_rows.astype("int64"))] = held
    return rows


def _write_about(store: Store, folder: Path, report: ExportedData) -> None:
    """Beside the peer's files, what they were made from."""
    about = {
        "schema": "hiddenstore.exported-data/1",
        "layout": report.layout,
        "from_store": Path(str(store.path)).name,
        "target": store.capture.target.model_dump(),
        "layers": report.layers,
        "aux_hidden_state_layer_ids": report.layer_ids,
        "train_data_ratio": report.train_data_ratio,
        "samples": report.samples,
        "validation_samples": report.validation_samples,
        "final_rows_of_zeros": report.zero_rows,
        "final_norm_applied": report.normed,
        "codecs": store.capture.codecs.model_dump(),
    }
    (folder / ABOUT_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _chosen_layers(store: Store, layout: PeerLayout, layers: Sequence[int] | None) -> list[int]:
    held = store.capture.aux_layers
    chosen = sorted(set(held if layers is None else layers))
    listed = ",".join(str(layer) for layer in held)
    missing = [layer for layer in chosen if layer not in held]
    if missing:
        raise ConfigError(
            f"{store.path} holds layers {list(held)}, not {missing}", kind="layers-missing", hint=f"--layers {listed}"
        )
    if not chosen:
        raise FormatError(f"{store.path} holds no aux layers; {layout.name} needs some", kind="aux-missing")
    if layout.layer_count not in (None, len(chosen)):
        raise ConfigError(
            f"{layout.name} reads exactly {layout.layer_count} layers, not {len(chosen)}: {chosen}",
            kind="layers-count",
            hint=f"choose {layout.layer_count} of them: --layers {','.join(map(str, chosen[: layout.layer_count]))}",
        )
    return chosen


def _require_final(store: Store, layout: PeerLayout, layers: Sequence[int], missing_final: MissingFinal) -> bool:
    """Whether the final norm has to be applied on the way out; raises where the store cannot give what is read."""
    capture = store.capture
    if layout.final is None:
        return False
    absent = not capture.holds_final_hidden
    if absent or (capture.final == "supervised" and missing_final == "refuse"):
        held = "the final hidden only around supervised tokens"
        if absent:
            held = "no final hidden" + (", only the target's top tokens in its place" if capture.holds_topk else "")
        named, target = ",".join(map(str, layers)), target_word(capture.target)
        raise FormatError(
            f"{store.path} holds {held}; {layout.name} reads it at every token"
            + ("" if absent else "; --missing-final zeros is right for a trainer that masks its loss"),
            kind="final-missing",
            hint=f"hiddenstore collect DATA -o STORE --target {target} --layers {named} --final all",
        )
    if layout.final == "pre_norm" and capture.final_norm == "post_norm":
        raise FormatError(
            f"{store.path} holds post-norm final hiddens; {layout.name} norms them itself and needs them pre-norm, and "
            "a norm cannot be undone",
            kind="final-norm",
        )
    return layout.final != capture.final_norm


def _training_first(store: Store) -> list[tuple[str, str]]:
    rows = [(entry.id, entry.split) for _, entry in store.entries]
    if not rows:
        raise ConfigError(f"{store.path} holds no samples", kind="store-empty")
    return sorted(rows, key=lambda row: row[1] == "validation")


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"{folder} has {free / 1e9:.2f} GB free, the export needs {needed / 1e9:.2f} GB", kind="disk-full"
        )
