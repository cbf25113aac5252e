"""Large plain chunks: aligned in their shard, read straight into place, as whole as any other."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr
from google_crc32c import value as crc32c

from hiddenstore.errors import CorruptionError
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.segments import zarr_arrays
from hiddenstore.segments.zarr_arrays import (
    ALIGNMENT,
    CHUNK_CRCS,
    ArraySpec,
    ShardReader,
    parse_metadata,
    write_array,
    write_sharded,
)

ROWS, WIDTH, CHUNK_ROWS = 75, 2056, 16
PATH = "g/x/c/0/0"


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 16, (ROWS, WIDTH)).astype(np.uint16)


@pytest.fixture
def fs(tmp_path: Path, values: np.ndarray) -> LocalFilesystem:
    fs = LocalFilesystem(tmp_path)
    write_array(fs, "g", "x", ArraySpec(values.shape, "uint16", ("token", "channel"), CHUNK_ROWS), values)
    return fs


def reader(fs: LocalFilesystem) -> ShardReader:
    return ShardReader(fs, "g/x", parse_metadata(fs.read("g/x/zarr.json"), "x"))


def read(fs: LocalFilesystem, start: int, stop: int) -> np.ndarray:
    out = np.empty((stop - start, WIDTH), np.uint16)
    reader(fs).read_rows(start, stop, out)
    return out


def test_every_chunk_starts_at_a_multiple_of_the_alignment_and_stock_readers_agree(
    fs: LocalFilesystem, tmp_path: Path, values: np.ndarray
) -> None:
    data, chunks = fs.read(PATH), -(-ROWS // CHUNK_ROWS)
    index = np.frombuffer(data[-(16 * chunks + 4) : -4], "<u8").reshape(chunks, 2)
    assert (index[:, 0] % ALIGNMENT == 0).all()
    assert np.array_equal(np.asarray(zarr.open_array(str(tmp_path / "g/x"), mode="r")[...]), values)
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        assert np.array_equal(np.asarray(zarr.open_array(str(tmp_path / "g/x"), mode="r")[...]), values)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "g/x")}}
    assert np.array_equal(tensorstore.open(spec, read=True, open=True).result().read().result(), values)


@pytest.mark.parametrize("request_bytes", [1, 150_000, 1 << 23])
def test_any_rows_come_back_whatever_the_size_of_a_request(
    fs: LocalFilesystem, values: np.ndarray, monkeypatch: pytest.MonkeyPatch, request_bytes: int
) -> None:
    monkeypatch.setattr(zarr_arrays, "_REQUEST_BYTES", request_bytes)
    for start, stop in [(0, ROWS), (0, 1), (15, 17), (16, 32), (20, 30), (31, 75), (74, 75), (64, 75), (5, 5)]:
        assert np.array_equal(read(fs, start, stop), values[start:stop])


def test_rows_appended_in_pieces_give_the_same_file(tmp_path: Path, fs: LocalFilesystem, values: np.ndarray) -> None:
    spec = ArraySpec(values.shape, "uint16", ("token", "channel"), CHUNK_ROWS)
    write_sharded(fs, "g", "y", spec, np.split(values, [1, 20, 52, 53]))
    assert fs.read("g/y/c/0/0") == fs.read(PATH)


def test_damage_in_any_part_of_a_chunk_is_an_error_for_the_rows_that_need_it(
    fs: LocalFilesystem, tmp_path: Path, values: np.ndarray
) -> None:
    whole, body = fs.read(PATH), CHUNK_ROWS * WIDTH * 2
    second = -(-(body + 4) // ALIGNMENT) * ALIGNMENT
    for place in (second, second + 7 * WIDTH * 2, second + body - 1, second + body, second + body + 3):
        (tmp_path / PATH).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        for start, stop in [(20, 25), (0, ROWS), (31, 40)]:
            with pytest.raises(CorruptionError, match="chunk 1") as caught:
                read(fs, start, stop)
            assert caught.value.kind == "chunk-corrupt"
        assert np.array_equal(read(fs, 0, 16), values[:16])
        assert np.array_equal(read(fs, 32, ROWS), values[32:])


def test_checks_can_be_left_out_to_measure_them(
    fs: LocalFilesystem, tmp_path: Path, values: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(fs.read(PATH))
    data[0] ^= 1
    (tmp_path / PATH).write_bytes(data)
    monkeypatch.setattr(zarr_arrays, "CHECK_CHUNKS", False)
    found = read(fs, 0, ROWS)
    assert found[0, 0] == values[0, 0] ^ 1
    assert np.array_equal(found[1:], values[1:])


def test_a_shard_whose_chunks_lie_without_gaps_reads_as_well(
    fs: LocalFilesystem, tmp_path: Path, values: np.ndarray
) -> None:
    padded = np.zeros((-(-ROWS // CHUNK_ROWS) * CHUNK_ROWS, WIDTH), "<u2")
    padded[:ROWS] = values
    bodies = [chunk.tobytes() for chunk in np.split(padded, len(padded) // CHUNK_ROWS)]
    stored = [body + crc32c(body).to_bytes(4, "little") for body in bodies]
    index = np.array([(i * len(stored[0]), len(stored[0])) for i in range(len(stored))], "<u8").tobytes()
    (tmp_path / PATH).write_bytes(b"".join(stored) + index + crc32c(index).to_bytes(4, "little"))
    spec = parse_metadata(fs.read("g/x/zarr.json"), "x")
    spec = replace(spec, attributes={**spec.attributes, CHUNK_CRCS: [crc32c(body) for body in bodies]})
    out = np.empty((40, WIDTH), np.uint16)
    ShardReader(fs, "g/x", spec).read_rows(20, 60, out)
    assert np.array_equal(out, values[20:60])
