"""Attempts on stores: copied by halves, by other programs, renamed, edited, sealed again by somebody hostile."""

import json
import os
import shutil
import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.accepting import repair_words
from tests.attacks.second.lab import Attempt, Lab, Outcome, commit_of, reseal, rewrite, segment_of, set_file

Spoil = Callable[[Path], object]


def after(spoil: Spoil, *words: str, of: str = "units") -> Callable[[Lab], Outcome]:
    """Spoil a copy of a store, then run a command on it."""

    def do(lab: Lab) -> Outcome:
        store = lab.copy(of, "store")
        spoil(store)
        return lab.run(words[0], store, *words[1:])

    return do


def held(spoil: Spoil, of: str = "units") -> Callable[[Lab], Outcome]:
    """Spoil a copy, see it whole, and all its samples the same."""

    def do(lab: Lab) -> Outcome:
        store = lab.copy(of, "store")
        spoil(store)
        ended = lab.run("verify", store, "--full")
        lab.require_same(store, of)
        return ended

    return do


def collected_again(spoil: Spoil, of: str = "units") -> Callable[[Lab], Outcome]:
    """Spoil a copy, let the same collect finish, and see nothing lost."""

    def do(lab: Lab) -> Outcome:
        store = lab.copy(of, "store")
        spoil(store)
        ended = lab.collect(lab.path("data"), store)
        if ended.code == 0:
            lab.require_same(store, of)
            return lab.run("verify", store, "--full")
        return ended

    return do


def noted(spoil: Spoil, words: str) -> Callable[[Lab], Outcome]:
    """No damage, but verify says what is missing."""

    def do(lab: Lab) -> Outcome:
        ended = after(spoil, "verify")(lab)
        assert words in ended.out, f"silent: {ended.out}"
        return ended

    return do


def moved(name: str) -> Spoil:
    """A folder of the store lies on another disk, behind a link."""

    def spoil(store: Path) -> None:
        (store / name).rename(store.parent / "elsewhere")
        (store / name).symlink_to(store.parent / "elsewhere")

    return spoil


def drop(*globs: str) -> Spoil:
    def spoil(store: Path) -> None:
        for glob in globs:
            paths = sorted(store.glob(glob))
            assert paths, glob
            for path in paths:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return spoil


def edit(glob: str, change: Callable[[bytes], bytes]) -> Spoil:
    """The first file of that name changed by some other program."""

    def spoil(store: Path) -> None:
        path = sorted(path for path in store.glob(glob) if path.is_file())[0]
        rewrite(path, change)

    return spoil


def add(name: str, data: bytes | Callable[[Path], bytes] = b"x") -> Spoil:
    def spoil(store: Path) -> None:
        path = store / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data(store) if callable(data) else data)

    return spoil


def sealed(glob: str, change: Callable[[dict[str, Any]], object]) -> Spoil:
    return lambda store: reseal(sorted(store.glob(glob))[0], change)


def first_record(store: Path) -> bytes:
    return commit_of(store).read_bytes()


def put(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    """One value of a document set."""

    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return change


def crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def pretty(data: bytes) -> bytes:
    return json.dumps(json.loads(data), indent=2).encode() + b"\n"


def tar_index(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """A tar's index rewritten and the record made to fit."""

    def spoil(store: Path) -> None:
        index = json.loads((segment_of(store) / "index.json").read_bytes())
        change(index)
        data = json.dumps(index, sort_keys=True, separators=(",", ":")).encode()
        set_file(commit_of(store), "index.json", data)

    return spoil


def first_field(index: dict[str, Any], *names: str) -> dict[str, Any]:
    fields: dict[str, Any] = index["fields"]
    return fields[names[0] if names else "layer_1.npy" if "layer_1.npy" in fields else sorted(fields)[0]]


def swap(what: str) -> Callable[[dict[str, Any]], None]:
    """Two samples' members stand in each other's place."""

    def change(index: dict[str, Any]) -> None:
        for field in index["fields"].values() if what == "all" else (first_field(index, what),):
            for values in field.values():
                values[0], values[1] = values[1], values[0]

    return change


def lie(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda index: first_field(index)[key].__setitem__(0, value)


def layers_swapped(index: dict[str, Any]) -> None:
    """What only a look at the states can tell: every digest and checksum fits."""
    fields = index["fields"]
    fields["layer_1.npy"], fields["layer_2.npy"] = fields["layer_2.npy"], fields["layer_1.npy"]


def repacked(*words: str) -> Spoil:
    """GNU tar unpacks and packs again what it found."""

    def spoil(store: Path) -> None:
        tar = segment_of(store) / "samples.tar"
        folder = store.parent / "unpacked"
        folder.mkdir()
        subprocess.run(["tar", "xf", tar, "-C", folder], check=True)
        subprocess.run(["tar", "cf", tar, "-C", folder, *words, "."], check=True)

    return spoil


def appended(store: Path) -> None:
    tar = segment_of(store) / "samples.tar"
    (store.parent / "more").write_text("more")
    subprocess.run(["tar", "rf", tar, "-C", store.parent, "more"], check=True)


def table(change: Callable[[Any], Any]) -> Spoil:
    """The input's parquet written again by a stock program."""

    def spoil(store: Path) -> None:
        path = next((store / "inputs").glob("*.parquet"))
        pq.write_table(change(pq.read_table(path)), path)

    return spoil


def with_column(name: str, change: Callable[[list[Any]], list[Any]]) -> Callable[[Any], Any]:
    def column(rows: Any) -> Any:
        import pyarrow as pa

        values = change(rows[name].to_pylist())
        at = rows.schema.get_field_index(name)
        return rows.set_column(at, rows.schema.field(at), pa.array(values, rows.schema.field(at).type))

    return column


def sparse(store: Path) -> None:
    """A backup program keeps the size and loses the bytes."""
    path = segment_of(store) / "layer_1/c/0/0"
    size = path.stat().st_size
    path.write_bytes(b"")
    os.truncate(path, size)


def renamed_unit(store: Path) -> None:
    path = commit_of(store)
    path.rename(path.with_name(path.name.upper().replace(".JSON", ".json")))


def copied_unit(name: str) -> Spoil:
    return lambda store: shutil.copy(commit_of(store), store / "commits" / name.format(commit_of(store).stem))


def hard_links(lab: Lab) -> Outcome:
    """`cp -al` to try a repair and a gc on a copy whose files are the original's."""
    store, copied = lab.copy("units"), lab.folder / "linked"
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    subprocess.run(["cp", "-al", store, copied], check=True)
    (segment_of(copied) / "layer_1/c/0/0").unlink()
    lab.run(*repair_words(copied))
    lab.run("gc", copied, "-y", "--older-than", "0s", "--abandoned")
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before, "lost"
    return lab.run("verify", store, "--full")


def from_another_store(lab: Lab) -> Outcome:
    """A unit of a store of another target under a name that is read first, record and segment, dropped in."""
    store, other = lab.copy("units"), lab.path("other_store")
    shutil.copy(commit_of(other), store / "commits" / "aaa.json")
    reseal(store / "commits" / "aaa.json", put("unit", value="aaa"))
    shutil.copytree(segment_of(other), store / "segments" / segment_of(other).name)
    return lab.run("verify", store, "--meaning", "--share", "1")


def mixed(lab: Lab) -> Outcome:
    """store.json of one target over the units of another, as rsync of two stores into one folder leaves it."""
    store = lab.copy("units")
    for path in lab.path("other_store").rglob("*"):
        if path.is_file():
            aim = store / path.relative_to(lab.path("other_store"))
            aim.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, aim)
    return lab.run("verify", store, "--full", "--meaning", "--share", "1")


def unicode_name(form: str) -> Callable[[Lab], Outcome]:
    def do(lab: Lab) -> Outcome:
        store = lab.copy("units", unicodedata.normalize(form, "Ünïté 数据"))
        lab.collect(lab.path("data"), store)
        lab.require_same(store, "units")
        return lab.run("verify", store, "--full", "--json")

    return do


def through_a_link(lab: Lab) -> Outcome:
    store, link = lab.copy("units"), lab.folder / "link"
    (store / "commits" / commit_of(store).name).unlink()
    link.symlink_to(store)
    lab.collect(lab.path("data"), link)
    lab.require_same(link, "units")
    return lab.run("verify", link, "--full")


def dangling(lab: Lab) -> Outcome:
    (lab.folder / "store").symlink_to(lab.folder / "gone")
    return lab.collect(lab.path("data"), lab.folder / "store")


def loop(lab: Lab) -> Outcome:
    (lab.folder / "store").symlink_to(lab.folder / "store")
    return lab.collect(lab.path("data"), lab.folder / "store")


def skewed(when: float) -> Callable[[Lab], Outcome]:
    """Every file dated by a clock that was wrong; gc must take nothing that counts."""

    def do(lab: Lab) -> Outcome:
        store = lab.copy("units")
        for path in [store, *store.rglob("*")]:
            os.utime(path, (when, when))
        lab.run("gc", store, "-y")
        lab.run("gc", store, "-y", "--older-than", "0s", "--abandoned")
        lab.require_same(store, "units")
        return lab.run("verify", store, "--full")

    return do


def onto_itself(lab: Lab) -> Outcome:
    store = lab.copy("units")
    lab.run("copy", store, store)
    lab.run("copy", store, store / "segments" / "inner")
    lab.require_same(store, "units")
    return lab.run("verify", store, "--full")


def twice_linked(lab: Lab) -> Outcome:
    """The same store under two names: merged with itself, nothing doubles."""
    store, link = lab.copy("units"), lab.folder / "link"
    link.symlink_to(store)
    lab.run("copy", store, link, lab.folder / "both")
    lab.require_same(lab.folder / "both", "units")
    return lab.run("verify", lab.folder / "both", "--full")


RECORD, STORE, INPUT = "commits/*.json", "store.json", "inputs/*.parquet"
NOISE = (
    "commits/.DS_Store", "commits/._a.json", "commits/Thumbs.db", "commits/a.json.swp", "commits/a (1).json",
    "commits/a.sync-conflict-20261122.json", "commits/.nfs000001", "commits/a.json~", "commits/a.JSON",
    "segments/.DS_Store", "inputs/.~lock.x#", "snapshots/.DS_Store", "calibration/desktop.ini", "index/readme.txt",
    "target/.git", "README.txt", "lost+found",
)  # fmt: skip

# fmt: off
ATTEMPTS = (
    *(Attempt(f"noise of other programs: {name}", held(add(name)), "held|findings") for name in NOISE),
    Attempt("segments lie behind a link", held(moved("segments")), "held"),
    Attempt("commits lie behind a link", held(moved("commits")), "held"),
    Attempt("target lies behind a link", held(moved("target")), "held"),
    Attempt("the store is opened through a link", through_a_link, "held"),
    Attempt("the store is a link to nothing", dangling, "absence-unknown"),
    Attempt("the store is a link to itself", loop, "path-invalid|io-error"),
    Attempt("half of rsync: records without segments", after(drop("segments/*"), "verify"), "findings"),
    Attempt(
        "half of rsync: records without segments, trained",
        after(drop("segments/*"), "train", "-o", "run"),
        "file-missing",
    ),
    Attempt("half of rsync: segments without records", collected_again(drop("commits/*")), "held"),
    Attempt("half of rsync: one record is not there yet", collected_again(lambda s: commit_of(s, 1).unlink()), "held"),
    Attempt("half of rsync: no store.json", after(drop("store.json"), "info"), "store-missing"),
    Attempt("half of rsync: no store.json, collected into", collected_again(drop("store.json")), "held|store-missing"),
    Attempt("half of rsync: no target/", after(drop("target"), "verify"), "findings"),
    Attempt("half of rsync: no inputs/", noted(drop("inputs"), "is not there"), "held"),
    Attempt("half of rsync: no calibration/", collected_again(drop("calibration")), "held"),
    Attempt("hard links: repair and gc of the copy leave the original", hard_links, "held"),
    Attempt("a record of no bytes", after(edit(RECORD, lambda d: b""), "verify"), "findings"),
    Attempt("a record of no bytes, collected over", collected_again(edit(RECORD, lambda d: b"")), "document-corrupt"),
    Attempt(
        "a record of zeros of its length",
        after(edit(RECORD, lambda d: bytes(len(d))), "train", "-o", "run"),
        "document-corrupt",
    ),
    *(
        Attempt(f"git or an editor: {how} {glob}", after(edit(glob, change), "verify"), "findings")
        for glob in (RECORD, STORE)
        for how, change in (
            ("CRLF in", crlf),
            ("a BOM before", lambda d: b"\xef\xbb\xbf" + d),
            ("indented", pretty),
            ("a second newline after", lambda d: d + b"\n"),
            ("no newline after", lambda d: d.rstrip()),
            ("UTF-16 for", lambda d: d.decode().encode("utf-16")),
        )
    ),
    Attempt("a record names its digest twice", after(edit(RECORD, lambda d: d[:-2] + d[-79:]), "verify"), "findings"),
    *(
        Attempt(f"sealed again: {what}", after(sealed(RECORD, change), "verify", "--full"), "findings")
        for what, change in (
            ("tokens of a sample as text", put("samples", 0, "tokens", value="12")),
            ("tokens of a sample as a float", put("samples", 0, "tokens", value=12.5)),
            ("tokens of a sample true", put("samples", 0, "tokens", value=True)),
            ("2^63 tokens", put("samples", 0, "tokens", value=1 << 63)),
            ("an id of another sample", lambda d: d["samples"][0].update(id=d["samples"][1]["id"])),
            ("an id that is no digest of its tokens", put("samples", 0, "id", value="0" * 32)),
            ("two samples change places", lambda d: d["samples"].__setitem__(slice(0, 2), d["samples"][1::-1])),
            ("validation for train", put("samples", 0, "split", value="test")),
            (
                "supervised tokens one more",
                lambda d: d["samples"][0].update(supervised=d["samples"][0]["supervised"] + 1),
            ),
            ("format 2", put("format", value=2)),
            ("format as text", put("format", value="1")),
            ("an unknown member", put("surprise", value=1)),
            ("another unit's name", put("unit", value="other")),
            ("no files", put("files", value=[])),
            ("a file named twice", lambda d: d["files"].append(d["files"][0])),
            ("no samples", put("samples", value=[])),
            ("the segment of another unit", put("segment", value="segments/other-00000000")),
            (
                "a sample stored and rejected",
                lambda d: d.update(rejects=[{"id": d["samples"][0]["id"], "tokens": 1, "reason": "x", "detail": ""}]),
            ),
        )
    ),
    *(
        Attempt(f"store.json sealed again: {what}", after(sealed(STORE, change), "verify", "--full", "--meaning"), word)
        for what, change, word in (
            ("another layer", put("capture", "aux_layers", value=[0, 1, 3]), "findings|array-invalid"),
            ("layers in another order", put("capture", "aux_layers", value=[2, 1, 0]), "findings"),
            ("post-norm for pre-norm", put("capture", "final_norm", value="post_norm"), "findings"),
            ("another eps of the norm", put("head", "norm_eps", value=1.0), "findings"),
            ("q4 for q8", put("capture", "codecs", "aux", value="q4"), "findings|array-invalid"),
            ("bf16 for q8", put("capture", "codecs", "aux", value="bf16"), "findings|array-invalid"),
            (
                "a codec nobody has",
                put("capture", "codecs", "aux", value="zip"),
                "name-unknown|plugin-missing|document-invalid",
            ),
            ("webdataset for zarr", put("container", value="webdataset"), "findings"),
            (
                "twice the width",
                put("capture", "target", "hidden_size", value=128),
                "findings|head-invalid|head-corrupt",
            ),
            (
                "a smaller vocabulary",
                put("capture", "target", "vocab_size", value=10),
                "findings|head-invalid|head-corrupt",
            ),
            ("final: all", put("capture", "final", value="all"), "findings"),
            ("final: none", put("capture", "final", value="none"), "held"),
            ("untied for tied", put("head", "tied", value=True), "findings|head-invalid|head-corrupt"),
        )
    ),
    *(
        Attempt(f"a record copied as {name}", after(copied_unit(name), "verify", "--full"), "held|findings")
        for name in (
            "copy.json",
            "{}.r1.json",
            "{}.r01.json",
            "{}.r0.json",
            "{}.r-1.json",
            "{}.r99999999999999999999.json",
        )
    ),
    *(
        Attempt(f"a record copied as {name}, read", held(copied_unit(name)), "held")
        for name in ("{}.r01.json", "{}.r0.json", "{}.r99999999999999999999.json")
    ),
    Attempt(
        "sealed again: the input of nobody", noted(sealed(RECORD, put("input", value="0" * 64)), "is not there"), "held"
    ),
    Attempt("a record renamed in capitals", after(renamed_unit, "verify"), "findings"),
    Attempt(
        "a folder in a record's place",
        after(lambda s: (s / "commits/z.json").mkdir(), "verify"),
        "findings|io-error|absence-unknown",
    ),
    Attempt("a unit of another target's store dropped in", from_another_store, "findings"),
    Attempt(
        "two stores of different targets unpacked over each other",
        mixed,
        "findings|snapshot-mismatch|target-file-corrupt|head-corrupt|store-invalid",
    ),
    Attempt("a shard became sparse", after(sparse, "verify"), "held|findings"),
    Attempt("a shard became sparse, every byte checked", after(sparse, "verify", "--full"), "findings"),
    Attempt(
        "a shard became sparse, trained",
        after(sparse, "train", "-o", "run", "train.max_steps=2", "data.pack_tokens=256", "data.batch_tokens=2048"),
        "chunk-corrupt|shard-index",
    ),
    *(
        Attempt(f"GNU tar packs {how}", after(repacked(*words), "verify", of="tars"), "findings")
        for how, words in (
            ("in its own order", ()),
            ("sorted, as ustar", ("--format=ustar", "--sort=name")),
            ("as pax", ("--format=pax",)),
            ("compressed", ("-z",)),
        )
    ),
    Attempt("GNU tar appends a file", after(appended, "verify", "--full", of="tars"), "findings"),
    *(
        Attempt(f"a tar's index lies: {what}", after(tar_index(change), "verify", "--full", of="tars"), "findings")
        for what, change in (
            ("two samples' states change places", swap("layer_1.npy")),
            ("two samples' tokens change places", swap("input_ids.npy")),
            ("two samples change places", swap("all")),
            ("a negative offset", lie("offset", -512)),
            ("an offset beyond the end", lie("offset", 1 << 40)),
            ("an offset of 2^70", lie("offset", 1 << 70)),
            ("an offset as text", lie("offset", "0")),
            ("an offset that is true", lie("offset", True)),
            ("a size of zero", lie("size", 0)),
            ("a size of 2^40", lie("size", 1 << 40)),
            ("no crc", lie("crc32c", None)),
            ("a list too short", lambda i: first_field(i)["offset"].pop()),
            ("a list too long", lambda i: [v.append(v[-1]) for v in first_field(i).values()]),
            ("no states of a layer", lambda i: i["fields"].pop("layer_1.npy")),
            ("a field that is a list", lambda i: i["fields"].update({"layer_1.npy": [1, 2]})),
            ("no fields", lambda i: i.pop("fields")),
            ("fields null", lambda i: i.update(fields=None)),
            ("no unit", lambda i: i.pop("unit")),
            ("a unit's member of two numbers", lambda i: i["unit"].update({k: v[:2] for k, v in i["unit"].items()})),
        )
    ),
    Attempt("a tar's index lies: a layer under another's name, judged by meaning", after(tar_index(layers_swapped), "verify", "--meaning", "--share", "1", of="tars"), "findings"),
    Attempt("an input written again by pyarrow", after(table(lambda t: t), "verify", "--full"), "held|findings"),
    Attempt(
        "an input without its metadata", after(table(lambda t: t.replace_schema_metadata({})), "verify"), "findings"
    ),
    Attempt("an input with a row less", after(table(lambda t: t.slice(1)), "verify"), "findings"),
    Attempt(
        "an input with its rows turned round",
        after(table(lambda t: t.take(list(range(t.num_rows))[::-1])), "verify"),
        "findings",
    ),
    Attempt(
        "an input whose unit leaves the store",
        after(table(with_column("unit", lambda v: ["../../x"] * len(v))), "verify"),
        "findings",
    ),
    Attempt(
        "an input whose tokens are null",
        after(table(with_column("tokens", lambda v: [None] * len(v))), "verify"),
        "findings",
    ),
    Attempt("an input that is empty", after(edit(INPUT, lambda d: b""), "verify"), "findings"),
    Attempt(
        "an input that is empty, collected over",
        collected_again(edit(INPUT, lambda d: b"")),
        "document-corrupt|file-corrupt|held",
    ),
    Attempt("every file dated 2106", skewed(4294967295), "held"),
    Attempt("every file dated 1970", skewed(0), "held"),
    Attempt("a store copied onto and into itself", onto_itself, "held"),
    Attempt("a store merged with itself under another name", twice_linked, "held"),
    *(Attempt(f"a folder named in Unicode {form}", unicode_name(form), "held") for form in ("NFC", "NFD")),
)
