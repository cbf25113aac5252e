"""Small stores and prepared DATA folders for tests: random states, real files, equal seeds give equal bytes.

Shapes: T tokens, L aux layers, D width, R final rows, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save as save_tensors

from hiddenstore.codecs import CODECS, LAYOUTS
from hiddenstore.codecs.fitted import fit, is_unfitted
from hiddenstore.codecs.recipes import get_recipe, recipe_name
from hiddenstore.codecs.topk import with_top_tokens
from hiddenstore.files import layout
from hiddenstore.files.documents import seal, sha256_hex
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.inputs import PREPARED, PreparedInput, Unit, input_digest
from hiddenstore.records import Record, Sample, final_row_positions, sample_id
from hiddenstore.store import Store
from hiddenstore.targets.blocks import BLOCKS_FILE, TargetBlocks
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.rebuild import Rebuilder
from hiddenstore.writer import create_store, register_input, write_unit
from schemas.capture import CaptureSpec, Codecs, FinalMode, HeadSpec, TargetIdentity
from schemas.manifest import ROLES, Container, Engine, FileEntry
from schemas.prepared import PreparedData

VOCAB = 64
NUM_LAYERS = 8
UNIT_TOKENS = 64
ROWS_PER_FILE = 4
ENGINE = Engine(name="random", version="1")
HEAD = HeadSpec(norm_flavour="rms", norm_eps=1e-5, tied=False)


def capture_spec(
    layers: Sequence[int] = (1, 3), width: int = 32, codec: str = "q8", final: FinalMode = "supervised"
) -> CaptureSpec:
    """A capture of an imaginary 8-layer Llama with 64 tokens; ``codec`` of all fields it is for, or a recipe."""
    target = TargetIdentity(
        name="random",
        model_type="llama",
        hidden_size=width,
        num_layers=NUM_LAYERS,
        vocab_size=VOCAB,
        dtype="bfloat16",
        config_sha256="1" * 64,
        tokenizer_sha256="2" * 64,
        chat_template_sha256="3" * 64,
        weights_sha256="4" * 64,
    )
    return CaptureSpec(
        target=target,
        aux_layers=tuple(layers),
        final=final,
        final_norm="pre_norm",
        codecs=Codecs(aux=codec, final=codec if codec in LAYOUTS else "q8") if codec in CODECS else get_recipe(codec),
    )


def target_files(width: int = 32, seed: int = 0) -> dict[str, bytes]:
    """``target/``: a random untied head bundle and a config."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "embed_tokens": torch.randn(VOCAB, width, generator=generator).bfloat16(),
        "lm_head": torch.randn(VOCAB, width, generator=generator).bfloat16(),
        "norm_weight": torch.rand(width, generator=generator).add(0.5).bfloat16(),
    }
    return {layout.HEAD_NAME: save_tensors(tensors), "config.json": b'{"model_type":"llama"}\n'}


def rebuilding_files(capture: CaptureSpec, seed: int = 0) -> dict[str, bytes]:
    """``target/`` of a store of rebuilt states: besides the head the config of a random Llama, and its blocks."""
    from transformers import AutoModel, LlamaConfig

    width = capture.target.hidden_size
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = AutoModel.from_config(config).layers
    tensors = {
        f"{layer}.{name}": tensor.bfloat16()
        for layer in capture.blocks
        for name, tensor in blocks[layer].state_dict().items()
    }
    files = {"config.json": config.to_json_string(use_diff=False).encode(), BLOCKS_FILE: save_tensors(tensors)}
    return target_files(width, seed) | files


def make_samples(count: int, seed: int = 0) -> list[Sample]:
    """Conversations of one user and one supervised assistant turn, 8 to 40 tokens; every fifth is for validation."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        tokens = int(rng.integers(8, 41))
        answer = int(rng.integers(3, tokens - 2))
        input_ids = rng.integers(0, VOCAB, tokens).astype(np.int32)
        mask = (np.arange(tokens) >= answer).astype(np.uint8)
        spans = np.array([[ROLES.index("user"), 0, answer], [ROLES.index("assistant"), answer, tokens]], np.int32)
        split = "validation" if index % 5 == 4 else "train"
        samples.append(Sample(sample_id(input_ids, mask), input_ids, mask, spans, split, f"random.jsonl:{index + 1}"))
    return samples


def random_records(samples: Sequence[Sample], capture: CaptureSpec, seed: int = 0) -> list[Record]:
    """Random states from the seed and the sample's tokens only, with unequal channels and a loud first row; those that
    ``capture`` rebuilds are what the blocks make of the others."""
    width, layers = capture.target.hidden_size, len(capture.aux_layers)
    head = HeadBundle.from_bytes(target_files(width, seed)[layout.HEAD_NAME], HEAD) if capture.holds_topk else None
    rebuilder = None
    if capture.blocks:
        files = rebuilding_files(capture, seed)
        blocks = TargetBlocks.from_bytes(files["config.json"], files[BLOCKS_FILE])
        rebuilder = Rebuilder(capture, HeadBundle.from_bytes(files[layout.HEAD_NAME], HEAD), blocks)
    records = []
    for sample in samples:
        generator = torch.Generator().manual_seed(int(sample.id[:12], 16) + seed)
        channels = torch.linspace(0.1, 4.0, width)
        aux = torch.randn(layers, sample.tokens, width, generator=generator) * channels
        aux[:, 0] *= 50
        rows = final_row_positions(sample.loss_mask, capture.final)
        final = torch.randn(len(rows), width, generator=generator) * channels
        record = Record(sample, aux.bfloat16(), final.bfloat16(), rows)
        if rebuilder is not None:
            stored = [capture.aux_layers.index(layer) for layer in capture.stored_layers]
            record = rebuilder.complete(replace(record, aux=record.aux[stored]))
        records.append(with_top_tokens(record, head, capture))
    return records


def fitted_to(capture: CaptureSpec, records: Iterable[Record]) -> tuple[CaptureSpec, dict[str, bytes]]:
    """The capture with its codec fitted to records, and the file of that; of a codec that is fitted to nothing neither
    changes."""
    if not is_unfitted(capture):
        return capture, {}
    slots = [capture.aux_layers.index(layer) for layer in capture.stored_layers]
    return fit(capture, (record.aux[slots] for record in records))


def make_data(folder: Path, *, samples: int | Sequence[Sample] = 6, seed: int = 0) -> Path:
    """A prepared DATA folder of these or of so many random conversations, four rows a file; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = make_samples(samples, seed) if isinstance(samples, int) else list(samples)
    files = []
    for index in range(max(1, -(-len(rows) // ROWS_PER_FILE))):
        path = folder / layout.part_name(index)
        samples_of_file = rows[index * ROWS_PER_FILE : (index + 1) * ROWS_PER_FILE]
        pq.write_table(pa.Table.from_pylist([_row(sample) for sample in samples_of_file], schema=PREPARED), path)
        data = path.read_bytes()
        files.append(FileEntry(path=path.name, size=len(data), sha256=sha256_hex(data)))
    (folder / layout.DATA_JSON).write_bytes(seal(_prepared(rows, tuple(files))))
    return folder


def make_store(
    location: Path | Filesystem,
    *,
    samples: int = 6,
    layers: Sequence[int] = (1, 3),
    width: int = 32,
    codec: str = "q8",
    final: FinalMode = "supervised",
    container: Container = "zarr",
    seed: int = 0,
) -> Store:
    """A finished store of random states at ``location/store`` from the DATA folder ``location/data``.

    Units hold at most 64 tokens, so six samples make several. A Filesystem instead of a folder is the store itself,
    and its DATA exists in memory only.
    """
    capture = capture_spec(layers, width, codec, final)
    root = location / "store" if isinstance(location, Path) else location
    files = rebuilding_files(capture, seed) if capture.blocks else target_files(width, seed)
    capture, fitted = fitted_to(capture, random_records(make_samples(samples, seed), capture, seed))
    files |= fitted
    store = create_store(root, capture, HEAD, recipe_name(capture.codecs), files, container)
    if isinstance(location, Path):
        prepared: PreparedInput = _SmallUnits.open(make_data(location / "data", samples=samples, seed=seed))
    else:
        prepared = _MemoryInput(make_samples(samples, seed))
    register_input(store, prepared)
    for unit in prepared.units():
        write_unit(store, unit.name, prepared.info.digest, random_records(unit.samples, capture, seed), (), ENGINE)
    return Store.open(store.fs)


def memory_input(samples: int = 6, seed: int = 0) -> PreparedInput:
    """The same input as ``make_data`` without any file, cut into the small units of ``make_store``."""
    return _MemoryInput(make_samples(samples, seed))


class _SmallUnits(PreparedInput):
    def units(self, max_tokens: int = UNIT_TOKENS) -> Iterator[Unit]:
        return super().units(min(max_tokens, UNIT_TOKENS))

    def registration(self, max_tokens: int) -> bytes:
        return super().registration(min(max_tokens, UNIT_TOKENS))


class _MemoryInput(_SmallUnits):
    def __init__(self, samples: list[Sample]) -> None:
        super().__init__(open_filesystem("memory"), _prepared(samples, ()))
        self._samples = samples

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        table = pa.Table.from_pylist([_row(sample) for sample in self._samples], schema=PREPARED)
        yield from table.select(columns).to_batches(ROWS_PER_FILE)


def _row(sample: Sample) -> dict[str, object]:
    return {
        "sample_id": sample.id,
        "input_ids": sample.input_ids.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "spans": [dict(zip(("role", "start", "end"), span, strict=True)) for span in sample.spans.tolist()],
        "split": sample.split,
        "source": sample.source,
    }


def _prepared(rows: Sequence[Sample], files: tuple[FileEntry, ...]) -> PreparedData:
    return PreparedData(
        digest=input_digest((sample.id, sample.split) for sample in rows),
        target="random",
        tokenizer_sha256="2" * 64,
        chat_template_sha256="3" * 64,
        vocab_size=VOCAB,
        loss_on="assistant",
        mask_from="generation-tags",
        max_tokens=None,
        overlong="cut",
        validation_share=0.2,
        rows_read=len(rows),
        samples=len(rows),
        validation_samples=sum(sample.split == "validation" for sample in rows),
        tokens=sum(sample.tokens for sample in rows),
        supervised_tokens=sum(sample.supervised for sample in rows),
        final_rows=sum(len(final_row_positions(sample.loss_mask, "supervised")) for sample in rows),
        longest=max((sample.tokens for sample in rows), default=0),
        cut=0,
        duplicates=0,
        files=files,
    )
