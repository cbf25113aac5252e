"""Stock objects of a store, and ``verify --stock``: zarr-python and webdataset read what our reader reads."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
import zarr
from click.testing import CliRunner

from hiddenstore.cli import main
from hiddenstore.errors import ConfigError, NotFoundError
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, make_store
from hiddenstore.verify import Report, verify
from hiddenstore.writer import write_unit
from schemas.manifest import Container, Reject

# webdataset 1.0 leaves the file it iterates to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

CODECS = ("bf16", "lossless", "q8", "q4", "q4q3", "q3", "tiny")
FINDINGS = 3


def stock(store: Store, full: bool = False) -> Report:
    return verify(store.path, "bytes" if full else "structure", also_stock=True)


def test_a_unit_is_a_stock_zarr_group_that_cannot_be_written(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec="bf16")
    record = store.commits()[1]
    group = store.zarr(record.unit)
    assert type(group) is zarr.Group
    sample = record.samples[1]
    rows = slice(sample.start, sample.start + sample.tokens)
    assert (group["input_ids"][rows] == store[sample.id].sample.input_ids).all()
    with pytest.raises(ValueError, match="read-only"):
        group.create_array("more", shape=(1,), dtype="uint8")


def test_all_samples_are_a_stock_webdataset_in_the_order_of_the_store(tmp_path: Path) -> None:
    store = make_store(tmp_path, container="webdataset")
    assert type(store.webdataset()) is webdataset.WebDataset
    assert [sample["__key__"] for sample in store.webdataset()] == store.sample_ids
    record = store.commits()[1]
    assert [sample["__key__"] for sample in store.webdataset(record.unit)] == [s.id for s in record.samples]


def test_a_store_without_samples_has_no_tar_to_iterate(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=0, container="webdataset")
    with pytest.raises(ConfigError, match="holds no sample yet") as caught:
        store.webdataset()
    assert caught.value.kind == "store-empty"
    assert stock(store).findings == []


@pytest.mark.parametrize("container", ["zarr", "webdataset", "zarr-shared"])
def test_a_unit_whose_samples_were_all_rejected_has_nothing_for_stock_software(
    container: Container, tmp_path: Path
) -> None:
    store = make_store(tmp_path, container=container)
    refused = [Reject(id="a" * 32, tokens=4, reason="zeros", detail="sick")]
    assert write_unit(store, "u-000000", next(iter(store.inputs())), (), refused, ENGINE)
    report = stock(store)
    assert (report.findings, report.stock_samples) == ([], 6)


def test_the_other_container_and_unknown_units_are_refused_with_the_way_out(tmp_path: Path) -> None:
    arrays, tars = make_store(tmp_path / "a"), make_store(tmp_path / "t", container="webdataset")
    with pytest.raises(ConfigError, match="is a zarr store, not a webdataset one") as caught:
        arrays.webdataset()
    assert caught.value.kind == "container-mismatch"
    assert caught.value.hint == f"hiddenstore copy {arrays.path} {arrays.path}-webdataset --container webdataset"
    with pytest.raises(ConfigError, match="is a webdataset store, not a zarr one"):
        tars.zarr(tars.commits()[0].unit)
    for absent in (lambda: arrays.zarr("none-000000"), lambda: tars.webdataset("none-000000")):
        with pytest.raises(NotFoundError, match="no samples of a unit 'none-000000'") as unknown:
            absent()
        assert unknown.value.kind == "unit-missing"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("container", ["zarr", "webdataset"])
def test_stock_software_reads_every_codec_as_we_do(tmp_path: Path, container: Container, codec: str) -> None:
    report = stock(make_store(tmp_path, container=container, codec=codec, width=40))
    assert report.findings == []
    assert report.stock_samples == 6


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
@pytest.mark.parametrize("capture", [{"layers": (), "final": "all"}, {"final": "none"}])
def test_stores_of_layers_or_of_finals_alone_are_read_too(
    tmp_path: Path, container: Container, capture: dict[str, object]
) -> None:
    store = make_store(tmp_path, container=container, **capture)  # type: ignore[arg-type]
    assert stock(store).findings == []


def test_a_tar_header_that_names_another_member_is_seen(tmp_path: Path) -> None:
    store = make_store(tmp_path, container="webdataset")
    record = store.commits()[0]
    tar = Path(store.path, record.segment, "samples.tar")
    name = f"{record.samples[0].id}.layer_1.npy".encode()
    data = tar.read_bytes()
    start = data.index(name)
    head = bytearray(data[start : start + 512])
    head[len(name) - 5] += 1
    checksum = f"{sum(head[:148]) + 8 * 32 + sum(head[156:]):06o}\0 ".encode()
    head[148:156] = checksum
    tar.write_bytes(data[:start] + bytes(head) + data[start + 512 :])
    findings = {finding.path.rpartition("/")[2]: finding for finding in stock(store).findings}
    assert findings.keys() == {"layer_1", "layer_2"}
    assert {finding.kind for finding in findings.values()} == {"stock-differs"}
    assert {finding.samples for finding in findings.values()} == {(record.samples[0].id,)}
    assert stock(store, full=True).findings[0].kind == "file-corrupt"


def test_a_sample_that_only_stock_software_reads_is_seen(tmp_path: Path) -> None:
    store = make_store(tmp_path, container="webdataset")
    record = store.commits()[0]
    with tarfile.open(Path(store.path, record.segment, "samples.tar"), "a") as tar:
        further = tarfile.TarInfo(f"{'f' * 32}.input_ids.npy")
        data = io.BytesIO()
        np.save(data, store[0].sample.input_ids)
        further.size = data.tell()
        data.seek(0)
        tar.addfile(further, data)
    (finding,) = [finding for finding in stock(store).findings if finding.kind == "stock-differs"]
    assert (finding.path, finding.samples) == (record.segment, ())
    assert f"reads sample {'f' * 32}" in finding.detail


def test_a_group_that_only_stock_software_reads_the_metadata_of_is_seen(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    metadata = Path(store.path, record.segment, "zarr.json")
    metadata.write_text("{" + " " * (metadata.stat().st_size - 1))
    (finding,) = stock(store).findings
    assert (finding.kind, finding.path) == ("stock-differs", record.segment)
    assert finding.samples == tuple(sample.id for sample in record.samples)
    assert "cannot read" in finding.detail


def test_a_chunk_that_nobody_can_read_is_named_by_both(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec="bf16")
    record = store.commits()[0]
    chunk = Path(store.path, record.segment, "layer_1/c/0/0")
    data = bytearray(chunk.read_bytes())
    data[10] ^= 255
    chunk.write_bytes(data)
    assert [finding.kind for finding in stock(store).findings] == ["stock-differs"]
    assert [finding.kind for finding in stock(store, full=True).findings] == ["file-corrupt", "stock-differs"]


def test_a_damage_that_every_part_of_a_verification_meets_is_one_finding(tmp_path: Path) -> None:
    store = make_store(tmp_path, container="webdataset")
    tar = Path(store.path, store.commits()[0].segment, "samples.tar")
    data = bytearray(tar.read_bytes())
    data[len(data) // 2] ^= 1
    tar.write_bytes(data)
    found = verify(store.path, "meaning", 1, also_bytes=True, also_stock=True).findings
    assert "chunk-corrupt" in {finding.kind for finding in found}
    assert len(found) == len(set(found))


def test_the_command_says_so_in_one_line_and_exits_3_where_they_differ(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=3)
    result = CliRunner().invoke(main, ["verify", store.path, "--stock"])
    assert result.exit_code == 0, result.stderr
    assert "stock software reads the same of 3 samples" in result.stdout
    Path(store.path, store.commits()[0].segment, "zarr.json").unlink()
    result = CliRunner().invoke(main, ["verify", store.path, "--stock", "--json"])
    assert result.exit_code == FINDINGS
    assert "stock-differs" in {finding["kind"] for finding in json.loads(result.stdout)["findings"]}
