"""The WebDataset container: stock webdataset iterates it, our reader seeks in it, and nothing in it is silently wrong.

The Zarr container, which has tests of its own, is the second opinion on what every sample holds.
"""

import io
import json
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenstore.codecs import CODECS, LAYOUTS
from hiddenstore.codecs.base import Encoded
from hiddenstore.errors import ConfigError, CorruptionError, FormatError
from hiddenstore.files.documents import canonical, sha256_hex
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.records import Record, Sample, final_row_positions, sample_id
from hiddenstore.segments import CONTAINERS
from hiddenstore.segments.encode import encode_records
from hiddenstore.segments.segment import SegmentReader, write_encoded
from hiddenstore.segments.tar import npy_header, tar_header
from hiddenstore.segments.tar_members import INDEX, TAR
from hiddenstore.testing.builders import ENGINE, capture_spec, make_samples, random_records
from schemas import CaptureSpec, CommitRecord
from schemas.capture import Codecs
from schemas.manifest import FileEntry

FOLDER = "segments/u-00000000"
# What is stored by the loss mask is for aux layers alone: tests/hiddenstore/test_masked.py.
STATES = sorted({*CODECS} & {*LAYOUTS})
ALL_CODECS = [*STATES, "tiny"]


def write(root: Path, records: Sequence[Record], capture: CaptureSpec, container: str = "webdataset") -> SegmentReader:
    fs = LocalFilesystem(root / container)
    unit = encode_records("u", records, capture)
    record = CommitRecord(
        unit="u",
        input="i",
        segment=FOLDER,
        engine=ENGINE,
        files=write_encoded(fs, FOLDER, unit, capture, container),
        samples=unit.samples,
        stats=unit.stats,
    )
    return SegmentReader(fs, FOLDER, record, capture, container)


def folder(reader: SegmentReader) -> Path:
    return Path(reader.fs.root, FOLDER)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


def same_states(one: torch.Tensor, other: torch.Tensor) -> bool:
    return same(one.view(torch.int16), other.view(torch.int16))


def same_part(one: Encoded, other: Encoded) -> bool:
    return (
        len(one.codes) == len(other.codes)
        and all(map(same, one.codes, other.codes))
        and set(one.small) == set(other.small)
        and all(
            values.dtype == other.small[name].dtype and np.array_equal(values, other.small[name])
            for name, values in one.small.items()
        )
    )


def assert_reads_alike(one: SegmentReader, other: SegmentReader, choices: Sequence[Sequence[int] | None]) -> None:
    for index in range(len(one)):
        for layers in choices:
            a, b = one.read(index, layers), other.read(index, layers)
            assert same_states(a.aux, b.aux)
            assert same_states(a.final, b.final)
            assert (a.topk is None) == (b.topk is None)
            if a.topk is not None and b.topk is not None:
                assert same(a.topk.ids, b.topk.ids)
                assert same(a.topk.log_probs, b.topk.log_probs)
                assert same(a.topk.lse, b.topk.lse)
            assert np.array_equal(a.final_rows, b.final_rows)
            for name in ("input_ids", "loss_mask", "spans"):
                assert np.array_equal(getattr(a.sample, name), getattr(b.sample, name)), name
            assert (a.sample.id, a.sample.split) == (b.sample.id, b.sample.split)
            parts, others = one.read_encoded(index, layers), other.read_encoded(index, layers)
            assert same_part(parts[0], others[0])
            assert same_part(parts[1], others[1])
            room = tuple([np.empty_like(codes.numpy()) for codes in part.codes] for part in parts[:2])
            assert same_part(other.read_encoded(index, layers, out=room)[0], parts[0])
            assert all(map(np.array_equal, (*room[0], *room[1]), (*parts[0].codes, *parts[1].codes)))


def test_every_container_a_store_may_name_is_there() -> None:
    assert tuple(CONTAINERS) == ("zarr", "webdataset", "zarr-shared")
    with pytest.raises(ConfigError, match=r"unknown container 'webdatset'.*did you mean webdataset\?"):
        CONTAINERS["webdatset"]


@pytest.mark.parametrize("codec", ALL_CODECS)
@pytest.mark.parametrize(("layers", "final"), [((1, 3), "supervised"), ((-1, 5), "all"), ((2,), "none"), ((), "all")])
def test_every_sample_reads_as_from_zarr(tmp_path: Path, codec: str, layers: tuple, final: str) -> None:
    if codec == "tiny" and not (layers and final != "none"):
        return
    capture = capture_spec(layers, 64, codec, final)
    records = random_records(make_samples(6), capture)
    if layers:
        records[2].aux[0, 3, 4] = float("nan")
        records[4].aux[-1, 5] = float("-inf")
    one, other = (write(tmp_path, records, capture, name) for name in ("zarr", "webdataset"))
    assert_reads_alike(one, other, [None, *([[layers[-1]], layers[::-1]] if layers else [])])


@st.composite
def units(draw: st.DrawFn) -> tuple[CaptureSpec, list[Record], list[int]]:
    """A capture with any codec per field, and records with odd rows: sinks, constants, NaN, infinities, no finals."""
    layers = draw(st.lists(st.integers(-1, 7), min_size=1, max_size=3, unique=True).map(sorted))
    width = draw(st.sampled_from([32, 64]))
    capture = capture_spec(layers, width, "bf16", draw(st.sampled_from(["supervised", "all", "none"])))
    codecs = Codecs(aux=draw(st.sampled_from(sorted(CODECS))), final=draw(st.sampled_from(STATES)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    records = []
    for place in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(1, 70))
        ids = rng.integers(0, 64, tokens).astype(np.int32)
        ids[0] = place
        mask = (rng.random(tokens) < draw(st.sampled_from([0.0, 0.3, 1.0]))).astype(np.uint8)
        spans = np.array([[2, 0, tokens]] * draw(st.integers(0, 2)), dtype=np.int32).reshape(-1, 3)
        rows = final_row_positions(mask, capture.final)
        aux = torch.from_numpy(rng.standard_normal((len(layers), tokens, width)).astype(np.float32))
        odd = draw(st.sampled_from([1.0, 0.0, 1500.0, float("nan"), float("inf")]))
        aux[:, rng.integers(0, tokens)] *= odd
        final = torch.from_numpy(rng.standard_normal((len(rows), width)).astype(np.float32))
        sample = Sample(sample_id(ids, mask), ids, mask, spans)
        records.append(Record(sample, aux.bfloat16(), final.bfloat16(), rows))
    return capture.model_copy(update={"codecs": codecs}), records, draw(st.permutations(layers))


@given(units())
@settings(max_examples=15, deadline=None)
def test_any_unit_reads_as_from_zarr(unit: tuple[CaptureSpec, list[Record], list[int]]) -> None:
    capture, records, layers = unit
    with tempfile.TemporaryDirectory() as place:
        one, other = (write(Path(place), records, capture, name) for name in ("zarr", "webdataset"))
        assert_reads_alike(one, other, [None, layers[:1], layers])


# webdataset 1.0 leaves the file it iterates to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("codec", ALL_CODECS)
def test_stock_webdataset_iterates_the_samples_and_only_them(tmp_path: Path, codec: str) -> None:
    capture = capture_spec((1, 3), 64, codec)
    records = random_records(make_samples(6), capture)
    reader = write(tmp_path, records, capture)
    found = list(webdataset.WebDataset([str(folder(reader) / TAR)], shardshuffle=False))
    assert [sample["__key__"] for sample in found] == [record.sample.id for record in records]
    assert len({tuple(sample) for sample in found}) == 1
    for index, (sample, record) in enumerate(zip(found, records, strict=True)):
        arrays = {
            name.removesuffix(".npy"): np.load(io.BytesIO(data), allow_pickle=False)
            for name, data in sample.items()
            if name.endswith(".npy")
        }
        for name in ("input_ids", "loss_mask", "spans"):
            assert np.array_equal(arrays[name], getattr(record.sample, name)), name
        assert np.array_equal(arrays["final_rows"], record.final_rows)
        aux, final, _ = reader.read_encoded(index)
        for name, codes in zip(("layer_1", "layer_3", "final"), (*aux.codes, *final.codes), strict=True):
            if name in arrays:
                assert np.array_equal(arrays[name], codes.numpy())
            else:
                assert LAYOUTS[codec].compressed
        for name, values in aux.small.items():
            if f"aux_{name}" in arrays:
                assert np.array_equal(arrays[f"aux_{name}"], values), name


@pytest.mark.parametrize("codec", ALL_CODECS)
def test_a_redone_unit_has_the_same_bytes_and_headers_that_say_nothing_of_the_writer(
    tmp_path: Path, codec: str
) -> None:
    capture = capture_spec(codec=codec)
    records = random_records(make_samples(6), capture)
    one, other = write(tmp_path / "1", records, capture), write(tmp_path / "2", records, capture)
    assert one.record == other.record
    assert sorted(path.name for path in folder(one).iterdir()) == [INDEX, TAR]
    with tarfile.open(folder(one) / TAR) as tar:
        members = tar.getmembers()
    headers = (folder(one) / TAR).read_bytes()
    assert {headers[m.offset_data - 512 :][257:265] for m in members} == {b"ustar\x0000"}
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode, m.type) for m in members} == {
        (0, 0, 0, "", "", 0o644, tarfile.REGTYPE)
    }
    names = [member.name for member in members]
    assert len(set(names)) == len(names)
    shared = [name for name in names if name.startswith("__unit__/")]
    assert names[: len(shared)] == shared
    assert shared[0] == "__unit__/unit.json"


def test_the_index_gives_place_and_checksum_of_every_member(tmp_path: Path) -> None:
    capture = capture_spec(codec="q8")
    reader = write(tmp_path, random_records(make_samples(4), capture), capture)
    index = json.loads((folder(reader) / INDEX).read_bytes())
    listed = {f"__unit__/{name}": place for name, place in index["unit"].items()}
    for field, column in index["fields"].items():
        for entry, *place in zip(
            reader.record.samples, *(column[k] for k in ("offset", "size", "crc32c")), strict=True
        ):
            listed[f"{entry.id}.{field}"] = place
    with tarfile.open(folder(reader) / TAR) as tar:
        for member in tar:
            data = tar.extractfile(member)
            assert data is not None
            place = [member.offset_data, member.size, google_crc32c.value(data.read())]
            assert listed.pop(member.name) == place
    assert listed == {}


@pytest.mark.parametrize("shape", [(0,), (7,), (0, 3), (5, 4096), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "int32"])
def test_array_members_are_the_files_numpy_writes(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    file = io.BytesIO()
    np.save(file, values)
    assert npy_header(dtype, shape) + values.tobytes() == file.getvalue()


def test_only_the_members_asked_for_are_read(tmp_path: Path) -> None:
    capture = capture_spec((0, 2, 5, 6), 1024, "bf16")
    reader = write(tmp_path, random_records(make_samples(12), capture), capture)
    reads: list[tuple[str, int, int]] = []
    inner = reader.fs.read_scatter

    def spy(path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        reads.append((path, offset, sum(map(len, buffers))))
        inner(path, offset, buffers)

    reader.fs.read_scatter = spy  # type: ignore[method-assign]
    entry = reader.record.samples[7]
    layer_bytes = entry.tokens * 1024 * 2
    reader.read(7, layers=[2], final=False)
    tar = [size for path, _, size in reads if path.endswith(TAR)]
    assert layer_bytes < sum(tar) < layer_bytes + 4096
    reads.clear()
    reader.read(7)
    tar = [size for path, _, size in reads if path.endswith(TAR)]
    assert max(tar) >= 4 * layer_bytes
    assert sum(tar) < 4 * layer_bytes + entry.final_rows * 2048 + 16384


def test_a_damaged_member_costs_its_sample_and_a_shared_one_the_unit(tmp_path: Path) -> None:
    capture = capture_spec((1, 3), 32, "q8")
    reader = write(tmp_path, random_records(make_samples(5), capture), capture)
    path = folder(reader) / TAR
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        places = {member.name: member.offset_data for member in tar}
    every = {entry.id for entry in reader.record.samples}
    victim = reader.record.samples[2].id
    for name in (f"{victim}.layer_3.npy", f"{victim}.input_ids.npy", f"{victim}.aux_raw_rows.npy"):
        damaged = bytearray(whole)
        damaged[places[name] + 130] ^= 4
        path.write_bytes(damaged)
        assert lost_samples(reader) == {victim}
    damaged = bytearray(whole)
    damaged[places["__unit__/aux_channel_scale.npy"] + 130] ^= 4
    path.write_bytes(damaged)
    assert lost_samples(reader) == every
    path.write_bytes(whole)
    assert lost_samples(reader) == set()


def lost_samples(reader: SegmentReader) -> set[str]:
    """Samples that a new reader of the same segment cannot read, as its errors name them."""
    reader = SegmentReader(reader.fs, FOLDER, reader.record, reader.capture, "webdataset")
    caught: list[tuple[int, CorruptionError]] = []
    for index in range(len(reader)):
        try:
            reader.read(index)
        except CorruptionError as error:
            caught.append((index, error))
    for index, error in caught:
        assert error.path == f"{FOLDER}/{TAR}"
        assert "crc32c" in error.message
        assert reader.record.samples[index].id in error.samples
    return {name for _, error in caught for name in error.samples}


def test_a_tar_of_the_same_size_in_its_place_is_seen(tmp_path: Path) -> None:
    capture = capture_spec((1,), 32, "bf16")
    records = random_records(make_samples(3), capture)
    one = write(tmp_path / "1", records, capture)
    other = write(tmp_path / "2", random_records(make_samples(3), capture, seed=9), capture)
    ours, theirs = folder(one) / TAR, folder(other) / TAR
    assert ours.stat().st_size == theirs.stat().st_size
    ours.write_bytes(theirs.read_bytes())
    assert lost_samples(one) == {record.sample.id for record in records}
    (folder(one) / INDEX).write_bytes((folder(other) / INDEX).read_bytes())
    with pytest.raises(CorruptionError, match=INDEX):
        SegmentReader(one.fs, FOLDER, one.record, capture, "webdataset").read(0)


def change_index(reader: SegmentReader, field: str, part: str, value: object) -> SegmentReader:
    """A reader of a segment whose index and commit record agree, but tell a lie."""
    path = folder(reader) / INDEX
    index = json.loads(path.read_bytes())
    index["fields"][field][part] = value
    data = canonical(index)
    path.write_bytes(data)
    files = tuple(
        FileEntry(path=INDEX, size=len(data), sha256=sha256_hex(data)) if file.path == INDEX else file
        for file in reader.record.files
    )
    record = reader.record.model_copy(update={"files": files})
    return SegmentReader(reader.fs, FOLDER, record, reader.capture, "webdataset")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("offset", [-512, 512]),
        ("offset", [1 << 62, 512]),
        ("offset", [7, 512]),
        ("size", [1 << 62, 4]),
        ("size", [1.5, 4]),
        ("size", [True, 4]),
        ("size", [64]),
        ("crc32c", [1 << 40, 4]),
        ("crc32c", "ab"),
        ("offset", 3),
        ("offset", [1 << 80, 512]),
    ],
)
def test_an_index_that_points_outside_its_tar_is_refused(tmp_path: Path, part: str, value: object) -> None:
    capture = capture_spec((1,), 32, "bf16")
    reader = write(tmp_path, random_records(make_samples(2), capture), capture)
    with pytest.raises(FormatError, match=INDEX):
        change_index(reader, "layer_1.npy", part, value).read(0)


def test_a_member_of_another_shape_is_refused(tmp_path: Path) -> None:
    capture = capture_spec((1,), 32, "bf16")
    reader = write(tmp_path, random_records(make_samples(2), capture), capture)
    for other in (capture_spec((1,), 64, "bf16"), capture_spec((1,), 32, "q8"), capture_spec((2,), 32, "bf16")):
        with pytest.raises(FormatError):
            SegmentReader(reader.fs, FOLDER, reader.record, other, "webdataset").read(0)


def test_a_member_that_a_ustar_header_cannot_state_is_refused() -> None:
    assert len(tar_header("s.layer_1.npy", (1 << 33) - 1)) == 512
    with pytest.raises(ConfigError, match="at most 8,589,934,591") as error:
        tar_header("s.layer_1.npy", 1 << 33)
    assert error.value.kind == "member-too-large"


def test_a_unit_without_samples_is_a_segment_too(tmp_path: Path) -> None:
    assert len(write(tmp_path, [], capture_spec())) == 0
