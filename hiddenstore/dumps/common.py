"""What every export of a store's samples to another project shares: what it may hold, where it goes, when it appears.

Shapes: T tokens of a sample, L aux layers, D target width.
"""

import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hiddenstore.errors import ConfigError, FormatError, Kind, StorageError
from hiddenstore.fs.publish import make_folder, new_folder, refuse_existing_folder
from hiddenstore.inputs import TURNS
from hiddenstore.records import WITHOUT_IMAGES, Record, Sample
from hiddenstore.store import Store
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.identity import target_argument, target_words
from schemas.capture import NormState
from schemas.layers import LayerConvention, to_convention

ABOUT_FILE = "hiddenstore.json"
SAMPLES_FILE = "hiddenstore-samples.parquet"
"""What a peer's files cannot say of the samples: columns sample_id, spans, split. An import of the export reads it."""

MissingFinal = Literal["refuse", "zeros"]

_SAMPLES = pa.schema([("sample_id", pa.string()), ("spans", TURNS), ("split", pa.string())])


@dataclass(frozen=True, eq=False)
class ExportedSample:
    """One sample as a peer's writer gets it: aux bf16 [L, T, D], layers ascending; final bf16 [T, D], None without."""

    sample: Sample
    aux: Tensor
    final: Tensor | None


@dataclass(frozen=True)
class ExportScope:
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

    ``layer_count``: how many layers it insists on. ``name`` is also the import's. Without ``holds_states`` the peer
    reads the states from the store itself, and the writer gets none. ``masks_by``: without which word its trainer takes
    its loss at every token, where it does. Without ``is_in_order`` it reads files in an order of its own, all of them.
    """

    name: str
    numbering: LayerConvention
    final: NormState | None
    writer: Callable[[Path, ExportScope], SampleWriter]
    layer_count: int | None = None
    holds_states: bool = True
    masks_by: str = ""
    is_in_order: bool = True


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


def export_samples(
    store: Store,
    out: Path,
    layout: PeerLayout,
    layers: Sequence[int] | None = None,
    missing_final: MissingFinal = "refuse",
    on_sample: Callable[[int], None] | None = None,
) -> ExportedData:
    """Write every sample of a store; the folder appears under its name only when it is complete.

    ``layers`` None is every layer held. ``missing_final`` ``zeros`` writes zero rows where the store holds none: a peer
    whose loss is gated by the mask never reads those, one that does not gate would learn from them, so it has to be
    asked for. ``on_sample`` is called with the tokens of each sample written. Raises FormatError: the store does not
    hold the final hidden that the peer reads, or only after the norm; ConfigError: the store is empty, or lacks a
    layer; ConflictError: ``out`` exists; StorageError: no room, or the disk refused."""
    samples = PeerSamples(store, layout, layers, missing_final)
    picked = samples.layers
    entries = [entry for _, entry in store.entries]
    rows = sorted(((entry.id, entry.split) for entry in entries), key=lambda row: row[1] == "validation")
    if not rows:
        raise ConfigError(f"{store.path} holds no samples", kind=Kind.STORE_EMPTY)
    refuse_existing_folder(out)
    target, tokens = store.capture.target, sum(entry.tokens for entry in entries)
    make_folder(out.parent)
    if layout.holds_states:
        _require_room(out.parent, tokens * (len(picked) + (layout.final is not None)) * target.hidden_size * 2)
    validation = sum(split == "validation" for _, split in rows)
    scope = ExportScope(target_argument(target), target.hidden_size, tuple(picked), len(rows), validation)
    with new_folder(out) as folder:
        zero_rows = _write(samples, folder, scope, rows, on_sample)
        report = ExportedData(
            path=out,
            layout=layout.name,
            samples=len(rows),
            validation_samples=validation,
            tokens=tokens,
            bytes=0,
            layers=picked,
            layer_ids=to_convention(picked, layout.numbering),
            # int(samples * ratio) is then exactly the number of training samples.
            train_data_ratio=(len(rows) - validation + 0.5) / len(rows) if validation else 1.0,
            zero_rows=zero_rows,
            normed=samples.normed,
        )
        _write_about(store, folder, report)
        return replace(report, bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))


class PeerSamples:
    """A store's samples as a peer reads them. ``layers``: those it gets, in our numbers; ``normed``: the target's final
    norm is applied on the way out. Raises as ``export_samples``."""

    def __init__(
        self,
        store: Store,
        layout: PeerLayout,
        layers: Sequence[int] | None = None,
        missing_final: MissingFinal = "refuse",
    ) -> None:
        self._store, self.layout = store, layout
        self.layers = _layers_to_write(store, layout, layers)
        self.normed = _require_final(store, layout, self.layers, missing_final)
        self._head = store.head() if self.normed else None

    def tokens_of(self, sample_id: str) -> ExportedSample:
        """A sample without its states: aux [0, T, D]."""
        sample = self._store.sample(sample_id)
        return ExportedSample(sample, torch.zeros((0, sample.tokens, self._store.capture.target.hidden_size)), None)

    def read(self, sample_id: str) -> tuple[ExportedSample, int]:
        """A sample, and how many rows of its final hidden are zero for want of data."""
        has_final = self.layout.final is not None
        record = self._store.read(sample_id, layers=self.layers, final=has_final)
        if not has_final:
            return ExportedSample(record.sample, record.aux, None), 0
        missing = record.sample.tokens - len(record.final_rows)
        return ExportedSample(record.sample, record.aux, _every_row(record, self._head)), missing


def _write(
    samples: PeerSamples,
    folder: Path,
    scope: ExportScope,
    rows: Sequence[tuple[str, str]],
    on_sample: Callable[[int], None] | None,
) -> int:
    """Write every sample; returns how many final rows are zero for want of data."""
    writer = samples.layout.writer(folder, scope)
    listed: list[dict[str, object]] = []
    zero_rows, complete = 0, False
    try:
        for row, (name, split) in enumerate(rows):
            exported, zeros = samples.read(name) if samples.layout.holds_states else (samples.tokens_of(name), 0)
            writer.write(row, exported)
            turns = [{"role": int(r), "start": int(a), "end": int(b)} for r, a, b in exported.sample.spans]
            listed.append({"sample_id": name, "spans": turns, "split": split})
            zero_rows += zeros
            if on_sample:
                on_sample(exported.sample.tokens)
        complete = True
    finally:
        writer.close(complete)
    pq.write_table(pa.Table.from_pylist(listed, schema=_SAMPLES), folder / SAMPLES_FILE, compression="zstd")
    return zero_rows


def _every_row(record: Record, head: HeadBundle | None) -> Tensor:
    """The final hidden [T, D], zero where the store holds none; ``head`` applies the final norm."""
    final = record.final if head is None else head.norm(record.final).to(torch.bfloat16)
    rows = torch.zeros((record.sample.tokens, record.aux.shape[-1]), dtype=torch.bfloat16)
    rows[torch.from_numpy(record.final_rows.astype("int64"))] = final
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


def _layers_to_write(store: Store, layout: PeerLayout, layers: Sequence[int] | None) -> list[int]:
    if store.capture.images is not None:
        problem = f"samples of {store.path} hold images, for which {layout.name} has no place"
        raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint=WITHOUT_IMAGES)
    stored = list(store.capture.aux_layers)
    picked = sorted(set(stored if layers is None else layers))
    missing = [layer for layer in picked if layer not in stored]
    if missing:
        hint = f"--layers {','.join(map(str, stored))}"
        raise ConfigError(f"{store.path} holds layers {stored}, not {missing}", kind=Kind.LAYER_MISSING, hint=hint)
    if not picked:
        raise FormatError(f"{store.path} holds no aux layers; {layout.name} needs some", kind=Kind.AUX_MISSING)
    if layout.layer_count not in (None, len(picked)):
        raise ConfigError(
            f"{layout.name} reads exactly {layout.layer_count} layers, not {len(picked)}: {picked}",
            kind=Kind.LAYERS_INVALID,
            hint=f"choose {layout.layer_count} of them: --layers {','.join(map(str, picked[: layout.layer_count]))}",
        )
    return picked


def _require_final(store: Store, layout: PeerLayout, layers: Sequence[int], missing_final: MissingFinal) -> bool:
    """Whether the final norm has to be applied on the way out; raises where the store cannot give what is read."""
    capture = store.capture
    if layout.final is None:
        return False
    absent = not capture.holds_final_hidden
    if absent or (capture.final == "supervised" and missing_final == "refuse"):
        what, way_out = "the final hidden only around supervised tokens", ""
        if absent:
            what = "no final hidden" + (", only the target's top tokens in its place" if capture.holds_topk else "")
        else:
            alone = f", as this one does where it is alone {layout.masks_by}" if layout.masks_by else ""
            way_out = f"; --missing-final zeros is right for a trainer that masks its loss{alone}"
        named, target = ",".join(map(str, layers)), shlex.join(target_words(capture.target))
        raise FormatError(
            f"{store.path} holds {what}; {layout.name} reads it at every token{way_out}",
            kind=Kind.FINAL_MISSING,
            hint=f"hiddenstore collect DATA -o STORE {target} --layers {named} --final all",
        )
    if layout.final == "pre_norm" and capture.final_norm == "post_norm":
        raise FormatError(
            f"{store.path} holds post-norm final hiddens; {layout.name} norms them itself and needs them pre-norm, and "
            "a norm cannot be undone",
            kind=Kind.FINAL_NORM,
        )
    return layout.final != capture.final_norm


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"{folder} has {free / 1e9:.2f} GB free, the export needs {needed / 1e9:.2f} GB", kind=Kind.DISK_FULL
        )


def write_torch_file(path: Path, entries: Mapping[str, Tensor | str]) -> None:
    """A dict of tensors and texts, which ``torch.load(weights_only=True)`` reads back."""
    # A view would bring the memory it looks into.
    apart = {k: value.contiguous().clone() if isinstance(value, Tensor) else value for k, value in entries.items()}
    # Of a full disk torch's own writer says that it is at an unexpected position.
    data = BytesIO()
    torch.save(apart, data)
    path.write_bytes(data.getbuffer())
