"""Is every byte intact: the sha256 of every file, the crc32c of every chunk, and the samples that a damage costs."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from hiddenstore import layout
from hiddenstore.commit import latest_names, read_commit
from hiddenstore.errors import CorruptionError, HiddenstoreError, Kind, NotFoundError
from hiddenstore.fs.seam import Filesystem
from hiddenstore.inspect.facts import advice_numbers, read_advice
from hiddenstore.store import Store
from hiddenstore.targets.calibration import slice_document
from hiddenstore.verify.profile import PROFILE_PATH, read_profile
from hiddenstore.verify.report import Advance, Finding, Report
from schemas.manifest import CommitRecord, FileEntry

THREADS = 4
BLOCK_BYTES = 8 << 20


def check_content(store: Store, report: Report, advance: Advance, threads: int = THREADS) -> None:
    """Add what is damaged to ``report``. ``advance`` is told the bytes of every file read.

    Files whose size is wrong were named by the structure check and are not read again.
    """
    for path, read in rarely_read_documents(store.fs):
        try:
            read()
        except HiddenstoreError as error:
            report.findings.append(Finding.of(error, path))
    report.findings += _slice(store.fs)
    for file in store.manifest.target_files:
        report.findings += _file(store.fs, layout.TARGET_DIR, file, advance)
        report.bytes_checked += file.size
    records = store.commits()
    with ThreadPoolExecutor(threads) as pool:
        for findings in pool.map(lambda record: _unit(store, record, advance), records):
            report.findings += findings
    report.bytes_checked += sum(record.bytes_stored for record in records)
    report.samples_checked = sum(len(record.samples) for record in records)


def rarely_read_documents(fs: Filesystem) -> Iterator[tuple[str, Callable[[], object]]]:
    """Path and reader of what nobody reads every day: replaced commit records, the layer profile, advice."""
    for name in sorted(set(fs.list(layout.COMMITS_DIR)) - set(latest_names(fs))):
        if layout.parse_commit(name) is not None:
            yield f"{layout.COMMITS_DIR}/{name}", partial(read_commit, fs, name)
    yield PROFILE_PATH, partial(read_profile, fs)
    for number in advice_numbers(fs):
        yield layout.advice_path(number), partial(read_advice, fs, number)


def unreadable_samples(store: Store, record: CommitRecord) -> dict[str, HiddenstoreError]:
    """Samples of a unit that cannot be read, each with the reason; every chunk of the others passed its crc32c."""
    reader = store.open_unit(record)
    errors: dict[str, HiddenstoreError] = {}
    for index, sample in enumerate(record.samples):
        try:
            reader.read_encoded(index)
            reader.sample(index)
        except HiddenstoreError as error:
            errors[sample.id] = error
    return errors


def damaged_files(fs: Filesystem, record: CommitRecord) -> list[str]:
    """Files of a segment that are not, byte for byte, what its commit record names."""
    wrong_size = [file.path for file in record.files if fs.size(f"{record.segment}/{file.path}") != file.size]
    return wrong_size + [f.path for file in record.files for f in _file(fs, record.segment, file)]


def _unit(store: Store, record: CommitRecord, advance: Advance) -> list[Finding]:
    """Damaged files, each with the samples lost; then samples lost though every file has its digest."""
    damaged = [finding for file in record.files for finding in _file(store.fs, record.segment, file, advance)]
    lost = unreadable_samples(store, record)
    explained: set[str] = set()
    findings = []
    for finding in damaged:
        names = tuple(name for name, error in lost.items() if getattr(error, "path", "") == finding.path)
        explained.update(names)
        note = f"{len(names)} of {len(record.samples)} samples cannot be read" if names else "every sample still reads"
        findings.append(Finding(finding.kind, finding.path, names, f"{finding.detail}; {note}"))
    for name, error in lost.items():
        # A unit with a file gone is in the report already, from the structure check.
        if name not in explained and error.kind not in (Kind.FILE_MISSING, Kind.FILE_SIZE, Kind.FILE_SHORT):
            findings.append(Finding.of(error, record.segment, (name,)))
    return findings


def _file(fs: Filesystem, folder: str, file: FileEntry, advance: Advance = lambda _: None) -> list[Finding]:
    path = f"{folder}/{file.path}"
    if fs.size(path) != file.size:
        return []
    digest = hashlib.sha256()
    try:
        for offset in range(0, file.size, BLOCK_BYTES):
            block = fs.read_range(path, offset, min(BLOCK_BYTES, file.size - offset))
            digest.update(block)
            advance(len(block))
    except (CorruptionError, NotFoundError) as error:
        return [Finding.of(error, path)]
    if digest.hexdigest() == file.sha256:
        return []
    detail = f"expected sha256 {file.sha256[:16]}…, found {digest.hexdigest()[:16]}…"
    return [Finding("file-corrupt", path, (), detail)]


def _slice(fs: Filesystem) -> list[Finding]:
    """A slice whose file has its size, but other bytes; the structure check finds the rest."""
    with suppress(HiddenstoreError):
        document = slice_document(fs)
        if document is not None:
            folder, _, name = layout.slice_path(document.file_sha256).rpartition("/")
            return _file(fs, folder, FileEntry(path=name, size=document.size, sha256=document.file_sha256))
    return []
