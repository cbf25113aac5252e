"""Store → export-data → import gives an equal store, bit for bit, split and turns included."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from collectors.capture.import_job import ImportOptions, ImportReport, import_dump
from hiddenstore.dumps import get_layout
from hiddenstore.dumps.common import ABOUT_FILE, export_samples
from hiddenstore.errors import FormatError
from hiddenstore.inputs import input_digest
from hiddenstore.inspect.compare import compare
from hiddenstore.records import final_row_positions
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE
from hiddenstore.writer import create_store, write_unit
from tests.collectors import peer_dumps
from tests.collectors.tiny import save_target

LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_target(tmp_path_factory.mktemp("target"), dtype=torch.bfloat16))


def bring(folder: Path, peer: str, store: Path, target: str, **more: Any) -> ImportReport:
    asked: dict[str, Any] = {"check": "none", "recipe": "raw"} | more
    return import_dump(ImportOptions(folder, peer, store, target, **asked), None, lambda _text: None)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One conversation set after the norm, before it, and without a final hidden."""
    folder, spoken = tmp_path_factory.mktemp("dumps"), peer_dumps.speak(9, seed=2)
    peer_dumps.modelopt(folder / "modelopt-hf", spoken, LAYERS)
    peer_dumps.modelopt(folder / "modelopt-vllm", spoken, LAYERS, post=False)
    peer_dumps.specforge(folder / "specforge-dflash", spoken, LAYERS, strategy="dflash")
    return folder


@pytest.mark.parametrize(
    ("peer", "first", "recipe", "container"),
    [
        ("specforge-eagle3", "modelopt-hf", "raw", "zarr"),
        ("specforge-dflash", "specforge-dflash", "lossless", "zarr"),
        ("speculators", "modelopt-vllm", "lossless", "webdataset"),
        ("modelopt-hf", "modelopt-hf", "lossless", "zarr"),
        ("deepspec", "modelopt-hf", "raw", "webdataset"),
    ],
)
def test_nothing_differs_after_a_round_trip(
    peer: str, first: str, recipe: str, container: str, dumps: Path, tmp_path: Path, target: str
) -> None:
    more = {"recipe": recipe, "container": container}
    bring(dumps / first, first, tmp_path / "a", target, layers="0,1,2", validation=0.3, **more)
    a = Store.open(tmp_path / "a")
    report = export_samples(a, tmp_path / "out", get_layout(peer))
    assert (report.normed, report.zero_rows) == (False, 0)
    # Layers, split and turns need not be said again: the export wrote them down.
    bring(tmp_path / "out", peer, tmp_path / "b", target, validation=0.0, **more)
    found = compare(a, Store.open(tmp_path / "b"))
    assert len(found.both) == 9
    assert not found.different, found.document()


@pytest.mark.parametrize(
    ("peer", "first"),
    [
        ("specforge-eagle3", "modelopt-hf"),
        ("speculators", "modelopt-vllm"),
        ("modelopt-hf", "modelopt-hf"),
        ("deepspec", "modelopt-hf"),
    ],
)
def test_a_final_hidden_around_answers_alone_comes_back_without_the_zeros_that_were_written_for_the_rest(
    peer: str, first: str, dumps: Path, tmp_path: Path, target: str
) -> None:
    bring(dumps / first, first, tmp_path / "every", target, layers="0,1,2", validation=0.3)
    a = around_answers(Store.open(tmp_path / "every"), tmp_path / "a")
    assert export_samples(a, tmp_path / "out", get_layout(peer), missing_final="zeros").zero_rows > 0
    report = bring(tmp_path / "out", peer, tmp_path / "b", target, check="hf")
    assert "final hidden: around supervised tokens" in report.explained
    found = compare(a, Store.open(tmp_path / "b"))
    assert (len(found.both), found.schema) == (9, [])
    assert not found.different, found.document()


def test_zeros_for_the_final_hidden_are_never_imported_as_what_is_learned(
    dumps: Path, tmp_path: Path, target: str
) -> None:
    bring(dumps / "modelopt-hf", "modelopt-hf", tmp_path / "every", target, layers="0,1,2")
    a = around_answers(Store.open(tmp_path / "every"), tmp_path / "a")
    export_samples(a, tmp_path / "out", get_layout("modelopt-hf"), missing_final="zeros")
    with pytest.raises(FormatError, match="the final hidden around its supervised tokens alone") as caught:
        bring(tmp_path / "out", "modelopt-hf", tmp_path / "b", target, loss_on="all")
    assert (caught.value.kind, caught.value.hint) == ("final-missing", "leave --loss-on out")
    assert not (tmp_path / "b").exists()


def around_answers(store: Store, folder: Path) -> Store:
    """The same samples, with the final hidden where a store of ``--final supervised`` holds it."""
    capture = store.capture.model_copy(update={"final": "supervised"})
    files = {entry.path: store.target_file(entry.path) for entry in store.manifest.target_files}
    made = create_store(folder, capture, store.manifest.head, "raw", files)
    records = []
    for record in store:
        rows = final_row_positions(record.sample.loss_mask, "supervised")
        records.append(replace(record, final=record.final[torch.from_numpy(rows)], final_rows=rows))
    digest = input_digest((record.sample.id, record.sample.split) for record in records)
    write_unit(made, f"{digest[:12]}-000000", digest, records, (), ENGINE)
    return Store.open(folder)


def test_an_export_of_which_every_token_is_learned_keeps_its_turns_and_split(
    dumps: Path, tmp_path: Path, target: str
) -> None:
    bring(dumps / "modelopt-hf", "modelopt-hf", tmp_path / "a", target, layers="0,1,2", validation=0.3)
    a = Store.open(tmp_path / "a")
    export_samples(a, tmp_path / "out", get_layout("modelopt-hf"))
    bring(tmp_path / "out", "modelopt-hf", tmp_path / "b", target, loss_on="all")
    b = Store.open(tmp_path / "b")
    assert turns_of(a) == turns_of(b)
    assert all(b[name].sample.loss_mask.all() for name in b.sample_ids)


def turns_of(store: Store) -> dict[tuple[int, ...], tuple[list[list[int]], str]]:
    samples = [store[name].sample for name in store.sample_ids]
    return {tuple(sample.input_ids.tolist()): (sample.spans.tolist(), sample.split) for sample in samples}


def test_an_export_says_which_target_it_is_of(dumps: Path, tmp_path: Path, target: str) -> None:
    bring(dumps / "modelopt-vllm", "modelopt-vllm", tmp_path / "a", target, layers="0,1,2")
    export_samples(Store.open(tmp_path / "a"), tmp_path / "out", get_layout("speculators"))
    other = str(save_target(tmp_path / "other", seed=5, dtype=torch.bfloat16))
    with pytest.raises(FormatError) as caught:
        bring(tmp_path / "out", "speculators", tmp_path / "b", other)
    assert caught.value.kind == "target-mismatch"


def test_an_import_states_no_checkpoint_and_refuses_an_export_of_another(
    dumps: Path, tmp_path: Path, target: str
) -> None:
    bring(dumps / "modelopt-vllm", "modelopt-vllm", tmp_path / "a", target, layers="0,1,2")
    assert Store.open(tmp_path / "a").capture.target.checkpoint_sha256 is None
    export_samples(Store.open(tmp_path / "a"), tmp_path / "out", get_layout("speculators"))
    about = json.loads((tmp_path / "out" / ABOUT_FILE).read_text())
    about["target"]["checkpoint_sha256"] = "f" * 64
    (tmp_path / "out" / ABOUT_FILE).write_text(json.dumps(about))
    with pytest.raises(FormatError, match="names a target of checkpoint_sha256 ffffffff") as caught:
        bring(tmp_path / "out", "speculators", tmp_path / "b", target)
    assert caught.value.kind == "target-mismatch"


def test_a_norm_is_applied_on_the_way_out_and_never_undone(dumps: Path, tmp_path: Path, target: str) -> None:
    bring(dumps / "modelopt-vllm", "modelopt-vllm", tmp_path / "pre", target, layers="0,1,2")
    pre = Store.open(tmp_path / "pre")
    assert export_samples(pre, tmp_path / "out", get_layout("specforge-eagle3")).normed
    bring(tmp_path / "out", "specforge-eagle3", tmp_path / "post", target)
    post = Store.open(tmp_path / "post")
    found, head = compare(pre, post), pre.head()
    assert [difference["field"] for difference in found.schema] == ["capture.final_norm"]
    assert found.top1_share == 1.0
    for name in pre.sample_ids:
        assert torch.equal(post[name].aux, pre[name].aux)
        assert torch.equal(post[name].final, head.norm(pre[name].final).bfloat16())
    with pytest.raises(FormatError) as caught:
        export_samples(post, tmp_path / "no", get_layout("speculators"))
    assert caught.value.kind == "final-norm"
