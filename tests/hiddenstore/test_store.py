"""The store as a reader sees it."""

import json
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import hiddenstore
from hiddenstore.errors import (
    ConfigError,
    ConflictError,
    CorruptionError,
    FormatError,
    Kind,
    NotFoundError,
    StorageError,
)
from hiddenstore.files import layout
from hiddenstore.files.documents import seal
from hiddenstore.fs.seam import Filesystem
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, make_samples, make_store, random_records
from hiddenstore.testing.workload import contents, problems
from hiddenstore.writer import write_unit
from tests.faults import FaultFilesystem


@pytest.fixture
def store() -> Store:
    return make_store(FaultFilesystem(), samples=8, codec="bf16")


def damage(store: Store, path: str, data: bytes | None) -> None:
    store.fs.disk.overwrite(f"{store.path}/{path}", data)  # type: ignore[attr-defined]


def test_samples_read_back_by_id_with_named_shapes(store: Store) -> None:
    assert store.sample_ids == [sample.id for sample in make_samples(8)]
    assert len(store) == 8
    for expected in random_records(make_samples(8), store.capture):
        found = store[expected.sample.id]
        assert expected.sample.id in store
        assert found.aux.shape == (2, expected.sample.tokens, 32)
        assert torch.equal(found.aux, expected.aux)
        assert torch.equal(found.final, expected.final)
        assert store.sample(expected.sample.id).input_ids.tolist() == expected.sample.input_ids.tolist()


def test_only_the_layers_asked_for_are_read(store: Store) -> None:
    name = store.sample_ids[0]
    part = store.read(name, layers=[3], final=False)
    assert torch.equal(part.aux[0], store[name].aux[1])
    assert part.final.shape == (0, 32)


def test_an_unknown_sample_is_not_found(store: Store) -> None:
    with pytest.raises(NotFoundError) as error:
        store["nothing"]
    assert error.value.kind == "sample-missing"
    assert "nothing" not in store


def test_entries_locate_every_sample(store: Store) -> None:
    entries = list(store.entries)
    assert [entry.id for _, entry in entries] == store.sample_ids
    for record, entry in entries:
        found, index = store.locate(entry.id)
        assert (found, found.samples[index]) == (record, entry)


def test_the_command_that_an_error_names_takes_a_path_with_blanks(tmp_path: Path) -> None:
    (tmp_path / "my states").mkdir()
    with make_store(tmp_path / "my states") as store, pytest.raises(NotFoundError) as error:
        store["nothing"]
    assert shlex.split(error.value.hint or "") == ["hiddenstore", "ls", store.path]


def test_no_store_is_not_found_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"store\.json is missing") as error:
        Store.open(tmp_path)
    assert "hiddenstore collect" in (error.value.hint or "")


def test_a_url_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        hiddenstore.open("ftp://bucket/store")
    assert error.value.kind == "scheme-unsupported"


def test_a_store_of_the_future_is_refused_with_its_format(store: Store) -> None:
    damage(store, layout.STORE_JSON, seal(store.manifest.model_copy(update={"format": 3})))
    with pytest.raises(FormatError, match="has format 3"):
        Store.open(store.fs)


def test_a_damaged_record_stops_opening_unless_asked_to_list_it(store: Store) -> None:
    unit = store.commits()[1].unit
    path = layout.commit_path(unit)
    damage(store, path, store.fs.read(path)[:-5])
    with pytest.raises(CorruptionError, match=unit):
        Store.open(store.fs)
    loose = Store.open(store.fs, strict=False)
    assert len(loose.commits()) == len(store.commits()) - 1
    assert unit in loose.damaged[0].message


def test_damage_of_one_unit_leaves_the_others_readable(store: Store) -> None:
    record = store.commits()[1]
    damage(store, f"{record.segment}/layer_1/c/0/0", None)
    again = Store.open(store.fs)
    lost = {sample.id for sample in record.samples}
    for name in again.sample_ids:
        if name in lost:
            with pytest.raises(CorruptionError) as error:
                again[name]
            assert set(error.value.samples) == lost
        else:
            assert again[name].sample.id == name


def test_a_sample_in_two_units_is_read_from_the_first_and_counted(store: Store) -> None:
    before = contents(store)
    samples = make_samples(2)
    write_unit(store, "zzzz-000000", "f" * 64, random_records(samples, store.capture, seed=9), (), ENGINE)
    again = Store.open(store.fs)
    assert again.duplicates == 2
    assert len(again) == 8
    assert contents(again) == before
    assert [problem for problem in problems(again) if "stored 2 times" in problem]


def test_a_snapshot_freezes_what_is_read(store: Store) -> None:
    frozen = store.save_snapshot("train-1")
    samples = make_samples(3, seed=5)
    write_unit(store, "zzzz-000000", "f" * 64, random_records(samples, store.capture), (), ENGINE)
    for snapshot in (frozen, "train-1"):
        assert Store.open(store.fs, snapshot=snapshot).sample_ids == store.sample_ids
    grown = Store.open(store.fs)
    assert len(grown) == 11
    assert grown.snapshot().tokens > frozen.tokens
    with pytest.raises(ConflictError) as error:
        grown.save_snapshot("train-1")
    assert error.value.kind == "output-exists"
    assert store.save_snapshot("train-1") == frozen


def test_a_snapshot_whose_answer_was_lost_is_the_one_that_lies_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = type(store.fs).put_if_absent

    def answer_is_lost(fs: Filesystem, path: str, data: bytes) -> bool:
        put(fs, path, data)
        raise StorageError("no answer", kind=Kind.REPLY_LOST)

    monkeypatch.setattr(type(store.fs), "put_if_absent", answer_is_lost)
    assert store.save_snapshot("lost") == store.snapshot("lost")
    monkeypatch.setattr(type(store.fs), "put_if_absent", put)
    assert Store.open(store.fs, "lost").sample_ids == store.sample_ids


def test_a_missing_snapshot_names_those_there_are(store: Store) -> None:
    store.save_snapshot("train-1")
    with pytest.raises(NotFoundError, match="it has train-1"):
        Store.open(store.fs, snapshot="train-2")


def test_a_snapshot_under_the_name_of_another_is_damage(store: Store) -> None:
    store.save_snapshot("train-1")
    damage(store, layout.snapshot_path("train-2"), store.fs.read(layout.snapshot_path("train-1")))
    with pytest.raises(CorruptionError, match="it holds snapshot 'train-1'") as error:
        Store.open(store.fs, snapshot="train-2")
    assert (error.value.kind, error.value.path) == ("snapshot-corrupt", layout.snapshot_path("train-2"))


def test_a_damaged_target_file_is_named(store: Store) -> None:
    data = store.target_file(layout.HEAD_NAME)
    damage(store, layout.HEAD_PATH, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptionError, match=layout.HEAD_PATH) as error:
        store.target_file(layout.HEAD_NAME)
    damage(store, layout.HEAD_PATH, data[:-1])
    with pytest.raises(CorruptionError, match=f"found {len(data) - 1:,} bytes"):
        store.target_file(layout.HEAD_NAME)
    with pytest.raises(NotFoundError) as unnamed:
        store.target_file("../store.json")
    assert (error.value.kind, unnamed.value.kind) == ("target-file-corrupt", "target-file-missing")


def test_a_tokenizer_that_wants_to_run_code_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store")
    wish = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    Path(store.path, "target", "tokenizer_config.json").write_text(json.dumps(wish))
    file = store.manifest.target_files[0].model_copy(update={"path": "tokenizer_config.json"})
    store.manifest = store.manifest.model_copy(update={"target_files": (file,)})
    monkeypatch.setattr("builtins.input", lambda _text: pytest.fail("it asked"))
    with pytest.raises(ConfigError, match="cannot be loaded") as error:
        store.tokenizer  # noqa: B018
    assert error.value.kind == "target-unreadable"


def test_a_disk_that_refuses_the_tokenizer_is_no_fault_of_the_target(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    # The first page of a process's memory: a read of it is a real EIO.
    Path(store.path, "target", "tokenizer_config.json").symlink_to("/proc/self/mem")
    file = store.manifest.target_files[0].model_copy(update={"path": "tokenizer_config.json"})
    store.manifest = store.manifest.model_copy(update={"target_files": (file,)})
    with pytest.raises(StorageError, match="Input/output error") as error:
        store.tokenizer  # noqa: B018
    assert error.value.kind == "io-error"


def test_many_threads_read_one_store(tmp_path: Path) -> None:
    make_store(tmp_path, samples=8, codec="q8")
    store = hiddenstore.open(tmp_path / "store")
    expected = contents(hiddenstore.open(tmp_path / "store"))
    found: list[dict[str, str]] = []
    threads = [threading.Thread(target=lambda: found.append(contents(store))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_the_text_of_a_store_says_what_it_is(store: Store) -> None:
    lines = repr(store).splitlines()
    assert len(lines) == 4
    assert "8 samples" in lines[1]
    assert "target random: llama, 8 layers, width 32" in lines[2]
    assert "layer_1, layer_3 (bf16); final supervised, pre_norm (bf16)" in lines[3]


def test_importing_hiddenstore_imports_nothing_heavy() -> None:
    program = (
        "import sys, hiddenstore\n"
        "hiddenstore.ConfigError\n"
        "heavy = {'torch', 'zarr', 'numpy', 'pyarrow', 'transformers', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert hiddenstore.Store.__name__ == 'Store'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
