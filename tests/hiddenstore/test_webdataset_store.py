"""A whole store of tars: copies to and from Zarr, verify, repair, gc, and the commands a person types."""

import json
import os
import shutil
import tarfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.care.gc import gc
from hiddenstore.cli import main
from hiddenstore.errors import ConflictError
from hiddenstore.files import layout
from hiddenstore.files.documents import canonical, seal, sha256_hex
from hiddenstore.inspect.samples import parse_where
from hiddenstore.store import Store
from hiddenstore.testing.builders import HEAD, capture_spec, make_store, target_files
from hiddenstore.testing.workload import contents, problems
from hiddenstore.verify import verify
from hiddenstore.writer import create_store
from schemas.manifest import Container, FileEntry
from tests.accepting import repair_all


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="hiddenstore")


def copy(source: Store, place: Path, container: Container | None, recipe: str | None = None) -> Store:
    run_copy(open_copy([source], place, recipe, container=container))
    return Store.open(place)


def files_of(store: Store) -> dict[str, dict[str, bytes]]:
    return {
        record.unit: {file.path: Path(store.path, record.segment, file.path).read_bytes() for file in record.files}
        for record in store.commits()
    }


def spoil(store: Store, sample: str) -> Path:
    """Flip a byte in a member of one sample."""
    path = Path(store.path, store.locate(sample)[0].segment, "samples.tar")
    with tarfile.open(path) as tar:
        place = tar.getmember(f"{sample}.layer_3.npy").offset_data
    data = bytearray(path.read_bytes())
    data[place + 200] ^= 16
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("change", ["two layers swapped", "two samples swapped", "a layer at another's place"])
def test_an_index_sealed_anew_that_contradicts_the_headers_is_damage(tmp_path: Path, change: str) -> None:
    store = make_store(tmp_path, samples=6, container="webdataset", codec="bf16")
    record = max(store.commits(), key=lambda record: len(record.samples))
    path = Path(store.path, record.segment, "index.json")
    index = json.loads(path.read_bytes())
    one, other = index["fields"]["layer_1.npy"], index["fields"]["layer_3.npy"]
    if change == "two layers swapped":
        index["fields"] |= {"layer_1.npy": other, "layer_3.npy": one}
    elif change == "two samples swapped":
        for column in one.values():
            column[0], column[1] = column[1], column[0]
    else:
        index["fields"]["layer_3.npy"] = one
    path.write_bytes(canonical(index))
    entry = FileEntry(path="index.json", size=path.stat().st_size, sha256=sha256_hex(path.read_bytes()))
    files = tuple(entry if file.path == "index.json" else file for file in record.files)
    commit = Path(store.path, layout.commit_path(record.unit))
    commit.write_bytes(seal(record.model_copy(update={"files": files})))
    assert verify(store.path).findings == []
    (finding,) = verify(store.path, "bytes").findings
    assert (finding.kind, finding.path) == ("file-corrupt", f"{record.segment}/samples.tar")
    assert set(finding.samples) == {sample.id for sample in record.samples}
    assert "index.json calls" in finding.detail
    # Its states are not copied under either name: their samples are to be captured again.
    repair_all(store.path)
    assert verify(store.path, "bytes").findings == []
    assert not {sample.id for sample in record.samples} & set(contents(Store.open(store.path)))


@pytest.mark.parametrize("codec", ["bf16", "lossless", "q8", "q4", "tiny"])
def test_a_copy_to_tars_and_back_has_the_bytes_it_began_with(tmp_path: Path, codec: str) -> None:
    source = make_store(tmp_path, samples=7, width=64, codec=codec)
    tars = copy(source, tmp_path / "tars", "webdataset")
    assert tars.manifest.container == "webdataset"
    assert {tuple(files) for files in files_of(tars).values()} == {("index.json", "samples.tar")}
    assert contents(tars) == contents(source)
    assert problems(tars, finished=True) == []
    back = copy(tars, tmp_path / "back", "zarr")
    assert files_of(back) == files_of(source)
    for record, before in zip(back.commits(), source.commits(), strict=True):
        assert record.model_dump(exclude={"segment"}) == before.model_dump(exclude={"segment"})


def test_a_copy_keeps_the_container_unless_told(tmp_path: Path) -> None:
    source = make_store(tmp_path, container="webdataset")
    plan = open_copy([source], tmp_path / "same")
    assert plan.verbatim == len(plan.units)
    run_copy(plan)
    assert files_of(Store.open(tmp_path / "same")) == files_of(source)
    exact = copy(make_store(tmp_path / "raw", codec="bf16"), tmp_path / "exact", "webdataset", "lossless")
    assert (exact.manifest.container, exact.manifest.recipe) == ("webdataset", "lossless")
    assert contents(exact) == contents(Store.open(tmp_path / "raw/store"))
    assert open_copy([source], tmp_path / "same").destination.manifest.container == "webdataset"


def test_chosen_samples_are_cut_into_tars_of_their_own(tmp_path: Path) -> None:
    source = make_store(tmp_path, codec="bf16", samples=8)
    keep = parse_where([], "train")
    run_copy(open_copy([source], tmp_path / "part", keep=keep, container="webdataset"))
    part = Store.open(tmp_path / "part")
    assert part.manifest.container == "webdataset"
    assert contents(part) == {name: digest for name, digest in contents(source).items() if name in part}
    assert {entry.split for _, entry in part.entries} == {"train"}


def test_another_container_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path, container="webdataset")
    with pytest.raises(ConflictError, match="container: webdataset stored, zarr asked"):
        create_store(tmp_path / "store", capture_spec(), HEAD, "safe", target_files(), "zarr")


def test_verify_blames_the_tar_and_names_the_samples_it_costs(tmp_path: Path) -> None:
    store = make_store(tmp_path, container="webdataset")
    victim = store.sample_ids[1]
    path = spoil(store, victim)
    assert verify(store.path).ok
    (finding,) = verify(store.path, "bytes").findings
    assert (finding.kind, finding.samples) == ("file-corrupt", (victim,))
    assert path.is_relative_to(Path(store.path) / Path(finding.path).parent)
    data = path.read_bytes()
    path.write_bytes(data[:-512])
    (finding,) = verify(store.path).findings
    assert finding.kind == "file-size"
    path.unlink()
    (finding,) = verify(store.path).findings
    assert finding.kind == "file-missing"
    assert victim in finding.samples


def test_verify_reads_the_same_meaning_from_both_containers(tmp_path: Path) -> None:
    source = make_store(tmp_path)
    tars = copy(source, tmp_path / "tars", "webdataset")
    one, other = verify(source.path, "meaning"), verify(tars.path, "meaning")
    assert one.samples_checked == other.samples_checked == len(source)
    assert (one.kinds, one.measures) == (other.kinds, other.measures)


def test_a_header_that_only_stock_readers_see_is_checked_by_verify(tmp_path: Path) -> None:
    store = make_store(tmp_path, container="webdataset")
    path = Path(store.path, store.commits()[0].segment, "samples.tar")
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert contents(Store.open(store.path)) == contents(store)
    (finding,) = verify(store.path, "bytes").findings
    assert (finding.kind, finding.samples) == ("file-corrupt", ())


def test_repair_leaves_out_the_damaged_sample_and_changes_no_other(tmp_path: Path) -> None:
    store = make_store(tmp_path, container="webdataset")
    before, victim = contents(store), store.sample_ids[0]
    spoil(store, victim)
    plan = repair_all(store.path)
    assert [list(unit.dropped) for unit in plan.units] == [[victim]]
    repaired = Store.open(store.path)
    assert contents(repaired) == {name: digest for name, digest in before.items() if name != victim}
    assert verify(store.path, "bytes").ok
    old = Path(store.path, store.locate(victim)[0].segment)
    assert old.exists()
    assert gc(store.path, dry_run=False, older_than_s=0).done
    assert not old.exists()
    assert [note.kind for note in verify(store.path, "bytes").notes] == ["pending"]


def test_gc_removes_a_tar_that_no_commit_names(tmp_path: Path) -> None:
    store = make_store(tmp_path, container="webdataset")
    record = store.commits()[0]
    orphan = Path(store.path, "segments", f"{record.unit}-0badf00d")
    shutil.copytree(Path(store.path, record.segment), orphan)
    for path in (orphan, *orphan.iterdir()):
        os.utime(path, (time.time() - 2 * 86400,) * 2)
    assert [item.path for item in gc(store.path, dry_run=False).remove] == [f"segments/{orphan.name}"]
    assert not orphan.exists()
    assert verify(store.path, "bytes").ok


def test_the_commands_a_person_types_work_on_tars(tmp_path: Path) -> None:
    source = make_store(tmp_path)
    tars = tmp_path / "tars"
    result = run("copy", source.path, str(tars), "--container", "webdataset", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["container"], document["units_verbatim"], document["units_decoded"]) == ("webdataset", 0, 0)
    assert document["notes"] == []
    again = run("copy", source.path, str(tmp_path / "again"), "--container", "webdataset")
    assert "codes as they are, as webdataset" in " ".join(again.stdout.split())
    info = json.loads(run("info", str(tars), "--json").stdout)
    assert info["container"] == "webdataset"
    assert "webdataset" in run("info", str(tars)).stdout
    assert info["samples"] == len(source)
    for command in (
        ("verify", str(tars), "--full"),
        ("ls", str(tars)),
        ("show", str(tars), source.sample_ids[2]),
        ("stats", str(tars)),
        ("repair", str(tars)),
        ("gc", str(tars)),
    ):
        result = run(*command)
        assert result.exit_code == 0, (command, result.stderr)
    difference = json.loads(run("diff", source.path, str(tars), "--json").stdout)
    assert [row["field"] for row in difference["schema_differences"]] == ["container"]


def test_what_is_exported_from_tars_is_what_is_exported_from_zarr(tmp_path: Path) -> None:
    source = make_store(tmp_path, codec="bf16", layers=(1, 3, 4), final="all")
    tars = copy(source, tmp_path / "tars", "webdataset")
    folders = [tmp_path / "from-zarr", tmp_path / "from-tars"]
    for store, folder in zip((source, tars), folders, strict=True):
        result = run("export-data", store.path, "--to", "speculators", "-o", str(folder))
        assert result.exit_code == 0, result.stderr
    one, other = ({p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()} for folder in folders)
    states = {name for name in one if name.endswith((".safetensors", ".pt"))}
    assert len(states) == len(source)
    assert {name: other[name] for name in states} == {name: one[name] for name in states}
