"""A whole import: hostile and broken files, interruption, growth, deletion of sources, tokens from prepared data."""

import gzip
import inspect
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from collectors.capture import import_job, job
from collectors.capture.import_job import ImportOptions, ImportReport, import_dump
from collectors.engines.dump.matching import supervised_spans
from collectors.engines.dump.peer import Unusable
from collectors.engines.dump.torch_dicts import read_dicts, tensor_of
from hiddenstore.cli import main
from hiddenstore.errors import CaptureError, ConfigError, CorruptionError, FormatError, InterruptError, Kind
from hiddenstore.process import Drain
from hiddenstore.records import Sample, sample_id
from hiddenstore.store import Store
from tests.collectors import peer_dumps
from tests.collectors.peer_dumps import Spoken, saved
from tests.collectors.prepared import data_for_tiny, segment_bytes
from tests.collectors.tiny import save_target

LAYERS = (0, 1, 2)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", 64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_target(tmp_path_factory.mktemp("target"), dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def spoken() -> list[Spoken]:
    return peer_dumps.speak(10, seed=1)


Importer = Callable[..., ImportReport]


@pytest.fixture
def bring(tmp_path: Path, target: str) -> Importer:
    def run(peer: str = "specforge-eagle3", drain: Drain | None = None, **more: Any) -> ImportReport:
        asked = {"store": tmp_path / "store", "target": target, "recipe": "raw", "check": "none", "layers": "0,1,2"}
        options = ImportOptions(tmp_path / "dump", peer, **(asked | {"max_rejects": 0.5} | more))
        return import_dump(options, drain, lambda _text: None)

    return run


@pytest.fixture
def dump(tmp_path: Path, spoken: list[Spoken]) -> Path:
    """Ten SpecForge files."""
    peer_dumps.specforge(tmp_path / "dump", spoken, LAYERS)
    return tmp_path / "dump" / "rows_0-2000"


class _Runs:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


def verdict(path: Path) -> str:
    with pytest.raises(Unusable) as caught:
        read_dicts(path)
    return caught.value.reason


def test_a_poisoned_pickle_is_refused_and_its_code_does_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    saved(tmp_path / "data_0.ckpt", {"input_ids": torch.arange(3), "loss_mask": _Runs(marker)})
    saved(tmp_path / "data_1.ckpt.gz", {"input_ids": torch.arange(3), "loss_mask": _Runs(marker)})
    assert verdict(tmp_path / "data_0.ckpt") == "refused"
    assert verdict(tmp_path / "data_1.ckpt.gz") == "refused"
    assert not marker.exists()


@pytest.mark.parametrize("name", ["unable to open (5)", "a (os error 5)"])
def test_a_refused_pickle_that_names_an_error_of_the_system_is_no_error_of_the_disk(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "good.ckpt", {"input_ids": torch.arange(3)})
    with zipfile.ZipFile(tmp_path / "good.ckpt") as good, zipfile.ZipFile(tmp_path / "bad.ckpt", "w") as bad:
        for entry in good.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            bad.writestr(
                entry.filename, f"\x80\x02cfoo\n{name}\n.".encode("latin-1") if is_pickle else good.read(entry)
            )
    assert verdict(tmp_path / "bad.ckpt") == "refused"


def test_files_that_unpack_to_far_more_than_they_are_do_not_take_the_memory(tmp_path: Path) -> None:
    (tmp_path / "bomb.ckpt.gz").write_bytes(gzip.compress(bytes(64 << 20), compresslevel=1) * 5)
    assert verdict(tmp_path / "bomb.ckpt.gz") == "too-large"
    saved(tmp_path / "packed.ckpt", {"input_ids": torch.zeros(1000, dtype=torch.long)})
    packed = io.BytesIO()
    with zipfile.ZipFile(tmp_path / "packed.ckpt") as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    (tmp_path / "packed.ckpt").write_bytes(packed.getvalue())
    assert verdict(tmp_path / "packed.ckpt") == "refused"
    saved(tmp_path / "spread.ckpt", {"input_ids": torch.zeros(1, dtype=torch.long).expand(1 << 34)})
    assert verdict(tmp_path / "spread.ckpt") == "refused"


def test_records_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    """Fifty entries of the directory point at one record: reading them all would take fifty times the file."""
    saved(tmp_path / "good.ckpt", {"input_ids": torch.arange(1000)})
    shared = io.BytesIO((tmp_path / "good.ckpt").read_bytes())
    with zipfile.ZipFile(shared, "a") as archive:
        archive.writestr("again", bytes(10_000))
        last = archive.infolist()[-1]
        archive.filelist.extend([last] * 50)
    gathered = gzip.compress(shared.getvalue())
    (tmp_path / "shared.ckpt").write_bytes(shared.getvalue())
    (tmp_path / "shared.ckpt.gz").write_bytes(gathered)
    assert verdict(tmp_path / "shared.ckpt") == verdict(tmp_path / "shared.ckpt.gz") == "refused"


def test_what_a_file_holds_must_be_what_its_format_says(tmp_path: Path) -> None:
    saved(tmp_path / "one.pt", {"input_ids": torch.arange(5)})
    saved(tmp_path / "many.pt", [{"input_ids": torch.arange(5)}, {"input_ids": torch.arange(3)}])
    assert [len(entry["input_ids"]) for entry in read_dicts(tmp_path / "many.pt", is_list=True)] == [5, 3]
    assert verdict(tmp_path / "many.pt") == "wrong-content"
    with pytest.raises(Unusable, match="it holds a dict, expected a list of dicts"):
        read_dicts(tmp_path / "one.pt", is_list=True)
    with pytest.raises(Unusable, match="there is no tensor loss_mask; the file holds input_ids"):
        tensor_of(read_dicts(tmp_path / "one.pt")[0], "loss_mask")


def test_torch_files_are_not_read_by_a_torch_with_a_known_hole(
    bring: Importer, dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.raises(ConfigError) as caught:
        bring()
    assert (caught.value.kind, caught.value.hint) == ("pickle-refused", "pip install 'torch>=2.10'")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "content", [b"", b"no torch file", gzip.compress(b"no torch file", mtime=0)], ids=["empty", "text", "gzip"]
)
def test_what_is_no_torch_file_is_named_as_such(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ("a.ckpt.gz" if content[:2] == b"\x1f\x8b" else "a.ckpt")
    path.write_bytes(content)
    assert verdict(path) in ("truncated", "unreadable", "refused")


def test_broken_samples_are_counted_by_reason_and_the_others_imported(
    bring: Importer, dump: Path, tmp_path: Path, spoken: list[Spoken]
) -> None:
    def change(number: int, **entries: Any) -> None:
        path = dump / f"data_{number}.ckpt"
        saved(path, {**torch.load(path, weights_only=True), **entries})

    whole = (dump / "data_0.ckpt").read_bytes()
    (dump / "data_0.ckpt").write_bytes(whole[: len(whole) // 2])
    change(1, loss_mask=torch.ones(3, dtype=torch.long))
    change(2, hidden_state=torch.zeros(1, 5, 64).bfloat16())
    states = torch.load(dump / "data_3.ckpt", weights_only=True)["aux_hidden_state"].clone()
    states[0, 4, 70] = float("nan")
    change(3, aux_hidden_state=states)
    saved(dump / "data_4.ckpt", {"input_ids": torch.arange(1, 9), "loss_mask": _Runs(tmp_path / "ran")})
    change(5, loss_mask=torch.zeros_like(torch.load(dump / "data_5.ckpt", weights_only=True)["loss_mask"]))
    saved(dump / "data_7.ckpt", torch.load(dump / "data_6.ckpt", weights_only=True))
    report = bring()
    assert report.rejects == {
        "truncated": 1,
        "mask-length": 1,
        "length-mismatch": 1,
        "non-finite": 1,
        "refused": 1,
    }
    assert report.skipped == {"nothing-supervised": 1, "duplicate": 1}
    assert report.samples == len(Store.open(tmp_path / "store")) == 3
    [nan] = [reject for record in Store.open(tmp_path / "store").commits() for reject in record.rejects]
    assert nan.detail.startswith("rows_0-2000/data_3.ckpt: layer_1 holds NaN")
    assert not (tmp_path / "ran").exists()


def test_a_file_whose_name_is_no_text_costs_its_sample_and_stays(bring: Importer, dump: Path, tmp_path: Path) -> None:
    (dump / "data_3.ckpt").rename(dump / os.fsdecode(b"data_\xff.ckpt"))
    report = bring(delete_source=True)
    assert (report.samples, report.rejects, report.deleted_files) == (9, {"not-unicode": 1}, 9)
    assert [os.fsencode(path.name) for path in dump.iterdir()] == [b"data_\xff.ckpt"]


def test_states_that_nobody_can_read_are_rejects_of_their_unit(bring: Importer, dump: Path, tmp_path: Path) -> None:
    """Tokens are read first and states later: what is wrong with states is found in the middle of a unit."""
    for number in (1, 8):
        entry = torch.load(dump / f"data_{number}.ckpt", weights_only=True)
        saved(dump / f"data_{number}.ckpt", entry | {"aux_hidden_state": entry["aux_hidden_state"].to(torch.int16)})
    assert bring().rejects == {"wrong-dtype": 2}
    store = Store.open(tmp_path / "store")
    assert len(store) == 8
    details = [reject.detail for record in store.commits() for reject in record.rejects]
    assert sorted(details) == [
        f"rows_0-2000/data_{number}.ckpt: aux_hidden_state is int16, expected bf16, fp16 or fp32" for number in (1, 8)
    ]


def test_more_rejects_than_allowed_stop_the_import_before_there_is_a_store(
    bring: Importer, dump: Path, tmp_path: Path
) -> None:
    for number in range(3):
        (dump / f"data_{number}.ckpt").write_bytes(b"cut")
    with pytest.raises(CaptureError) as caught:
        bring(max_rejects=0.001)
    assert caught.value.kind == "too-many-rejects"
    assert "data_1.ckpt" in caught.value.message
    assert "--max-rejects" in (caught.value.hint or "")
    assert not (tmp_path / "store").exists()


def test_a_cut_shard_costs_only_the_samples_that_are_gone(
    bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    peer_dumps.deepspec(tmp_path / "dump", spoken, LAYERS)
    shard = tmp_path / "dump" / "shard-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-10])
    assert bring("deepspec", layers=None).rejects == {"truncated": 1}
    peer_dumps.automodel(tmp_path / "dump", spoken, LAYERS, "dspark")
    shard = tmp_path / "dump" / "shard-000002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    assert bring("automodel-dspark", layers=None, store=tmp_path / "other").rejects == {"truncated": 2}


def test_a_shard_of_another_name_or_of_flat_tensors_costs_only_its_own_samples(
    bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    peer_dumps.automodel(tmp_path / "dump", spoken, LAYERS, "dspark")
    shard = tmp_path / "dump" / "shard-000002.safetensors"
    (tmp_path / "dump" / "shard-last.safetensors").write_bytes(shard.read_bytes()[:-10])
    tensors = load_file(shard)
    save_file(tensors | {"attention_mask": tensors["attention_mask"].flatten()}, shard)
    assert bring("automodel-dspark", layers=None).rejects == {"truncated": 1, "wrong-shape": 2}


def test_an_interrupted_import_goes_on_with_the_same_command_and_gives_the_same_bytes(
    bring: Importer, dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(store=tmp_path / "whole")
    drain, write = Drain(), job.write_unit

    def once(*args: Any) -> Any:
        drain.request()
        return write(*args)

    monkeypatch.setattr(job, "write_unit", once)
    with pytest.raises(InterruptError):
        bring(drain=drain)
    monkeypatch.undo()
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", 64)
    before = len(Store.open(tmp_path / "store").commits())
    assert 0 < before < len(Store.open(tmp_path / "whole").commits())
    report = bring()
    assert report.resumed_units == before
    assert report.pending_units == 0
    assert segment_bytes(tmp_path / "store") == segment_bytes(tmp_path / "whole")
    assert bring().units == 0


def test_sources_stay_unless_asked_and_go_only_once_they_are_in_the_store(
    bring: Importer, dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dump / "data_2.ckpt").write_bytes(b"cut")
    bring(store=tmp_path / "other")
    assert len(list(dump.iterdir())) == 10
    read_back, calls = import_job.read_back, []

    def fail_second(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise CorruptionError("it does not come back", kind=Kind.READ_BACK)
        read_back(*args)

    monkeypatch.setattr(import_job, "read_back", fail_second)
    with pytest.raises(CorruptionError):
        bring(delete_source=True)
    monkeypatch.undo()
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", 64)
    left = {path.name for path in dump.iterdir()}
    assert "data_2.ckpt" in left
    assert 2 < len(left) < 10
    report = bring(delete_source=True)
    assert {path.name for path in dump.iterdir()} == {"data_2.ckpt"}
    assert report.remaining_files == 1
    assert len(Store.open(tmp_path / "store")) == 9


def test_an_import_says_beforehand_that_the_disk_is_too_small_unless_the_source_makes_room(
    dump: Path, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiddenstore.fs.local.LocalFilesystem.free_bytes", lambda _fs: 10)
    for makes_room in (False, True):
        said: list[str] = []
        options = ImportOptions(
            dump.parent,
            "specforge-eagle3",
            tmp_path / f"store-{makes_room}",
            target,
            layers="0,1,2",
            check="none",
            delete_source=makes_room,
        )
        assert import_dump(options, None, said.append).samples == 10
        assert any("import will stop when the disk is full" in line for line in said) != makes_room


def test_rows_whose_states_are_gone_are_counted_apart_and_do_not_hide_the_others(
    bring: Importer, tmp_path: Path, spoken: list[Spoken], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectors.engines.dump.meaning.TRIES", 1)
    peer_dumps.speculators(tmp_path / "dump", spoken, LAYERS)
    (tmp_path / "dump" / "hidden_states" / "hs_0.safetensors").unlink()
    report = bring("speculators")
    assert (report.samples, report.skipped, report.rejects.total()) == (9, {"not-captured": 1}, 0)
    report = bring("speculators", delete_source=True)
    assert report.deleted_files == 9
    with pytest.raises(ConfigError) as caught:
        bring("speculators")
    assert caught.value.kind == "input-empty"
    assert len(Store.open(tmp_path / "store")) == 9


def test_a_dump_that_has_grown_adds_what_is_new(
    bring: Importer, dump: Path, tmp_path: Path, spoken: list[Spoken]
) -> None:
    bring()
    peer_dumps.specforge(tmp_path / "more", peer_dumps.speak(3, seed=9), LAYERS)
    for path in (tmp_path / "more" / "rows_0-2000").iterdir():
        path.rename(dump / f"new_{path.name}")
    report = bring()
    assert (report.samples, len(report.inputs)) == (3, 2)
    assert len(Store.open(tmp_path / "store")) == 13


@pytest.mark.parametrize("without_facts", [False, True], ids=["", "passes of an older version"])
@pytest.mark.parametrize("peer", ["specforge-eagle3", "automodel-dspark"])
def test_a_new_dump_under_the_names_of_an_earlier_one_is_imported_before_it_is_deleted(
    bring: Importer, tmp_path: Path, peer: str, without_facts: bool
) -> None:
    def write(seed: int) -> list[Path]:
        spoken = peer_dumps.speak(5, seed=seed)
        if peer == "specforge-eagle3":
            peer_dumps.specforge(tmp_path / "dump", spoken, LAYERS)
        else:
            peer_dumps.automodel(tmp_path / "dump", spoken, LAYERS, "dspark")
        return sorted(path for path in (tmp_path / "dump").rglob("*") if path.name.startswith(("data_", "shard-")))

    layers = "0,1,2" if peer == "specforge-eagle3" else None
    names = write(seed=1)
    assert bring(peer, layers=layers, delete_source=True).deleted_files == len(names)
    assert not any(path.exists() for path in names)
    if without_facts:
        for path in (tmp_path / "store" / ".import").glob("*/sources.parquet"):
            path.unlink()
    assert write(seed=9) == names
    report = bring(peer, layers=layers, delete_source=True)
    assert (report.samples, report.deleted_files, report.changed_files) == (5, len(names), 0)
    assert len(Store.open(tmp_path / "store")) == 10
    write(seed=17)
    assert bring(peer, layers=layers).samples == 5
    assert len(Store.open(tmp_path / "store")) == 15


def test_a_file_that_no_longer_holds_what_was_read_stays_and_is_said(
    bring: Importer, dump: Path, tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bring()
    peer_dumps.specforge(tmp_path / "other", peer_dumps.speak(10, seed=9), LAYERS)
    other = max((tmp_path / "other").rglob("*.ckpt"), key=lambda path: path.stat().st_size)
    # Other states of the same tokens, and other tokens under the size and time of what was read.
    entry = torch.load(dump / "data_3.ckpt", weights_only=True)
    saved(dump / "data_3.ckpt", entry | {"aux_hidden_state": entry["aux_hidden_state"] * 2})
    forged = dump / "data_7.ckpt"
    before, (pass_folder,) = forged.stat(), (tmp_path / "store" / ".import").iterdir()
    forged.write_bytes(other.read_bytes())
    os.utime(forged, ns=(before.st_atime_ns, before.st_mtime_ns))
    _claim_size(pass_folder / "sources.parquet", b"rows_0-2000/data_7.ckpt", forged.stat().st_size)
    words = ["import", str(tmp_path / "dump"), "--from", "specforge-eagle3", "-o", str(tmp_path / "store")]
    words += ["--target", target, "--layers", "0,1,2", "--check", "none", "--recipe", "raw", "--delete-source"]
    for _ in range(2):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        assert "2 of them have changed since they were read" in capsys.readouterr().err
        assert {path.name for path in dump.iterdir()} == {"data_3.ckpt", "data_7.ckpt"}


def _claim_size(sources: Path, name: bytes, size: int) -> None:
    rows = pq.read_table(sources)
    sizes = [size if row["file"] == name else row["size"] for row in rows.to_pylist()]
    pq.write_table(rows.set_column(1, "size", pa.array(sizes, pa.int64())), sources)


def test_a_file_that_was_only_touched_is_not_imported_again(bring: Importer, dump: Path, tmp_path: Path) -> None:
    bring()
    for path in dump.iterdir():
        path.touch()
    report = bring()
    assert (report.samples, report.skipped) == (0, {"already-stored": 10})
    store = Store.open(tmp_path / "store")
    assert (len(store), store.duplicates) == (10, 0)


def test_what_is_touched_while_an_import_stands_still_is_stored_once(
    bring: Importer, dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain, write = Drain(), job.write_unit

    def once(*args: Any) -> Any:
        drain.request()
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_unit", once)
        with pytest.raises(InterruptError):
            bring(drain=drain)
    for path in dump.iterdir():
        path.touch()
    bring()
    store = Store.open(tmp_path / "store")
    assert (len(store), store.duplicates) == (10, 0)


def test_prepared_data_gives_true_ends_masks_turns_and_split(bring: Importer, tmp_path: Path, target: str) -> None:
    from hiddenstore.inputs import PreparedInput

    data = data_for_tiny(tmp_path / "data", samples=8, seed=3)
    samples = list(PreparedInput.open(data).samples())
    spoken = [
        Spoken(torch.from_numpy(s.input_ids.astype(np.int64)), torch.from_numpy(s.loss_mask.astype(np.int64)), x, x[0])
        for s in samples
        for x in [torch.randn(5, s.tokens, 64).mul(3).bfloat16()]
    ]
    peer_dumps.modelopt(tmp_path / "dump", spoken, LAYERS, post=False, loss_mask=None)
    report = bring("modelopt-vllm", tokens_from=data)
    store = Store.open(tmp_path / "store")
    assert report.samples == 8
    for sample, one in zip(samples, spoken, strict=True):
        record, (commit, place) = store[sample.id], store.locate(sample.id)
        assert np.array_equal(record.sample.loss_mask, sample.loss_mask)
        assert np.array_equal(record.sample.spans, sample.spans)
        assert commit.samples[place].split == sample.split
        assert torch.equal(record.aux[0], one.states[1])


def test_prepared_data_ends_padded_rows_and_names_the_token_a_shifted_cache_lost(
    bring: Importer, tmp_path: Path
) -> None:
    from hiddenstore.inputs import PreparedInput

    data = data_for_tiny(tmp_path / "data", samples=8, seed=4)
    samples = list(PreparedInput.open(data).samples())
    spoken = [
        Spoken(torch.from_numpy(s.input_ids.astype(np.int64)), torch.from_numpy(s.loss_mask.astype(np.int64)), x, x[0])
        for s in samples
        for x in [torch.randn(5, s.tokens, 64).mul(3).bfloat16()]
    ]
    peer_dumps.automodel(tmp_path / "dump", spoken, LAYERS, "eagle3")
    report = bring("automodel-eagle3", layers=None, tokens_from=data)
    assert report.samples == 8
    store = Store.open(tmp_path / "store")
    for sample, one in zip(samples, spoken, strict=True):
        assert torch.equal(store[sample.id].aux, one.states[[1, 2, 3]])
    peer_dumps.specforge(tmp_path / "dump" / "sf", spoken, LAYERS, strategy="dflash")
    bring("specforge-dflash", tokens_from=data, store=tmp_path / "padded")
    assert set(Store.open(tmp_path / "padded").sample_ids) == {sample.id for sample in samples}


@pytest.mark.parametrize("first", [0, 1])
def test_of_prepared_samples_with_the_same_tokens_a_dump_takes_the_one_with_its_mask(
    first: int, bring: Importer, dump: Path, tmp_path: Path, spoken: list[Spoken]
) -> None:
    samples = []
    for one in spoken:
        ids, mask = one.ids.numpy().astype(np.int32), one.mask.numpy().astype(np.uint8)
        for supervised in (mask, np.ones_like(mask))[:: 1 - 2 * first]:
            samples.append(Sample(sample_id(ids, supervised), ids, supervised, supervised_spans(supervised)))
    report = bring(tokens_from=data_for_tiny(tmp_path / "data", samples=samples))
    assert (report.samples, report.rejects.total()) == (len(spoken), 0)
    store = Store.open(tmp_path / "store")
    assert {(s.tokens, s.supervised) for s in (store[name].sample for name in store.sample_ids)} == {
        (len(one.ids), int(one.mask.sum())) for one in spoken
    }


def test_every_token_of_a_dump_with_masks_is_learned_where_that_is_asked(
    bring: Importer, dump: Path, tmp_path: Path, spoken: list[Spoken]
) -> None:
    assert bring(loss_on="all").samples == len(spoken)
    store = Store.open(tmp_path / "store")
    assert all(store[name].sample.loss_mask.all() for name in store.sample_ids)
    (document,) = (json.loads(path.read_text()) for path in (tmp_path / "store" / ".import").glob("*/data.json"))
    assert document["supervised_tokens"] == document["tokens"] == sum(len(one.ids) for one in spoken)


def test_tokens_and_states_shifted_against_each_other_are_refused(tmp_path: Path) -> None:
    """The bundled target is trained, so that its final hidden knows its next token."""
    from importlib.resources import files as packaged

    from collectors.targets.load import load_target, probe_states

    folder = str(packaged("collectors.demo") / "target")
    loaded = load_target(folder)
    turns = [
        {"role": "user", "content": "What does `json.dumps` do?"},
        {"role": "assistant", "content": inspect.getdoc(json.dumps)},
    ]
    ids = torch.tensor(loaded.tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"])
    with torch.no_grad():
        probe = probe_states(loaded.parts, ids[None], loaded.identity.model_type)
    entry = {"input_ids": ids, "aux_hidden_states": torch.cat([probe.states[2]], -1), "hidden_states": probe.normed}
    saved(tmp_path / "good" / "a.pt", entry)
    saved(tmp_path / "bad" / "a.pt", entry | {"hidden_states": torch.cat([probe.normed[1:], probe.normed[-1:]])})

    def bring(name: str) -> ImportReport:
        options = ImportOptions(
            tmp_path / name, "modelopt-hf", tmp_path / f"{name}-store", folder, layers="1", loss_on="all", check="none"
        )
        return import_dump(options, None, lambda _text: None)

    assert (bring("good").evidence.next_token_top1 or 0) > 0.3
    with pytest.raises(FormatError) as caught:
        bring("bad")
    assert caught.value.kind == "dump-shift"
    assert "predicts its next but one token" in caught.value.message


def test_the_command_answers_with_what_it_did_and_what_it_found(
    dump: Path, tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["import", str(tmp_path / "dump"), "--from", "specforge-eagle3", "-o", str(tmp_path / "store")]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--target", target, "--layers", "0,1,2", "--json"])
    assert caught.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "hiddenstore.import/1"
    assert (document["samples"], document["units_pending"], document["final_norm"]) == (10, 0, "post_norm")
    assert document["evidence"]["normed_share"] == 1.0
    with pytest.raises(SystemExit) as caught:
        main(["import", str(tmp_path), "--from", "modelopt", "-o", str(tmp_path / "s"), "--target", target])
    assert caught.value.code == 2
    assert "modelopt-vllm (before it" in capsys.readouterr().err
