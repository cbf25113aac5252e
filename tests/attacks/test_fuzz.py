"""Bytes of others, mutated: every parser gives what it can read or an error of ours, never hangs, never fills memory.

``corpus/<parser>/`` holds whole documents to start from and every one that once did harm.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collectors.conversations.files import open_file
from collectors.conversations.mix import read_mix
from collectors.conversations.parse import parse_row
from collectors.regenerate.server import _read_reply
from hiddenstore.errors import HiddenstoreError
from hiddenstore.files import layout
from hiddenstore.files.documents import canonical, sha256_hex, unseal
from hiddenstore.inputs import PreparedInput, parse_registered
from hiddenstore.servers.http import HttpClient, ServerAccess
from hiddenstore.store import Store
from hiddenstore.targets.head import HeadBundle
from hiddenstore.testing.builders import HEAD, make_data, make_store
from hiddenstore.testing.invariants import contents
from hiddenstore.testing.suite import Tally
from schemas.manifest import CommitRecord, Snapshot, StoreManifest
from tests.faults import FaultFilesystem
from tests.reliability.figures import Figures
from trainer.evaluate.server import _read_chat_with_meta, _read_generated, vllm_counts
from trainer.settings import check_settings
from trainer.vocab import DraftVocab

CORPUS = Path(__file__).parent / "corpus"
SHAPES = st.sampled_from(
    [b"null", b"true", b"[]", b"{}", b'""', b"-1", b"0", b"1e999", b"NaN", b"9" * 40, b'"\\ud800"', b"\xff", b"\x00",
     b"../", b"!!python/object/apply:os.system", b"&a [*a]", b"\n", b",", b":", b'"']
)  # fmt: skip
NUMBERS = st.sampled_from([b"-1", b"0", b"1", b"2147483648", b"9007199254740993", b"1" + b"0" * 18, b"1e308", b"0.5"])

FEW, MANY = 40, 20_000
"""Mutations of each parser's documents."""

Parse = Callable[[bytes], object]


@dataclass(frozen=True)
class Parser:
    """What reads the bytes, and bytes that it reads."""

    parse: Parse
    seeds: list[bytes]


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """One of the seeds with one to four changes: a bit, a number, a word, a cut or a repeated piece."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 40)))
        change = draw(st.integers(0, 5))
        numbers = [match.span() for match in re.finditer(rb"-?\d+(\.\d+)?", data)] if change == 0 else []
        if numbers:
            first, last = draw(st.sampled_from(numbers))
            data = data[:first] + draw(NUMBERS) + data[last:]
        elif change <= 1:
            data = data[:at] + draw(SHAPES) + data[end:]
        elif change == 2 and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        elif change == 3:
            data = data[:at] + data[end:]
        elif change == 4:
            data = data[:end] + data[at:]
        else:
            data = data[:at]
    return data


def document(model: type) -> Parser:
    """A sealed document, whose digest fits whatever it says."""
    store = a_store("zarr")
    value = {CommitRecord: store.commits()[0], StoreManifest: store.manifest, Snapshot: store.snapshot("s")}[model]
    return Parser(lambda data: unseal(sealed(data), model, "x"), [canonical(value.model_dump(mode="json"))])


def sealed(body: bytes) -> bytes:
    return body[:-1] + b',"sha256":"%s"}\n' % sha256_hex(body).encode()


@cache
def a_store(container: str) -> Store:
    return make_store(FaultFilesystem(), samples=2, layers=(1,), width=8, codec="q8", container=container)


def in_a_store(container: str, file: str) -> Parser:
    """A file of a segment, of which the record says what is true of it now: whoever writes one writes the other."""
    store = a_store(container)
    record = store.commits()[0]
    path, commit_path = f"{record.segment}/{file}", layout.commit_path(record.unit)

    def read(data: bytes) -> object:
        fs = store.fs.copy()
        fs.disk.overwrite(f"{fs.root}/{path}", data)
        content = record.model_dump(mode="json")
        for entry in content["files"]:
            if entry["path"] == file:
                entry.pop("tree", None)
                entry |= {"size": len(data), "sha256": sha256_hex(data)}
        fs.disk.overwrite(f"{fs.root}/{commit_path}", sealed(canonical(content)))
        return contents(Store.open(fs))

    return Parser(read, [store.fs.read(path)])


def in_a_file(name: str, read: Callable[[Path], object], folder: Path) -> Parse:
    def parse(data: bytes) -> object:
        path = folder / name
        path.write_bytes(data)
        return read(path)

    return parse


def conversations(path: Path) -> object:
    return [parse_row(row) for row in open_file(path, path.name).rows()]


def answer(read: Callable[[bytes], object]) -> Parse:
    """As it comes from a server, whose client says what is no answer."""
    from httpx2 import Request, Response

    client = HttpClient(ServerAccess("http://127.0.0.1:9"))
    return lambda data: client._read(Response(200, request=Request("GET", client.url)), data, read)


def prepared(folder: Path) -> Parser:
    make_data(folder / "data")
    path = folder / "data" / layout.DATA_JSON
    seed = path.read_bytes()[:-78] + b"}"
    read = in_a_file(path.name, lambda path: list(PreparedInput.open(path.parent).units()), path.parent)
    return Parser(lambda data: read(sealed(data)), [seed])


def registered() -> Parser:
    fs = a_store("zarr").fs
    ((digest, _),) = a_store("zarr").inputs().items()
    return Parser(lambda data: parse_registered(data, digest, "x"), [fs.read(layout.input_path(digest))])


def text_parsers(folder: Path) -> dict[str, Parse]:
    """Parsers whose whole documents lie in the corpus."""
    return {
        "conversations.jsonl": in_a_file("x.jsonl", conversations, folder),
        "conversations.json": in_a_file("x.json", conversations, folder),
        "config.yaml": in_a_file("x.yaml", lambda path: check_settings(None, path, ()), folder),
        "mix.yaml": in_a_file("m.yaml", read_mix, folder),
        "answer.json": answer(lambda body: _read_reply(json.loads(body))),
        "sglang.json": answer(lambda body: _read_chat_with_meta(json.loads(body))),
        "generate.json": answer(lambda body: _read_generated(json.loads(body))),
        "metrics.txt": answer(lambda body: vllm_counts(body.decode())),
    }


def binary_parsers(folder: Path) -> dict[str, Callable[[], Parser]]:
    vocab = DraftVocab.full(64).save_bytes()
    head = a_store("zarr").target_file(layout.HEAD_NAME)
    return {
        "commit record": partial(document, CommitRecord),
        "store.json": partial(document, StoreManifest),
        "snapshot": partial(document, Snapshot),
        "data.json": partial(prepared, folder),
        "input parquet": registered,
        "zarr.json of an array": partial(in_a_store, "zarr", "layer_1/zarr.json"),
        "zarr.json of a group": partial(in_a_store, "zarr", "zarr.json"),
        "zarr shard": partial(in_a_store, "zarr", "layer_1/c/0/0"),
        "zarr small array": partial(in_a_store, "zarr", "spans/c/0/0"),
        "tar index": partial(in_a_store, "webdataset", "index.json"),
        "tar": partial(in_a_store, "webdataset", "samples.tar"),
        "safetensors of a head": lambda: Parser(lambda data: HeadBundle.from_bytes(data, HEAD, "x"), [head]),
        "safetensors of a vocabulary": lambda: Parser(
            in_a_file("v.safetensors", lambda path: DraftVocab.load(path, 64), folder), [vocab]
        ),
    }


TEXTS = tuple(path.name for path in sorted(CORPUS.iterdir()))
BINARIES = (
    "commit record", "store.json", "snapshot", "data.json", "input parquet", "zarr.json of an array",
    "zarr.json of a group", "zarr shard", "zarr small array", "tar index", "tar", "safetensors of a head",
    "safetensors of a vocabulary",
)  # fmt: skip


def check(parse: Parse, data: bytes) -> None:
    """Whatever is raised is ours."""
    with suppress(HiddenstoreError):
        parse(data)


def parser_of(name: str, folder: Path) -> Parser:
    if name in BINARIES:
        return binary_parsers(folder)[name]()
    return Parser(text_parsers(folder)[name], [path.read_bytes() for path in sorted((CORPUS / name).iterdir())])


def fuzz(name: str, folder: Path, examples: int, figures: Figures) -> None:
    parser, tally = parser_of(name, folder), Tally()
    for seed in parser.seeds:
        check(parser.parse, seed)

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(data=mutated(parser.seeds))
    def mutate(data: bytes) -> None:
        tally.points += 1
        check(parser.parse, data)

    mutate()
    figures.add("mutated documents", name, tally)


def test_every_parser_of_a_text_has_a_corpus_and_every_corpus_a_parser(tmp_path: Path) -> None:
    assert set(text_parsers(tmp_path)) == set(TEXTS)
    assert set(binary_parsers(tmp_path)) == set(BINARIES)


@pytest.mark.parametrize("name", BINARIES)
def test_what_a_parser_starts_from_is_read(name: str, tmp_path: Path) -> None:
    parser = parser_of(name, tmp_path)
    assert all(parser.parse(seed) is not None for seed in parser.seeds)


@pytest.mark.parametrize("name", [*TEXTS, *BINARIES])
def test_mutated_bytes_are_read_or_refused_by_an_error_of_ours(name: str, tmp_path: Path, figures: Figures) -> None:
    fuzz(name, tmp_path, FEW, figures)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*TEXTS, *BINARIES])
def test_mutated_bytes_at_length_are_read_or_refused(name: str, tmp_path: Path, figures: Figures) -> None:
    fuzz(name, tmp_path, MANY, figures)
