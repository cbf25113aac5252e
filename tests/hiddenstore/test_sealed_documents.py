"""Documents that carry their own digest."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiddenstore.errors import ConfigError, CorruptionError, FormatError
from hiddenstore.files.documents import MAX_DOCUMENT_BYTES, canonical, load, seal, sha256_hex, unseal
from hiddenstore.testing.builders import ENGINE
from schemas.advice import Advice, AdviceRow
from schemas.base import Document
from schemas.manifest import CommitRecord, Engine, LayerStats, Snapshot, SnapshotEntry, StoreManifest
from tests.faults import FaultFilesystem
from tests.golden.reading import STORES

SNAPSHOT = Snapshot(name="é ünï", commits=(SnapshotEntry(record="a.json", sha256="0" * 64),), samples=3, tokens=70)


def sealed(body: bytes) -> bytes:
    """Any JSON object with a digest that fits, as somebody hostile would write it."""
    return body[:-1] + b',"sha256":"%s"}\n' % sha256_hex(body).encode()


def test_a_document_reads_back_equal_and_has_one_form() -> None:
    data = seal(SNAPSHOT)
    assert unseal(data, Snapshot, "x") == SNAPSHOT
    assert seal(unseal(data, Snapshot, "x")) == data
    assert data.endswith(b'"}\n')
    assert data.count(b"\n") == 1


@given(
    name=st.text(st.characters(exclude_categories=["Cs"])),
    versions=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.sampled_from('a"\\{}:é'))),
)
def test_any_text_survives_sealing(name: str, versions: dict[str, str]) -> None:
    engine = Engine(name=name, version="1", versions=versions)
    assert unseal(seal(engine), Engine, "x") == engine


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=4, max_size=4))
def test_floats_survive_sealing_bit_for_bit(values: list[float]) -> None:
    stats = LayerStats(rows=1, rms_mean=values[0], rms_median=values[1], rms_max=values[2], abs_max=values[3])
    assert unseal(seal(stats), LayerStats, "x").model_dump_json() == stats.model_dump_json()


def test_every_flipped_bit_is_corruption_naming_the_file() -> None:
    data = seal(SNAPSHOT)
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises(CorruptionError, match=r"snapshots/x\.json is damaged") as error:
                unseal(bytes(damaged), Snapshot, "snapshots/x.json")
            assert error.value.kind == "document-corrupt"


def test_every_truncation_and_every_trailing_byte_is_corruption() -> None:
    data = seal(SNAPSHOT)
    for damaged in [data[:length] for length in range(len(data))] + [data + b" ", data + b"\n", b" " + data]:
        with pytest.raises(CorruptionError):
            unseal(damaged, Snapshot, "x")


def test_a_later_format_is_refused_with_the_format_named() -> None:
    body = canonical({**SNAPSHOT.model_dump(mode="json"), "format": 7, "news": 1})
    with pytest.raises(
        FormatError, match="has format 7; this version of hiddenstore reads a Snapshot up to 1"
    ) as error:
        unseal(sealed(body), Snapshot, "x")
    assert error.value.kind == "format-future"
    assert error.value.hint


@pytest.mark.parametrize("version", [1.0, True, "1", None, 0, -1, 2.0])
@pytest.mark.parametrize("model", [Snapshot, StoreManifest, CommitRecord])
def test_a_format_that_is_not_the_whole_number_it_can_be_is_refused(version: object, model: type[Document]) -> None:
    body = canonical({**document_of(model), "format": version})
    with pytest.raises(FormatError, match=f"is not a {model.__name__}: format: ") as error:
        unseal(sealed(body), model, "x")
    assert error.value.kind == "document-invalid"


@pytest.mark.parametrize(("model", "later"), [(Snapshot, 2), (StoreManifest, 3), (CommitRecord, 2)])
def test_a_later_format_is_later_than_the_one_of_its_own_kind(model: type[Document], later: int) -> None:
    with pytest.raises(FormatError, match=f"has format {later}") as error:
        unseal(sealed(canonical({**document_of(model), "format": later})), model, "x")
    assert error.value.kind == "format-future"


@pytest.mark.parametrize("model", [Snapshot, StoreManifest, CommitRecord])
def test_a_document_without_its_format_is_damaged(model: type[Document]) -> None:
    content = document_of(model)
    content.pop("format")
    with pytest.raises(CorruptionError, match=f"it is no {model.__name__}: it lacks format"):
        unseal(sealed(canonical(content)), model, "x")


def document_of(model: type[Document]) -> dict[str, Any]:
    if model is Snapshot:
        return SNAPSHOT.model_dump(mode="json")
    folder = STORES / "safe-zarr"
    path = folder / "store.json" if model is StoreManifest else next((folder / "commits").iterdir())
    content: dict[str, Any] = json.loads(path.read_bytes())
    del content["sha256"]
    return content


@pytest.mark.parametrize(
    "change", [{"surprise": 1}, {"samples": "three"}, {"commits": {"a": 1}}, {"samples": -1.5}, {"name": None}]
)
def test_whole_bytes_of_another_shape_are_a_format_error(change: dict[str, object]) -> None:
    body = canonical({**SNAPSHOT.model_dump(mode="json"), **change})
    with pytest.raises(FormatError, match="is not a Snapshot") as error:
        unseal(sealed(body), Snapshot, "x")
    assert error.value.kind == "document-invalid"


@pytest.mark.parametrize(
    ("where", "fix"),
    [
        ("/s/commits/u.json", "hiddenstore verify /s"),
        ("/s/snapshots/a.json", "hiddenstore repair /s"),
        ("/s/advice/1.json", "hiddenstore repair /s"),
        ("/d/data.json", "hiddenstore prepare INPUT -o DATA --target T"),
    ],
)
def test_a_damaged_document_says_which_command_comes_next(where: str, fix: str) -> None:
    with pytest.raises(CorruptionError) as error:
        unseal(b"{}", Snapshot, where)
    assert error.value.hint == fix


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_document_that_holds_nan_or_infinity_can_be_written(number: float) -> None:
    stats = LayerStats(rows=1, rms_mean=number, rms_median=0, rms_max=0, abs_max=0)
    record = CommitRecord(
        unit="u", input="0" * 64, segment="segments/u", engine=ENGINE, files=(), samples=(), stats={"layer_1": stats}
    )
    row = AdviceRow(
        recipe="raw",
        bytes_per_token=1.0,
        kl=None,
        overlap=None,
        top1_flips=None,
        channel_error=0.0,
        channel_errors={"layer_1": number},
        raw_rows=0.0,
        clipped=0.0,
        within=True,
        chosen=True,
    )
    advice = Advice(tokens=1, final_rows=0, max_kl=0.1, max_channel_error=0.1, chosen="raw", rows=(row,))
    documents: list[Document] = [stats, record, advice, advice.model_copy(update={"rows": (), "max_kl": number})]
    for document in documents:
        with pytest.raises(ConfigError) as error:
            seal(document)
        assert error.value.kind == "document-unwritable"


def test_an_empty_document_can_be_sealed() -> None:
    class Empty(Document):
        pass

    assert unseal(seal(Empty()), Empty, "x") == Empty()


def test_an_oversized_document_is_refused_before_it_is_read() -> None:
    class Huge(FaultFilesystem):
        def size(self, path: str) -> int | None:
            return MAX_DOCUMENT_BYTES + 1

        def read(self, path: str) -> bytes:
            raise AssertionError("it was read")

    with pytest.raises(CorruptionError, match="a document at most"):
        load(Huge(), "store.json", Snapshot)
