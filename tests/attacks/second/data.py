"""Attempts on conversations, prompts and prepared DATA: odd kinds of files, other programs' parquet, hostile rows."""

import gzip
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hiddenstore.files.documents import sha256_hex
from hiddenstore.inputs import input_digest
from hiddenstore.records import sample_id
from tests.attacks.second.lab import Attempt, Change, Lab, Outcome, reseal, rewrite
from tests.tiny_world import chat

PART, INFO = "part-00000.parquet", "data.json"
Rows = list[dict[str, Any]]


def collected(spoil: Callable[[Path], object]) -> Callable[[Lab], Outcome]:
    """Collect over spoiled DATA; what is collected all the same must be the world's samples or fewer."""

    def do(lab: Lab) -> Outcome:
        data = lab.copy("data")
        spoil(data)
        ended = lab.collect(data, lab.folder / "store")
        if ended.code == 0:
            again = lab.run("verify", lab.folder / "store", "--full")
            assert again.code == 0, f"silent: {again.out}"
        return ended

    return do


def part(change: Callable[[pa.Table], pa.Table], seal: Change | None = None) -> Callable[[Path], None]:
    """The part written again, and data.json sealed to fit, as a careless tool or somebody hostile would."""

    def spoil(data: Path) -> None:
        pq.write_table(change(pq.read_table(data / PART)), data / PART)
        content = (data / PART).read_bytes()

        def fit(document: dict[str, Any]) -> None:
            document["files"][0] |= {"size": len(content), "sha256": sha256_hex(content)}
            if seal is not None:
                seal(document)

        reseal(data / INFO, fit)

    return spoil


def rows(change: Callable[[Rows], object]) -> Callable[[Path], None]:
    def of_table(table: pa.Table) -> pa.Table:
        listed = table.to_pylist()
        change(listed)
        return pa.Table.from_pylist(listed, schema=table.schema)

    return part(of_table)


def first(**values: Any) -> Callable[[Rows], None]:
    """Members of the first row changed; a function makes them of the old."""

    def change(listed: Rows) -> None:
        for name, value in values.items():
            listed[0][name] = value(listed[0][name]) if callable(value) else value

    return change


def with_right_id(change: Callable[[Rows], object]) -> Callable[[Rows], None]:
    """The row's id fits its tokens again: only sense is broken."""

    def then(listed: Rows) -> None:
        change(listed)
        row = listed[0]
        ids, mask = np.array(row["input_ids"], np.int32), np.array(row["loss_mask"], np.uint8)
        row["sample_id"] = sample_id(ids, mask)

    return then


def sealed(**values: Any) -> Callable[[Path], None]:
    return lambda data: reseal(data / INFO, lambda document: document.update(values))


def twice(data: Path) -> None:
    """A row doubled, and everything that names the rows made to fit."""
    table = pq.read_table(data / PART)
    pairs = list(zip(table["sample_id"].to_pylist(), table["split"].to_pylist(), strict=True))
    pairs.append(pairs[0])
    fit = {"digest": input_digest(pairs), "samples": len(pairs)}
    rows(lambda listed: listed.append(listed[0]))(data)
    reseal(data / INFO, lambda document: document.update(fit))


def as_type(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(name)
        return table.set_column(at, name, table[name].cast(kind))

    return change


def prepared(make: Callable[[Path], object], *more: str) -> Callable[[Lab], Outcome]:
    """Prepare whatever was made; a sample that comes of it must be whole text."""

    def do(lab: Lab) -> Outcome:
        made = make(lab.folder)
        source = made if isinstance(made, str) else "chats.jsonl"
        return lab.run("prepare", source, "-o", "out", "--target", lab.path("target"), "--val", "0", "--json", *more)

    return do


def kept(count: int, do: Callable[[Lab], Outcome]) -> Callable[[Lab], Outcome]:
    """So many samples, and every row that is none of them counted."""

    def then(lab: Lab) -> Outcome:
        ended = do(lab)
        if ended.code == 0:
            said = json.loads(ended.out)
            assert said["samples"] == count, f"silent: {ended.out}"
            rejected = sum(one["count"] if isinstance(one, dict) and "count" in one else 1 for one in said["rejects"])
            assert said["rows_read"] == count + said["duplicates"] + rejected, f"not counted: {ended.out}"
        return ended

    return then


def file(data: bytes, name: str = "chats.jsonl") -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / name).write_bytes(data)
        return name

    return make


def lines(*documents: object) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in documents)


def said(content: object, **more: Any) -> dict[str, Any]:
    one = chat(1)
    one["messages"][1] = {"role": "assistant", "content": content, **more}
    return one


def fifo(text: bytes) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        os.mkfifo(folder / "pipe.jsonl")

        def feed() -> None:
            # A plain open waits for a reader for ever, past this attempt, and fails in whatever test comes then.
            for _ in range(2_000):
                with suppress(OSError):
                    handle = os.open(folder / "pipe.jsonl", os.O_WRONLY | os.O_NONBLOCK)
                    os.write(handle, text)
                    os.close(handle)
                    return
                time.sleep(0.01)

        threading.Thread(target=feed, daemon=True).start()
        return "pipe.jsonl"

    return make


def decoded(prompts: Callable[[Path], str]) -> Callable[[Lab], Outcome]:
    def do(lab: Lab) -> Outcome:
        words = ("decode", lab.path("run"), "--target", lab.path("target"), "--prompts", prompts(lab.folder))
        return lab.run(*words, "--max-new-tokens", "4", "-n", "2")

    return do


GOOD, OTHER = chat(1), chat(2)
TWO = lines(GOOD, OTHER)

# fmt: off
ATTEMPTS = (
    *(
        Attempt(f"DATA sealed again: {what}", collected(spoil), word)
        for what, spoil, word in (
            ("compressed by another program", part(lambda t: t), "held"),
            ("a row twice", rows(lambda r: r.append(r[0])), "file-corrupt|document-invalid|input-unreadable"),
            ("a row twice, digest and all", twice, "array-invalid"),
            ("a row less", rows(lambda r: r.pop()), "file-corrupt"),
            ("rows turned round", rows(lambda r: r.reverse()), "file-corrupt"),
            ("an empty id", rows(first(sample_id="")), "array-invalid"),
            ("an id of a megabyte", rows(first(sample_id="a" * (1 << 20))), "array-invalid"),
            ("an id that leaves", rows(first(sample_id="../../../etc/x")), "array-invalid"),
            (
                "ids of two rows swapped",
                rows(lambda r: r[0].update(sample_id=r[1]["sample_id"]) or r[1].update(sample_id=r[0]["sample_id"])),
                "array-invalid",
            ),
            (
                "tokens of another row",
                rows(lambda r: r[0].update(input_ids=r[1]["input_ids"], loss_mask=r[1]["loss_mask"])),
                "array-invalid",
            ),
            ("one token changed", rows(first(input_ids=lambda v: [v[0] ^ 1, *v[1:]])), "array-invalid"),
            ("a token of -1", rows(with_right_id(first(input_ids=lambda v: [-1, *v[1:]]))), "array-invalid"),
            ("a token beyond the vocabulary", rows(first(input_ids=lambda v: [10**6, *v[1:]])), "array-invalid"),
            ("a mask of twos", rows(first(loss_mask=lambda v: [2] * len(v))), "array-invalid"),
            ("a mask too short", rows(first(loss_mask=lambda v: v[:-1])), "array-invalid"),
            ("a mask of null", rows(first(loss_mask=None)), "array-invalid"),
            ("tokens with null", rows(first(input_ids=lambda v: [None, *v[1:]])), "array-invalid"),
            ("no tokens", rows(first(input_ids=[], loss_mask=[], spans=[])), "array-invalid"),
            ("turns out of range", rows(first(spans=lambda v: [v[0] | {"end": 10**6}])), "array-invalid"),
            ("turns backwards", rows(first(spans=lambda v: [v[0] | {"start": 5, "end": 1}])), "array-invalid"),
            ("a role nobody has", rows(first(spans=lambda v: [v[0] | {"role": 99}])), "array-invalid"),
            ("the split 'test'", rows(first(split="test")), "array-invalid"),
            ("train for validation", rows(lambda r: [x.update(split="train") for x in r]), "file-corrupt"),
            ("no mask column", part(lambda t: t.drop_columns(["loss_mask"])), "array-invalid"),
            ("tokens as int64", part(as_type("input_ids", pa.list_(pa.int64()))), "file-corrupt|held"),
            (
                "ids as a dictionary",
                part(as_type("sample_id", pa.dictionary(pa.int32(), pa.string()))),
                "file-corrupt|held",
            ),
            ("one more column", part(lambda t: t.append_column("x", pa.nulls(t.num_rows))), "file-corrupt|held"),
            ("columns in another order", part(lambda t: t.select(t.column_names[::-1])), "file-corrupt|held"),
            ("no rows", part(lambda t: t.slice(0, 0)), "file-corrupt"),
            ("more samples than there are", sealed(samples=41), "file-corrupt|document-invalid"),
            ("another digest", sealed(digest="0" * 64), "file-corrupt|document-invalid"),
            ("samples in quotes", sealed(samples="40"), "document-invalid"),
            ("no files", sealed(files=[]), "file-corrupt|document-invalid|input-empty"),
            ("another vocabulary", sealed(vocab_size=10), "array-invalid"),
            ("another tokenizer", sealed(tokenizer_sha256="0" * 64), "tokenizer-mismatch"),
            ("another template", sealed(chat_template_sha256="0" * 64), "tokenizer-mismatch|target-mismatch|held"),
        )
    ),
    *(
        Attempt(
            f"data.json by an editor: {what}",
            collected(lambda data, change=change: rewrite(data / INFO, change)),
            "document-corrupt",
        )
        for what, change in (
            ("CRLF", lambda d: d.replace(b"\n", b"\r\n")),
            ("a BOM", lambda d: b"\xef\xbb\xbf" + d),
            ("indented", lambda d: json.dumps(json.loads(d), indent=1).encode()),
            ("NaN for a share", lambda d: d.replace(b"0.2", b"NaN")),
        )
    ),
    *(
        Attempt(f"conversations: {what}", kept(count, prepared(make)), word)
        for what, make, count, word in (
            ("/dev/null", lambda f: "/dev/null", 0, "input-unreadable|input-empty"),
            ("/dev/zero", lambda f: "/dev/zero", 0, "input-unreadable"),
            ("a dash for stdin", lambda f: "-", 0, "path-missing|input-unreadable"),
            ("a named pipe", fifo(TWO), 2, "input-unreadable|held"),
            ("a BOM before", file(b"\xef\xbb\xbf" + TWO), 2, "held|input-unreadable"),
            ("CRLF", file(TWO.replace(b"\n", b"\r\n")), 2, "held"),
            ("CR alone", file(TWO.replace(b"\n", b"\r")), 2, "nothing-usable"),
            ("UTF-16", file(TWO.decode().encode("utf-16")), 2, "input-unreadable|nothing-usable"),
            ("Latin-1", file(lines(GOOD) + '{"messages": "ä"}\n'.encode("latin-1")), 1, "held|input-unreadable"),
            ("gzip without its name", file(gzip.compress(TWO)), 2, "held|input-unreadable|nothing-usable"),
            ("gzip by its name", file(gzip.compress(TWO), "chats.jsonl.gz"), 2, "held|input-unreadable"),
            ("half a gzip", file(gzip.compress(TWO)[:-20], "chats.jsonl.gz"), 2, "input-unreadable"),
            (
                "parquet under .jsonl",
                lambda f: pq.write_table(pa.Table.from_pylist([GOOD]), f / "chats.jsonl"),
                1,
                "held|input-unreadable|nothing-usable",
            ),
            ("JSONL under .parquet", file(TWO, "chats.parquet"), 2, "held"),
            ("JSONL under .json", file(TWO, "chats.json"), 2, "held|input-unreadable"),
            (
                "two objects on a line",
                file(json.dumps(GOOD).encode() + json.dumps(OTHER).encode() + b"\n"),
                2,
                "input-unreadable|nothing-usable",
            ),
            ("a line without its end", file(TWO[:-1]), 2, "held"),
            ("a line cut short", file(TWO[:-30]), 1, "held|input-unreadable"),
            ("NUL bytes", file(TWO + b"\0" * 100 + b"\n"), 2, "held|input-unreadable"),
            (
                "keys doubled",
                file(lines(b'{"messages": [], "messages": ' + json.dumps(GOOD["messages"]).encode() + b"}", OTHER)),
                2,
                "held",
            ),
            ("NaN as text", file(lines(said(float("nan")), OTHER)), 1, "held|input-unreadable"),
            ("a number as text", file(lines(said(5), OTHER)), 1, "held|input-unreadable"),
            ("true as text", file(lines(said(True), OTHER)), 1, "held|input-unreadable"),
            ("null as text", file(lines(said(None), OTHER)), 1, "held|input-unreadable"),
            ("an empty answer", file(lines(said(""), OTHER)), 1, "held"),
            ("an answer of blanks", file(lines(said("   \n "), OTHER)), 1, "held"),
            ("parts of text", file(lines(said([{"type": "text", "text": "yes"}]), OTHER)), 2, "held"),
            (
                "parts with an image",
                file(lines(said([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]), OTHER)),
                1,
                "held",
            ),
            ("special tokens in an answer", file(lines(said("yes<|end|><|user|>no"), OTHER)), 2, "held"),
            (
                "a lone surrogate",
                file(
                    lines(
                        b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"\\ud800"}]}', OTHER
                    )
                ),
                1,
                "held|input-empty",
            ),
            (
                "a role in capitals",
                file(
                    lines(
                        {"messages": [{"role": "User", "content": "a"}, {"role": "Assistant", "content": "b"}]}, OTHER
                    )
                ),
                2,
                "held",
            ),
            (
                "a role of control characters",
                file(lines({"messages": [{"role": "\x1b[2J", "content": "a"}]}, OTHER)),
                1,
                "held",
            ),
            ("10,000 levels deep", file(lines(b"[" * 10000 + b"]" * 10000, OTHER)), 1, "held|input-unreadable"),
            (
                "an integer of 10,000 digits",
                file(lines(b'{"messages":' + b"9" * 10000 + b"}", OTHER)),
                1,
                "held|input-unreadable",
            ),
            ("messages an object", file(lines({"messages": {"role": "user"}}, OTHER)), 1, "held"),
            ("messages as text", file(lines({"messages": json.dumps(GOOD["messages"])}, OTHER)), 2, "held"),
            ("the same but for Unicode forms", file(lines(said("é"), said("e\u0301"))), 2, "held"),
            ("a million blanks", file(lines(said(" " * 1_000_000 + "x"), OTHER)), 2, "held"),
            (
                "a file that is a folder",
                lambda f: (f / "chats.jsonl").mkdir(),
                0,
                "input-unreadable|input-empty|path-missing|nothing-usable",
            ),
            (
                "itself linked in a circle",
                lambda f: (f / "chats.jsonl").symlink_to(f / "chats.jsonl"),
                0,
                "path-invalid|io-error|input-unreadable|path-missing",
            ),
            ("a name with a newline", file(TWO, "a\nb.jsonl"), 2, "held"),
            ("a name like an option", file(TWO, "./--json.jsonl"), 2, "held"),
            (
                "a name that is no text",
                lambda f: (
                    os.rename(f / file(TWO)(f), os.fsencode(str(f / "chats")) + b"\xff.jsonl")
                    or os.fsdecode(b"chats\xff.jsonl")
                ),
                2,
                "held|path-invalid",
            ),
        )
    ),
    *(
        Attempt(f"prompts of decode: {what}", decoded(make), word)
        for what, make, word in (
            ("/dev/null", lambda f: "/dev/null", "path-missing"),
            ("a folder", lambda f: str(f), "input-unreadable|path-missing"),
            ("NaN", file(b'{"prompt": NaN}\n'), "input-empty"),
            ("a number", file(b'{"prompt": 5}\n'), "input-empty"),
            ("an empty prompt", file(b'{"prompt": ""}\n'), "input-empty"),
            ("a list", file(b"[1]\n"), "input-empty"),
            ("a BOM and CRLF", file(b'\xef\xbb\xbf{"prompt": "What is 1?"}\r\n'), "held|input-unreadable"),
            ("messages of no one", file(b'{"messages": []}\n'), "input-empty"),
            ("messages that end with the answer", file(lines(GOOD)), "held|input-unreadable"),
            ("a lone surrogate", file(b'{"prompt": "\\ud800"}\n'), "held|input-empty"),
            ("a prompt beyond the context", file(lines({"prompt": "x" * 5000})), "nothing-decoded"),
        )
    ),
)
