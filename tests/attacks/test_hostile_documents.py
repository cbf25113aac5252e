"""Documents whose digest fits but whose content means harm: refused, quickly, in little memory, naming the file."""

import json
import tracemalloc
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenstore.errors import CorruptionError, FormatError, HiddenstoreError
from hiddenstore.files.documents import MAX_DEPTH, canonical, sha256_hex, unseal
from hiddenstore.testing.builders import make_store
from schemas.manifest import CommitRecord, Snapshot, StoreManifest
from tests.faults import FaultFilesystem

WHERE = "commits/evil.json"


def sealed(body: bytes) -> bytes:
    return body[:-1] + b',"sha256":"%s"}\n' % sha256_hex(body).encode()


def refused(body: bytes, error: type[HiddenstoreError] = CorruptionError, model: Any = Snapshot) -> HiddenstoreError:
    with pytest.raises(error) as caught:
        unseal(sealed(body), model, WHERE)
    assert WHERE in caught.value.message
    assert len(caught.value.message) < 2000
    return caught.value


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000, 5_000_000])
@pytest.mark.parametrize("pair", [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting_is_refused(depth: int, pair: tuple[bytes, bytes]) -> None:
    refused(b'{"name":' + pair[0] * depth + b"1" + pair[1] * depth + b"}")


@pytest.mark.parametrize(
    "body",
    [
        b'{"name":"a","name":"b"}',
        b'{"name" :"a","name":"b"}',
        b'{"name"\t:"a","n\\u0061me":"b"}',
        b'{"name":"a","x":{"k":1,"k":2}}',
        b'{"x":[{"k":"\\":","k":2}]}',
        b'{"x":[{"k" : "a","k" : 2}]}',
    ],
)
def test_duplicate_keys_are_refused_however_they_are_written(body: bytes) -> None:
    assert "twice" in refused(body).message


@settings(max_examples=200, deadline=None)
@given(
    keys=st.lists(st.text('ab":\\ \t', max_size=3), min_size=1, max_size=4),
    space=st.sampled_from(["", " ", "\n", "\t "]),
)
def test_a_repeated_key_is_found_in_any_spelling(keys: list[str], space: str) -> None:
    members = [f"{json.dumps(key)}{space}:{space}{json.dumps(key)}" for key in [*keys, keys[0]]]
    assert "twice" in refused(("{" + ",".join(members) + "}").encode()).message


@pytest.mark.parametrize(
    "value",
    [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"01", b"0x1", b"1_0", b"9" * 5000, b"tru", b"'a'"],
)
def test_literals_that_are_no_json_numbers_are_refused(value: bytes) -> None:
    refused(b'{"name":"a","samples":%s}' % value)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"\xc0\xaf", b"\xed\xa0\x80", b"a\x00b", b"a\nb"])
def test_bad_text_is_refused(text: bytes) -> None:
    refused(b'{"name":"%s"}' % text)


@pytest.mark.parametrize("body", [b"[1]", b"3}", b'"a"', b"null}", b"{}{}", b'{"a":1}{"a":1}', b"}", b""])
def test_what_is_no_single_object_is_refused(body: bytes) -> None:
    with pytest.raises(CorruptionError):
        unseal(sealed(body), Snapshot, WHERE)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_never_anything_but_an_error_of_ours(data: bytes) -> None:
    for attempt in (data, sealed(data + b"}"), sealed(b"{" + data + b"}")):
        with pytest.raises((CorruptionError, FormatError)):
            unseal(attempt, StoreManifest, WHERE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(CommitRecord.model_fields)), value=JSON)
def test_any_value_in_any_field_of_a_record_is_read_or_refused(name: str, value: object) -> None:
    body = canonical({**a_record(), name: value})
    with suppress(FormatError, CorruptionError):
        assert isinstance(unseal(sealed(body), CommitRecord, WHERE), CommitRecord)


@cache
def a_record() -> dict[str, Any]:
    return make_store(FaultFilesystem(), samples=1, codec="bf16").commits()[0].model_dump(mode="json")


def test_a_million_members_cost_memory_in_proportion_to_the_file() -> None:
    body = b'{"name":"a","x":[' + b"[]," * 300_000 + b"[]]}"
    tracemalloc.start()
    refused(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(body)
