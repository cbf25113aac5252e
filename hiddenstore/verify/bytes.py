"""Is every byte intact: the digest of every file, the crc32c of every chunk, and the samples that a damage costs."""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from hiddenstore.codecs.base import RAW_INDEX, Encoded
from hiddenstore.commit import latest_names, read_commit
from hiddenstore.errors import CorruptionError, FormatError, HiddenstoreError, Kind
from hiddenstore.files import layout
from hiddenstore.files.damage import DAMAGE, drop_caches, require_absent, twice
from hiddenstore.files.digests import digest_for, mismatch
from hiddenstore.fs.seam import Filesystem
from hiddenstore.inspect.facts import advice_numbers, read_advice
from hiddenstore.segments.base import codes_fault, groups_of
from hiddenstore.segments.files import SegmentFiles
from hiddenstore.segments.tar import WEBDATASET
from hiddenstore.segments.tar_members import BLOCK_BYTES as TAR_BLOCK_BYTES
from hiddenstore.segments.tar_members import INDEX, TAR, UNIT_PREFIX
from hiddenstore.store import Store
from hiddenstore.targets.calibration import slice_document
from hiddenstore.threads import Lock, Threads, reading_threads
from hiddenstore.verify.profile import PROFILE_PATH, read_profile
from hiddenstore.verify.report import Advance, Finding, Report
from schemas.manifest import CommitRecord, FileEntry

AT_ONCE = 512
BLOCK_BYTES = 8 << 20
"""A multiple of a tar's blocks: no header lies in two."""
Watch = Callable[[int, bytes], None]
ABSENT_OR_SHORT = ("file-missing", "file-size", "file-short")
_NAME, _SIZE = slice(0, 100), slice(124, 136)


class TarHeaders:
    """What the index of a tar says of its headers: others read by the headers, we by the index. Both have their digest,
    so that only a program which wrote one of them wrong makes them differ. ``fault`` says in words where the first one
    does. Raises CorruptionError, FormatError: the index cannot be read."""

    def __init__(self, fs: Filesystem, record: CommitRecord) -> None:
        files = SegmentFiles(fs, record.segment, record)
        self.fault: str | None = None
        try:
            index = json.loads(files.read(INDEX))
            members = [(f"{UNIT_PREFIX}{name}", row[0], row[1]) for name, row in index["unit"].items()]
            for name, field in index["fields"].items():
                for sample, offset, size in zip(record.samples, field["offset"], field["size"], strict=True):
                    members.append((f"{sample.id}.{name}", offset, size))
            self._headers = sorted(
                (int(offset) - TAR_BLOCK_BYTES, name.encode(), int(size)) for name, offset, size in members
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise files.misfit(INDEX, f"it is no index of {TAR} ({error})") from error

    def look(self, start: int, data: bytes | memoryview) -> None:
        """Compare the headers in whole blocks of the tar, from byte ``start`` on."""
        for offset, name, size in self._headers[bisect_left(self._headers, (start,)) :]:
            place = offset - start
            if place >= len(data) or self.fault is not None:
                return
            block = bytes(data[place : place + TAR_BLOCK_BYTES])
            if block[_NAME].rstrip(b"\0") != name or _octal(block[_SIZE]) != size:
                stored = block[_NAME].rstrip(b"\0").decode("ascii", "replace")
                self.fault = (
                    f"{INDEX} calls what lies behind the header at byte {offset:,} {name.decode()} of {size:,} bytes, "
                    f"the header {stored!r} of {_octal(block[_SIZE]):,}"
                )


def _octal(text: bytes) -> int:
    try:
        return int(text.strip(b" \0"), 8)
    except ValueError:
        return -1


def check_content(store: Store, report: Report, advance: Advance) -> None:
    """Add what is damaged to ``report``. ``advance`` is told the bytes of every file read, by one thread at a time.

    Files whose size is wrong were named by the structure check and are not read again.
    """
    lock = Lock()

    def read(count: int) -> None:
        with lock:
            report.bytes_checked += count
            advance(count)

    for path, look in rarely_read_documents(store.fs):
        try:
            twice(store.fs, look, path)
        except DAMAGE as error:
            report.findings.append(Finding.of(error, path))
    report.findings += _slice(store.fs)
    for file in store.manifest.target_files:
        report.findings += _steady(store.fs, layout.TARGET_DIR, file, read)
    records = store.commits()
    with Threads(reading_threads(store.fs.prefers_few_files)) as pool:
        # A pool takes all it is given at once.
        for start in range(0, len(records), AT_ONCE):
            part = records[start : start + AT_ONCE]
            for findings, notes in pool.map(lambda record: _unit(store, record, read), part):
                report.findings += findings
                report.notes += notes
    report.samples_checked = store.totals["samples"]


def rarely_read_documents(fs: Filesystem) -> Iterator[tuple[str, Callable[[], object]]]:
    """Path and reader of what nobody reads every day: replaced commit records, the layer profile, advice."""
    for name in sorted(set(fs.list(layout.COMMITS_DIR)) - set(latest_names(fs))):
        if layout.parse_commit(name) is not None:
            yield f"{layout.COMMITS_DIR}/{name}", partial(read_commit, fs, name)
    yield PROFILE_PATH, partial(read_profile, fs)
    for number in advice_numbers(fs):
        yield layout.advice_path(number), partial(read_advice, fs, number)


@dataclass(frozen=True)
class UnitDamage:
    """Damage of one unit: ``files`` by path, and ``samples`` that cannot be read with the reason, by id.

    ``unsteady`` are paths read wrong once and right the next time: the page cache was damaged, not the disk.
    """

    files: dict[str, Finding]
    samples: dict[str, HiddenstoreError]
    unsteady: tuple[str, ...] = ()


def unit_damage(store: Store, record: CommitRecord, advance: Advance = lambda _: None) -> UnitDamage:
    """What is damaged of a unit: every file against its record, every chunk of every sample against its crc32c.

    Where a first look finds anything, a second one reads all of the unit past the page cache, and what both found
    counts. Raises StorageError: the storage refused, or a file is not there but not known to be gone."""
    first = _look(store, record, advance)
    if not first.files and not first.samples:
        return first
    paths = [f"{record.segment}/{file.path}" for file in record.files]
    drop_caches(store.fs, paths)
    second = _look(store, record)
    for path in paths:
        if store.fs.size(path) is None:
            require_absent(store.fs, path)
    files = {path: finding for path, finding in second.files.items() if path in first.files}
    samples = {name: error for name, error in second.samples.items() if name in first.samples}
    unsteady = {*first.files, *(getattr(error, "path", "") for error in first.samples.values())} - {""}
    wrong = {*files, *(getattr(error, "path", "") for error in samples.values())}
    return UnitDamage(files, samples, tuple(sorted(unsteady - wrong)))


def _look(store: Store, record: CommitRecord, advance: Advance = lambda _: None) -> UnitDamage:
    files = {}
    headers = _headers(store, record)
    for file in record.files:
        watch = headers.look if headers is not None and file.path == TAR else _unwatched
        for finding in _size(store.fs, record.segment, file) or _digest(store.fs, record.segment, file, advance, watch):
            files[finding.path] = finding
    path = f"{record.segment}/{TAR}"
    if headers is not None and headers.fault is not None and path not in files:
        # Nobody can say which of the two is right, so that no sample of them may be kept.
        files[path] = Finding("file-corrupt", path, (), headers.fault)
        message = f"{store.path}/{path} is not what its index says: {headers.fault}"
        wrong = CorruptionError(message, kind=Kind.FILE_CORRUPT, path=path)
        return UnitDamage(files, dict.fromkeys([sample.id for sample in record.samples], wrong))
    reader = store.open_unit(record)
    samples: dict[str, HiddenstoreError] = {}
    for index, sample in enumerate(record.samples):
        try:
            aux, final, _ = reader.read_encoded(index)
            reader.sample(index)
            _check_codes(store, record, aux, final)
        except DAMAGE as error:
            samples[sample.id] = error
    return UnitDamage(files, samples)


def _headers(store: Store, record: CommitRecord) -> TarHeaders | None:
    if store.manifest.container == WEBDATASET.name and record.files:
        # An index that cannot be read is named where its digest and its samples are looked at.
        with suppress(*DAMAGE):
            return TarHeaders(store.fs, record)
    return None


def _unwatched(_start: int, _data: bytes | memoryview) -> None:
    pass


def _check_codes(store: Store, record: CommitRecord, *parts: Encoded) -> None:
    """FormatError ``array-invalid`` for codes that decode to no number."""
    width = store.capture.target.hidden_size
    for group, encoded in zip(groups_of(store.capture), parts, strict=True):
        ends = list(accumulate((part.size for part in group.codec.row_parts(width)), initial=0))
        columns = {part.name: slice(*ends[i : i + 2]) for i, part in enumerate(group.codec.row_parts(width))}
        raw = encoded.small.get(RAW_INDEX, np.zeros((0, 2), dtype=np.int32))
        for layer, codes in enumerate(encoded.codes):
            fault = codes_fault(columns, codes.numpy(), raw[raw[:, 0] == layer, 1])
            if fault is not None:
                where = f"{store.path}/{record.segment}/{group.fields[layer]}"
                raise FormatError(f"{where} is not what the format allows: {fault}", kind=Kind.ARRAY_INVALID)


def _unit(store: Store, record: CommitRecord, advance: Advance) -> tuple[list[Finding], list[Finding]]:
    """Findings: damaged files, each with the samples lost, then samples lost though every file has its digest.

    And notes. A file of a wrong size is in the report already, from the structure check.
    """
    damage = unit_damage(store, record, advance)
    explained: set[str] = set()
    findings = []
    for finding in damage.files.values():
        names = tuple(name for name, error in damage.samples.items() if getattr(error, "path", "") == finding.path)
        explained.update(names)
        note = f"{len(names)} of {len(record.samples)} samples cannot be read" if names else "every sample still reads"
        if finding.kind not in ABSENT_OR_SHORT:
            findings.append(Finding(finding.kind, finding.path, names, f"{finding.detail}; {note}"))
    for name, error in damage.samples.items():
        if name not in explained and error.kind not in ABSENT_OR_SHORT:
            findings.append(Finding.of(error, record.segment, (name,)))
    detail = "it was read wrong once and right past the page cache: not the disk is damaged, but this machine's memory"
    return findings, [Finding("read-unsteady", path, (), detail) for path in damage.unsteady]


def _size(fs: Filesystem, folder: str, file: FileEntry) -> list[Finding]:
    path = f"{folder}/{file.path}"
    size = fs.size(path)
    if size == file.size:
        return []
    kind, stored = ("file-missing", "no file") if size is None else ("file-size", f"{size:,} bytes")
    return [Finding(kind, path, (), f"expected {file.size:,} bytes, found {stored}")]


def _digest(
    fs: Filesystem, folder: str, file: FileEntry, advance: Advance = lambda _: None, watch: Watch = _unwatched
) -> list[Finding]:
    """A finding for a file that has its size, but other bytes; ``watch`` is told of each part and where it starts."""
    path = f"{folder}/{file.path}"
    if fs.size(path) != file.size:
        return []
    digest = digest_for(file)
    try:
        for offset in range(0, file.size, BLOCK_BYTES):
            block = fs.read_range(path, offset, min(BLOCK_BYTES, file.size - offset))
            digest.update(block)
            watch(offset, block)
            advance(len(block))
    except DAMAGE as error:
        return [Finding.of(error, path)]
    detail = mismatch(file, digest)
    return [] if detail is None else [Finding("file-corrupt", path, (), detail)]


def _steady(fs: Filesystem, folder: str, file: FileEntry, advance: Advance = lambda _: None) -> list[Finding]:
    """``_digest``, confirmed by a second look past the page cache."""
    if not _digest(fs, folder, file, advance):
        return []
    drop_caches(fs, [f"{folder}/{file.path}"])
    return _digest(fs, folder, file)


def _slice(fs: Filesystem) -> list[Finding]:
    """A slice whose file has its size, but other bytes; the structure check finds the rest."""
    with suppress(*DAMAGE):
        document = slice_document(fs)
        if document is not None:
            folder, _, name = layout.slice_path(document.file_sha256).rpartition("/")
            return _steady(fs, folder, FileEntry(path=name, size=document.size, sha256=document.file_sha256))
    return []
