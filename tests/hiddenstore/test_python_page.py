"""docs/python.md as a person types it, and what it leaves to the reader."""

import os
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import hiddenstore
from hiddenstore.data import SampleDataset, SampleView, TokenBatches, loader, pack
from hiddenstore.errors import ConfigError, NotFoundError
from hiddenstore.store import Store
from hiddenstore.testing.builders import HEAD, capture_spec, make_store, target_files
from hiddenstore.writer import create_store
from tests.tiny_world import World

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("python"), samples=20)


def test_every_block_of_the_page_runs_as_it_stands(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my-store").symlink_to(world / "store")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "page.py"
    script.write_text("\n".join(BLOCKS), encoding="utf-8")
    names = runpy.run_path(str(script))
    assert len(BLOCKS) >= 7
    letters = names["text"].replace(" ", "")
    assert "Whatis" in letters
    assert "tensor([" not in capsys.readouterr().out


def test_the_table_of_samples_is_that_of_the_commits(store: Store) -> None:
    table = store.to_arrow()
    rows = [
        {
            **{name: getattr(entry, name) for name in ("id", "split", "tokens", "supervised", "final_rows")},
            "unit": record.unit,
        }
        for record, entry in store.entries
    ]
    assert table.to_pylist() == rows
    assert list(store.to_pandas()["id"]) == list(store.sample_ids)


def test_the_table_of_an_empty_store_has_its_columns(tmp_path: Path) -> None:
    empty = create_store(tmp_path / "store", capture_spec(), HEAD, "safe", target_files())
    assert empty.to_arrow().num_rows == 0
    assert empty.to_arrow().column_names == ["id", "split", "tokens", "supervised", "final_rows", "unit"]


def test_a_store_without_a_tokenizer_says_so(store: Store) -> None:
    with pytest.raises(NotFoundError, match="holds no tokenizer") as error:
        _ = store.tokenizer
    assert error.value.kind == "target-file-missing"


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    files = {**target_files(), "tokenizer.json": b'{"model": 7}'}
    broken = create_store(tmp_path / "store", capture_spec(), HEAD, "safe", files)
    with pytest.raises(ConfigError, match="cannot be loaded") as error:
        _ = broken.tokenizer
    assert error.value.kind == "target-unreadable"


def files_open_below(path: str) -> int:
    links = Path("/proc/self/fd")
    return sum(os.readlink(links / name).startswith(path) for name in os.listdir(links) if (links / name).is_symlink())


def test_a_closed_store_lets_go_of_its_units_and_can_be_read_again(store: Store) -> None:
    with hiddenstore.open(store.path) as opened:
        before = opened[0]
        assert opened._readers
    assert not opened._readers
    assert files_open_below(store.path) == 0
    assert torch.equal(opened[0].aux, before.aux)
    assert files_open_below(store.path) > 0
    opened.close()
    assert files_open_below(store.path) == 0


def test_the_packs_of_the_loader_are_those_of_the_packed_reader(store: Store) -> None:
    (whole,) = loader(store, batch_size=len(store), shuffle=False)
    (batch,) = TokenBatches(store, batch_tokens=100_000, epochs=1)
    (other,) = batch.packs
    for sample_id in whole.sample_ids:
        ours, theirs = whole.sample_ids.index(sample_id), other.sample_ids.index(sample_id)
        for name in ("input_ids", "loss_mask", "positions"):
            mine = getattr(whole, name)[whole.document == ours]
            assert torch.equal(mine, getattr(other, name)[other.document == theirs]), name
        assert torch.equal(whole.aux[:, whole.document == ours], other.aux[:, other.document == theirs])
        rows = [whole.document[whole.final_rows] == ours, other.document[other.final_rows] == theirs]
        assert torch.equal(whole.final[rows[0]], other.final[rows[1]])


def test_every_sample_of_a_split_comes_once_an_epoch_and_training_is_shuffled(store: Store) -> None:
    orders = [[sample_id for one in loader(store, batch_size=3) for sample_id in one.sample_ids] for _ in range(2)]
    train = [entry.id for _, entry in store.entries if entry.split == "train"]
    assert sorted(orders[0]) == sorted(train)
    assert orders[0] != orders[1]
    held_out = [sample_id for one in loader(store, "validation", batch_size=3) for sample_id in one.sample_ids]
    assert held_out == [entry.id for _, entry in store.entries if entry.split == "validation"]


def test_a_batch_sampler_chooses_the_samples_of_each_batch(store: Store) -> None:
    train = SampleDataset(store)
    batches = BatchSampler(SequentialSampler(train), 3, drop_last=False)
    packs = [list(one.sample_ids) for one in loader(store, batch_sampler=batches)]
    assert packs == [train.sample_ids[start : start + 3] for start in range(0, len(train), 3)]


def test_a_list_of_numbers_is_no_sample(store: Store) -> None:
    train = SampleDataset(store)
    lists = DataLoader(train, sampler=BatchSampler(SequentialSampler(train), 4, False), batch_size=None)
    with pytest.raises(TypeError, match=r"not list: take those of a list one by one.* batch_sampler="):
        next(iter(lists))
    for several in ([3, 1], np.array([3, 1]), np.arange(len(store)) > 4, (3,), 3.0):
        with pytest.raises(TypeError, match=f"one number or a slice .* not {type(several).__name__}:"):
            store.sample_ids[several]  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=type(several).__name__):
            store[several]  # type: ignore[call-overload]
    for one in (np.int64(3), torch.tensor(3), np.array(3)):
        assert store[one].sample.id == store.sample_ids[one] == store.sample_ids[3]  # type: ignore[call-overload, comparison-overlap]


def test_a_split_without_samples_is_refused(tmp_path: Path) -> None:
    empty = create_store(tmp_path / "store", capture_spec(), HEAD, "safe", target_files())
    with pytest.raises(ConfigError, match="holds no train samples") as error:
        loader(empty)
    assert error.value.kind == "split-empty"


def test_a_view_cuts_samples_and_leaves_the_store_as_it_is(store: Store) -> None:
    cut = SampleDataset(store, view=SampleView(max_tokens=6))
    record, whole = cut[0], store.read(cut.sample_ids[0])
    assert record.sample.tokens == 6
    assert record.aux.shape[1] == 6
    assert np.array_equal(record.sample.input_ids, whole.sample.input_ids[:6])
    assert all(row < 6 for row in record.final_rows)


def test_layers_and_the_final_can_be_left_out(store: Store) -> None:
    record = SampleDataset(store, layers=store.capture.aux_layers[:1], final=False)[0]
    assert record.aux.shape[0] == 1
    assert record.final.shape[0] == 0


def test_top_tokens_are_packed_too(tmp_path: Path) -> None:
    tops = make_store(tmp_path, codec="tiny", samples=6)
    joined = pack(list(SampleDataset(tops)))
    assert joined.topk is not None
    assert joined.topk.rows == len(joined.final_rows)
    assert joined.final.shape[0] == 0


def test_a_notebook_shows_shapes_of_records_and_samples(store: Store) -> None:
    html = store[0]._repr_html_()
    assert f"<caption>Record {store[0].sample.id}</caption>" in html
    assert f"<td>{list(store[0].aux.shape)}</td>" in html
    assert "<th>turns</th><td>user 0" in store[0].sample._repr_html_()


def test_batches_are_moved_by_whoever_looks_for_a_method_to(store: Store) -> None:
    batch = next(iter(DataLoader(SampleDataset(store), batch_size=2, collate_fn=pack)))
    assert batch.to("meta").aux.device.type == "meta"
