"""Conversations in parquet files: their memory, their bytes, columns of every kind."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from collectors.conversations import files
from collectors.conversations.mix import open_sources
from hiddenstore.conversation import Problem
from tests.collectors.test_conversations import read_conversations


def shared_text(text: str, rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


@pytest.mark.parametrize("encoding", ["RLE_DICTIONARY", "DELTA_BYTE_ARRAY"])
def test_a_parquet_file_whose_rows_share_one_large_value_is_read_in_little_memory(
    tmp_path: Path, encoding: str
) -> None:
    rows, path = 100, tmp_path / "a.parquet"
    answers: Any = shared_text("y" * (4 << 20), rows)
    if encoding == "RLE_DICTIONARY":
        pq.write_table(pa.table({"prompt": ["q"] * rows, "completion": answers}), path, compression="zstd")
    else:
        table = pa.table({"prompt": ["q"] * rows, "completion": answers.cast(pa.string())})
        codes = {"prompt": "PLAIN", "completion": encoding}
        pq.write_table(table, path, compression="zstd", use_dictionary=False, column_encoding=codes)
        del table
    assert path.stat().st_size < 10_000
    before, held = pa.total_allocated_bytes(), []
    for row in open_sources([str(path)])[0].rows():
        assert len(row.payload["completion"]) == 4 << 20 <= row.text_size
        held.append(pa.total_allocated_bytes() - before)
    assert len(held) == rows
    assert max(held) < 60 << 20


def test_a_parquet_row_beyond_the_limit_is_refused_and_its_neighbours_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectors.conversations.files.MAX_ROW_BYTES", 50_000)
    many = pa.StructArray.from_arrays([pa.array(["user"] * 100), shared_text("x" * 1000, 100)], ["role", "content"])
    turns = pa.ListArray.from_arrays(pa.array([0, 2, 98, 100], pa.int32()), many)
    pq.write_table(pa.table({"messages": turns}), tmp_path / "a.parquet")
    sizes = [row.text_size or 0 for row in open_sources([str(tmp_path / "a.parquet")])[0].rows()]
    assert [size > 50_000 for size in sizes] == [False, True, False]
    _, second, _ = read_conversations([str(tmp_path / "a.parquet")])
    assert isinstance(second, Problem)
    assert (second.reason, second.location) == ("row-too-large", "a.parquet:2")


@pytest.mark.parametrize("cut", ["", "[10:25]"])
def test_the_bytes_of_parquet_rows_add_up_to_those_of_their_source(tmp_path: Path, cut: str) -> None:
    rows, path = 37, tmp_path / "a.parquet"
    unread = [random.Random(number).randbytes(1000) for number in range(rows)]
    texts = {"prompt": [f"q{number}" for number in range(rows)], "completion": shared_text("y" * 5000, rows)}
    pq.write_table(pa.table({**texts, "unread": unread}), path, row_group_size=10)
    (source,) = open_sources([f"{path}{cut}"])
    sizes = [row.size for row in source.rows()]
    assert sum(sizes) == pytest.approx(source.size, abs=1)
    assert source.size > 1000 * len(sizes)
    assert max(sizes) - min(sizes) <= 1


def test_texts_of_a_large_row_group_are_measured_for_the_rows_that_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, path, measured = 50_000, tmp_path / "a.parquet", []
    table = pa.table({"prompt": [f"q{number}" for number in range(rows)], "completion": ["a", "b"] * (rows // 2)})
    pq.write_table(table, path, dictionary_pagesize_limit=1 << 30)
    bytes_of = files._bytes_of

    def counted(column: pa.Array) -> np.ndarray:
        measured.append(len(column))
        return bytes_of(column)

    monkeypatch.setattr(files, "_bytes_of", counted)
    assert sum(row.text_size or 0 for row in open_sources([str(path)])[0].rows()) > rows
    assert sum(measured) < 4 * rows


@pytest.mark.parametrize(
    "column",
    [
        pa.array([["a", None], None, []] * 50, pa.list_(pa.string())),
        pa.array([["aa", "b"], None, ["c", "d"]] * 50, pa.list_(pa.string(), 2)),
        pa.array([["aa", "b"], None, ["c", "d"]] * 50, pa.list_view(pa.string())),
        pa.array([["aa", "b"], None] * 50, pa.large_list(pa.large_string())),
        pa.array([[("a", "1"), ("b", None)], None, []] * 50, pa.map_(pa.string(), pa.string())),
        pa.array([{"a": "x", "b": [{"c": 1.5}]}, None] * 50),
        pa.array(["a", None] * 50, pa.string_view()),
        pa.array(["{}", None] * 50, pa.json_()),
        pa.array([b"ab", None] * 50, pa.binary(2)),
        pa.array(["a", None] * 50).dictionary_encode(),
        pa.array([None] * 50, pa.string()),
    ],
    ids=lambda column: str(column.type)[:24],
)
def test_parquet_columns_of_every_kind_keep_their_values(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"prompt": column}), tmp_path / "a.parquet", row_group_size=40)
    values = [row.payload["prompt"] for row in open_sources([str(tmp_path / "a.parquet")])[0].rows()]
    assert values == [files._without_absent(value) for value in column.to_pylist()]
