"""Segments: what is written is what is read, in the same bytes every time, and damage names file and samples."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch
import zarr

from hiddenstore.codecs import CODECS, LAYOUTS, get_codec
from hiddenstore.errors import ConfigError, CorruptionError, FormatError
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.records import Record, Sample, final_row_positions
from hiddenstore.segments.base import EncodedUnit
from hiddenstore.segments.encode import RowStats, encode_records
from hiddenstore.segments.segment import SegmentReader, write_encoded
from hiddenstore.testing.builders import capture_spec, make_samples, random_records
from schemas import CaptureSpec, CommitRecord, Engine, FileEntry

FOLDER = "segments/u-00000000"
# What is stored by the loss mask is for aux layers alone: tests/hiddenstore/test_masked.py.
STATES = sorted({*CODECS} & {*LAYOUTS})


def commit(unit: EncodedUnit, files: tuple[FileEntry, ...]) -> CommitRecord:
    return CommitRecord(
        unit="u",
        input="i",
        segment="u-00000000",
        engine=Engine(name="random", version="1"),
        files=files,
        samples=unit.samples,
        stats=unit.stats,
    )


def write(root: Path, records: Sequence[Record], capture: CaptureSpec) -> SegmentReader:
    fs = LocalFilesystem(root)
    unit = encode_records("u", records, capture)
    return SegmentReader(fs, FOLDER, commit(unit, write_encoded(fs, FOLDER, unit, capture)), capture)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.int16), other.view(torch.int16))


def codec_round_trip(records: Sequence[Record], capture: CaptureSpec) -> list[Record]:
    """What the codecs alone make of the records, without any file."""
    aux_codec, final_codec = get_codec(capture.codecs.aux), get_codec(capture.codecs.final)
    aux = aux_codec.decode(aux_codec.encode(torch.cat([record.aux for record in records], dim=1)))
    final = final_codec.decode(final_codec.encode(torch.cat([record.final for record in records])[None]))[0]
    aux_parts = aux.split([record.aux.shape[1] for record in records], dim=1) if len(aux) else [r.aux for r in records]
    final_parts = final.split([len(record.final) for record in records])
    return [
        Record(record.sample, a, f, record.final_rows)
        for record, a, f in zip(records, aux_parts, final_parts, strict=True)
    ]


@pytest.mark.parametrize("codec", STATES)
@pytest.mark.parametrize(
    ("layers", "final"),
    [((1, 3), "supervised"), ((-1, 5), "all"), ((2,), "none"), ((), "all"), ((), "supervised")],
)
def test_every_sample_reads_back_as_its_codec_decodes_it(tmp_path: Path, codec: str, layers: tuple, final: str) -> None:
    capture = capture_spec(layers, 33, codec, final)
    records = random_records(make_samples(7), capture)
    if layers:
        records[2].aux[0, 3, 4] = float("nan")
        records[4].aux[-1, 5] = float("-inf")
    reader = write(tmp_path, records, capture)
    for index in np.random.default_rng(0).permutation(len(records)).tolist():
        wanted, found = codec_round_trip(records, capture)[index], reader.read(index)
        assert same_bits(found.aux, wanted.aux)
        assert same_bits(found.final, wanted.final)
        assert found.final_rows.tolist() == wanted.final_rows.tolist()
        for name in ("input_ids", "loss_mask", "spans"):
            assert np.array_equal(getattr(found.sample, name), getattr(wanted.sample, name)), name
        assert (found.sample.id, found.sample.split) == (wanted.sample.id, wanted.sample.split)
    assert len(reader) == len(records)


@pytest.mark.parametrize("codec", STATES)
def test_encoded_parts_decode_elsewhere_to_the_same_bits(tmp_path: Path, codec: str) -> None:
    capture = capture_spec((0, 2, 5), 32, codec)
    reader = write(tmp_path, random_records(make_samples(5), capture), capture)
    for index in range(5):
        record = reader.read(index, layers=[5, 0])
        aux, final, final_rows = reader.read_encoded(index, layers=[5, 0])
        assert same_bits(get_codec(codec).decode(aux), record.aux)
        assert same_bits(get_codec(codec).decode(final)[0], record.final)
        assert final_rows.tolist() == record.final_rows.tolist()


def test_only_the_asked_layers_are_opened(tmp_path: Path) -> None:
    capture = capture_spec((0, 2, 5), 32, "q8")
    records = random_records(make_samples(3), capture)
    reader = write(tmp_path, records, capture)
    for name in ("layer_0", "layer_5", "final"):
        shutil.rmtree(tmp_path / FOLDER / name)
    record = reader.read(1, layers=[2], final=False)
    assert record.aux.shape == (1, records[1].sample.tokens, 32)
    assert record.final.shape == (0, 32)
    assert record.final_rows.shape == (0,)
    with pytest.raises(CorruptionError, match="layer_5"):
        reader.read(1, layers=[5])
    with pytest.raises(ConfigError, match=r"layers \[1\] are not held"):
        reader.read(1, layers=[1])


def test_a_sample_is_read_without_the_bytes_of_the_others(tmp_path: Path) -> None:
    capture = capture_spec((1,), 256, "q8", "none")
    count = 40
    samples = [
        Sample(f"{i:032x}", np.full(64, i, np.int32), np.ones(64, np.uint8), np.array([[2, 0, 64]], np.int32))
        for i in range(count)
    ]
    reader = write(tmp_path, random_records(samples, capture), capture)
    reads: list[tuple[str, int]] = []
    inner = reader.fs.read_scatter

    def spy(path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        reads.append((path, sum(map(len, buffers))))
        inner(path, offset, buffers)

    reader.fs.read_scatter = spy  # type: ignore[method-assign]
    reader.read(count // 2)
    assert sum(size for path, size in reads if "layer_1/" in path and size > 700) == 64 * 256 + 4


@pytest.mark.parametrize("codec", [*STATES, "tiny"])
def test_a_redone_unit_has_the_same_bytes(tmp_path: Path, codec: str) -> None:
    capture = capture_spec(codec=codec)
    records = random_records(make_samples(6), capture)
    first, second = (
        write_encoded(LocalFilesystem(tmp_path / root), FOLDER, encode_records("u", records, capture), capture)
        for root in ("one", "two")
    )
    assert first == second
    assert [file.path for file in first] == sorted(file.path for file in first)
    on_disk = {
        path.relative_to(tmp_path / "one" / FOLDER).as_posix()
        for path in (tmp_path / "one").rglob("*")
        if path.is_file()
    }
    assert on_disk == {file.path for file in first}


@pytest.mark.parametrize("codec", [*STATES, "tiny"])
@pytest.mark.parametrize("samples", [0, 1, 5])
def test_stock_readers_open_every_array_bit_exactly(tmp_path: Path, codec: str, samples: int) -> None:
    capture = capture_spec((1, 3), 32, codec)
    records = random_records(make_samples(samples), capture)
    encoded = encode_records("u", records, capture)
    fs = LocalFilesystem(tmp_path)
    write_encoded(fs, FOLDER, encoded, capture)
    wanted = {
        "input_ids": encoded.input_ids,
        "loss_mask": encoded.loss_mask,
        "spans": encoded.spans,
        "final_rows": encoded.final_rows,
        "layer_1": encoded.aux.joined().codes[0].numpy(),
        "layer_3": encoded.aux.joined().codes[1].numpy(),
        "final": encoded.final.joined().codes[0].numpy(),
        **{f"aux_{name}": values for name, values in encoded.aux.small.items()},
        **{f"final_{name}": values for name, values in encoded.final.small.items()},
    }
    group = zarr.open_group(tmp_path / FOLDER, mode="r")
    assert sorted(name for name, _ in group.arrays()) == sorted(wanted)
    assert group.attrs["unit"] == "u"
    assert group.attrs["layers"] == [1, 3]
    for name, values in wanted.items():
        found = [np.asarray(group[name][...])]
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            found.append(np.asarray(zarr.open_group(tmp_path / FOLDER, mode="r")[name][...]))
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / FOLDER / name)}}
        found.append(tensorstore.open(spec, read=True, open=True).result().read().result())
        for array in found:
            assert array.dtype == values.dtype
            assert np.array_equal(array, values), name


def test_a_unit_without_samples_is_a_segment_too(tmp_path: Path) -> None:
    assert len(write(tmp_path, [], capture_spec())) == 0


def test_a_sample_without_final_rows_reads_back(tmp_path: Path) -> None:
    capture = capture_spec()
    tokens = np.arange(9, dtype=np.int32)
    silent = Sample("0" * 32, tokens, np.zeros(9, np.uint8), np.zeros((0, 3), np.int32))
    records = random_records([silent, *make_samples(1)], capture)
    assert len(final_row_positions(silent.loss_mask, "supervised")) == 0
    reader = write(tmp_path, records, capture)
    assert reader.read(0).final.shape == (0, 32)
    assert reader.read(0).sample.spans.shape == (0, 3)
    assert len(reader.read(1).final) == len(records[1].final)
    alone = write(tmp_path / "alone", records[:1], capture)
    assert alone.read(0).final.shape == (0, 32)


def test_statistics_are_finite_and_count_raw_rows(tmp_path: Path) -> None:
    capture = capture_spec((1, 3), 32, "q8")
    records = random_records(make_samples(6), capture)
    records[0].aux[1, 2, 0] = float("inf")
    stats = encode_records("u", records, capture).stats
    assert set(stats) == {"layer_1", "layer_3", "final"}
    tokens = sum(record.sample.tokens for record in records)
    assert stats["layer_1"].rows == stats["layer_3"].rows == tokens
    assert stats["layer_1"].raw_rows == 6
    assert stats["layer_3"].raw_rows in (6, 7)
    exact = torch.cat([record.aux[0] for record in records]).double()
    assert stats["layer_1"].abs_max == float(exact.abs().max())
    assert stats["layer_1"].rms_mean == pytest.approx(float(exact.square().mean(dim=1).sqrt().mean()), rel=1e-6)
    assert np.isfinite([stats["layer_3"].rms_max, stats["layer_3"].abs_max]).all()


@pytest.mark.parametrize("where", [slice(0, 1), slice(-1, None), slice(None, None, 700), slice(None), slice(0, 0)])
def test_the_peak_is_the_largest_value_wherever_the_long_rows_are(where: slice) -> None:
    # Two blocks of rows, in which the longest come first, last, now and then, or are all alike.
    states = torch.randn(30_000, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    states[where] *= -1500.0
    stats = RowStats()
    stats.measure(states)
    assert stats.peak == float(states.float().abs().max())
    assert stats.norms == pytest.approx(states.double().square().mean(dim=1).sqrt().numpy(), rel=1e-6)


@pytest.mark.parametrize("by_kernels", [True, False])
def test_row_norms_of_huge_vanishing_and_broken_rows_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch, by_kernels: bool
) -> None:
    if not by_kernels:
        monkeypatch.setattr("hiddenstore.segments.encode.cpu_kernels", lambda numel: None)
    fills = [3e38, float("nan"), 1.0, 0.0, 1e20, 1e-22, 1e-25, 1e-40, -float("inf")]
    states = torch.tensor(fills).bfloat16()[:, None].repeat(1, 24)
    states[:2, 0] = 1.0
    stats = RowStats()
    stats.measure(states)
    exact = states.double().square().mean(dim=1).sqrt().numpy()
    assert stats.norms.tolist() == pytest.approx(exact[np.isfinite(exact)].tolist(), rel=1e-6, abs=0)
    assert stats.norms[2] == 0.0
    assert stats.peak == float(states[0, 1])


def test_a_reader_names_file_and_samples_of_every_damaged_file(tmp_path: Path) -> None:
    capture = capture_spec((1,), 32, "q8")
    records = random_records(make_samples(4), capture)
    whole = write(tmp_path, records, capture)
    identities = tuple(record.sample.id for record in records)
    needed = [file for file in whole.record.files if file.path != "zarr.json"]
    kinds: set[str] = set()
    for file in needed:
        path = tmp_path / FOLDER / file.path
        data = path.read_bytes()
        for damage in (None, data[:-1], data + b"\0", bytes([data[0] ^ 1]) + data[1:]):
            path.unlink()
            if damage is not None:
                path.write_bytes(damage)
            reader = SegmentReader(LocalFilesystem(tmp_path), FOLDER, whole.record, capture)
            with pytest.raises(CorruptionError) as error:
                [reader.read(index) for index in range(len(reader))]
            assert file.path in str(error.value)
            assert error.value.path == f"{FOLDER}/{file.path}"
            assert error.value.samples
            assert set(error.value.samples) <= set(identities)
            kinds.add(error.value.kind)
            path.write_bytes(data)
    assert kinds == {"file-missing", "file-size", "file-corrupt", "array-corrupt", "chunk-corrupt"}
    assert same_bits(whole.read(0).aux, codec_round_trip(records, capture)[0].aux)


def test_a_file_that_the_commit_record_does_not_name_is_not_read(tmp_path: Path) -> None:
    capture = capture_spec((1,), 32, "q8")
    reader = write(tmp_path, random_records(make_samples(2), capture), capture)
    named = tuple(file for file in reader.record.files if not file.path.startswith("layer_1/c/"))
    lacking = SegmentReader(reader.fs, FOLDER, reader.record.model_copy(update={"files": named}), capture)
    with pytest.raises(CorruptionError, match="does not name it") as error:
        lacking.read(0)
    assert (error.value.kind, error.value.path) == ("file-unnamed", f"{FOLDER}/layer_1/c/0/0")


def test_a_damaged_chunk_names_only_the_samples_that_need_it(tmp_path: Path) -> None:
    capture = capture_spec((1,), 32, "bf16", "none")
    samples = make_samples(12)
    reader = write(tmp_path, random_records(samples, capture), capture)
    path = tmp_path / FOLDER / "layer_1/c/0/0"
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    named = []
    for index in range(len(reader)):
        try:
            reader.read(index)
        except CorruptionError as error:
            named += error.samples
    assert 0 < len(named) < len(samples)
    assert samples[-1].id in named
    assert samples[0].id not in named


def test_a_segment_of_another_capture_is_refused(tmp_path: Path) -> None:
    reader = write(tmp_path, random_records(make_samples(2), capture_spec()), capture_spec())
    other = SegmentReader(reader.fs, FOLDER, reader.record, capture_spec(width=64))
    with pytest.raises(FormatError, match=r"expected uint16 \[2, 64\]") as error:
        other.read(0, final=False)
    assert error.value.kind == "array-invalid"
    with pytest.raises(FormatError, match="expected uint16"):
        SegmentReader(reader.fs, FOLDER, reader.record, capture_spec(codec="bf16")).read(0)


def test_records_that_do_not_fit_the_capture_are_refused() -> None:
    capture = capture_spec()
    record = random_records(make_samples(1), capture)[0]
    wrong = {
        "aux has shape": Record(record.sample, record.aux[:1], record.final, record.final_rows),
        "final has shape": Record(record.sample, record.aux, record.final[1:], record.final_rows),
        "aux is torch.float32": Record(record.sample, record.aux.float(), record.final, record.final_rows),
        r"final_rows is \[35, .*\(15\), expected final_row_positions.* = \[21, ": Record(
            record.sample, record.aux, record.final, record.final_rows[::-1].copy()
        ),
    }
    for message, bad in wrong.items():
        with pytest.raises(ValueError, match=message):
            encode_records("u", [bad], capture)
