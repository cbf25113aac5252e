"""A store as a sequence: iteration, indices, slices, starts of ids, other processes, and how it looks."""

import pickle
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import hiddenstore
from hiddenstore.errors import ConfigError, NotFoundError
from hiddenstore.records import Record
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, make_samples, make_store, random_records
from hiddenstore.testing.workload import contents
from hiddenstore.writer import write_unit


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path, samples=8)


def ids(records: list[Record]) -> list[str]:
    return [record.sample.id for record in records]


def test_iterating_reads_every_record_in_commit_order(store: Store) -> None:
    assert ids(list(store)) == store.sample_ids


def test_an_index_counts_from_either_end(store: Store) -> None:
    assert store[0].sample.id == store.sample_ids[0]
    assert store[-1].sample.id == store.sample_ids[-1]
    assert store[np.int64(3)].sample.id == store.sample_ids[3]
    for outside in (8, -9):
        with pytest.raises(NotFoundError, match="holds 8 samples, 0 to 7: there is none at"):
            store[outside]


def test_a_slice_is_a_list_of_records(store: Store) -> None:
    assert ids(store[2:5]) == store.sample_ids[2:5]
    assert ids(store[::-3]) == store.sample_ids[::-3]
    assert store[8:] == []


def test_the_start_of_an_id_is_enough_where_it_is_the_only_one(store: Store) -> None:
    name = store.sample_ids[4]
    assert store[name[:10]].sample.id == store[name[:10].upper()].sample.id == name
    with pytest.raises(NotFoundError):
        store[""]


def test_a_start_that_several_ids_share_lists_them(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=40)
    firsts = [name[0] for name in store.sample_ids]
    shared = next(first for first in firsts if firsts.count(first) > 1)
    with pytest.raises(ConfigError, match=f"samples start with {shared!r}: ") as error:
        store[shared]
    assert error.value.kind == "sample-ambiguous"


def test_a_path_with_a_snapshot_opens_what_it_names(tmp_path: Path) -> None:
    folder = tmp_path / "jo@corp" / "chats@home"
    make_store(folder)
    first = Store.open(folder / "store")
    first.save_snapshot("v1")
    write_unit(first, "u-late", "0" * 64, random_records(make_samples(1, seed=9), first.capture), (), ENGINE)
    for frozen in (hiddenstore.open(f"{folder}/store@v1"), hiddenstore.open(folder / "store", "v1")):
        assert frozen.is_frozen
        assert frozen.sample_ids == first.sample_ids
    assert len(hiddenstore.open(folder / "store")) == len(first) + 1
    (folder / "store").rename(folder / "store@v1")
    assert not hiddenstore.open(folder / "store@v1").is_frozen
    with pytest.raises(NotFoundError, match="v2"):
        hiddenstore.open(f"{folder}/store@v1@v2")


def test_a_pickled_store_with_open_units_reads_the_same(store: Store) -> None:
    store.read(store.sample_ids[0])
    copy = pickle.loads(pickle.dumps(store))
    assert contents(copy) == contents(store)


def test_workers_that_are_spawned_read_the_store(store: Store) -> None:
    loader = DataLoader(store, batch_size=None, num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
    records = list(loader)
    assert ids(records) == store.sample_ids
    assert all(torch.equal(record.aux, store[record.sample.id].aux) for record in records)


def test_records_and_samples_are_one_line_without_their_numbers(store: Store) -> None:
    record = store[0]
    text = repr(record)
    assert "\n" not in text
    assert len(text) < 200
    assert f"Record(Sample({record.sample.id}, train, {record.sample.tokens} tokens, " in text
    assert f"aux {list(record.aux.shape)}, final {list(record.final.shape)})" in text


def test_a_record_of_top_tokens_says_how_many(tmp_path: Path) -> None:
    record = make_store(tmp_path, codec="tiny")[0]
    assert record.topk is not None
    assert f"TopK({record.topk.rows} rows, k={record.topk.k})" in repr(record)


def test_a_notebook_shows_a_table_and_no_markup_of_strangers(tmp_path: Path) -> None:
    html = make_store(tmp_path / "<b>bold</b>", samples=8)._repr_html_()
    assert "<th>samples</th><td>8</td>" in html
    assert "<b>" not in html
    assert "&lt;b&gt;bold" in html


def test_the_version_is_that_of_the_distribution() -> None:
    assert hiddenstore.__version__ == metadata.version("hiddenstore")


def test_batches_left_at_exit_print_nothing(tmp_path: Path) -> None:
    make_store(tmp_path, samples=40)
    program = (
        "import sys, hiddenstore\n"
        "from hiddenstore.data import TokenBatches\n"
        "batches = iter(TokenBatches(hiddenstore.open(sys.argv[1]), batch_tokens=64))\n"
        "next(batches)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
