"""Is every byte intact: the sha256 of every file, the crc32c of every chunk, and the samples that a damage costs."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from hiddenstore import layout
from hiddenstore.advise.document import advice_numbers, read_advice
from hiddenstore.calibration import slice_document
from hiddenstore.commit import latest_names, read_commit
from hiddenstore.errors import CorruptionError, HiddenstoreError, NotFoundError
from hiddenstore.fs import Filesystem
from hiddenstore.segment import open_segment
from hiddenstore.store import Store
from hiddenstore.verify.profile import PROFILE_PATH, read_profile
from hiddenstore.verify.report import Advance, Finding, Report
from schemas.manifest import CommitRecord, FileEntry

THREADS = 4
BLOCK_BYTES = 8 << 20


def check_content(store: Store, report: Report, advance: Advance, threads: int = THREADS) -> None:
    """Add what is damaged to ``report``. ``advance`` is told the bytes of every file read.

    Files whose size is wrong were found by the structure check and are not read again.
    """
    fs = store.fs
    report.findings += [*_documents(fs), *_slice(fs)]
    for file in store.manifest.target_files:
        report.findings += _file(fs, layout.TARGET_DIR, file, advance)
        report.bytes_checked += file.size
    with ThreadPoolExecutor(threads) as pool:
        for findings in pool.map(lambda record: _unit(store, record, advance), store.commits()):
            report.findings += findings
    report.bytes_checked += sum(record.bytes_stored for record in store.commits())
    report.samples_checked = sum(len(record.samples) for record in store.commits())


def bytes_of(store: Store) -> int:
    """What ``check_content`` will read, for a progress bar."""
    target = sum(file.size for file in store.manifest.target_files)
    return target + sum(record.bytes_stored for record in store.commits())


def unreadable_samples(store: Store, record: CommitRecord) -> dict[str, HiddenstoreError]:
    """Samples of a unit that cannot be read, each with the reason; every chunk of the others passed its crc32c."""
    reader = open_segment(store, record)
    bad: dict[str, HiddenstoreError] = {}
    for index, sample in enumerate(record.samples):
        try:
            reader.read_encoded(index)
            reader.sample(index)
        except HiddenstoreError as error:
            bad[sample.id] = error
    return bad


def damaged_files(fs: Filesystem, record: CommitRecord) -> list[str]:
    """Files of a segment that are not, byte for byte, what its commit record names."""
    wrong_size = [file.path for file in record.files if fs.size(f"{record.segment}/{file.path}") != file.size]
    return wrong_size + [f.path for file in record.files for f in _file(fs, record.segment, file, lambda _: None)]


def _unit(store: Store, record: CommitRecord, advance: Advance) -> list[Finding]:
    """Damaged files, each with the samples lost; then samples lost though every file has its digest."""
    damaged = [finding for file in record.files for finding in _file(store.fs, record.segment, file, advance)]
    lost = unreadable_samples(store, record)
    blamed: set[str] = set()
    findings = []
    for finding in damaged:
        names = tuple(name for name, error in lost.items() if getattr(error, "path", "") == finding.path)
        blamed.update(names)
        note = f"{len(names)} of {len(record.samples)} samples cannot be read" if names else "every sample still reads"
        findings.append(Finding(finding.kind, finding.path, names, f"{finding.detail}; {note}"))
    rest = {name: error for name, error in lost.items() if name not in blamed}
    # A unit with a file gone is in the report already, from the structure check.
    unseen = {name: e for name, e in rest.items() if e.kind not in ("file-missing", "file-size", "file-short")}
    findings += [Finding.of(error, record.segment, (name,)) for name, error in unseen.items()]
    return findings


def _file(fs: Filesystem, folder: str, file: FileEntry, advance: Advance) -> list[Finding]:
    path = f"{folder}/{file.path}"
    if fs.size(path) != file.size:
        return []
    digest = hashlib.sha256()
    try:
        for block in _blocks(fs, path, file.size):
            digest.update(block)
            advance(len(block))
    except (CorruptionError, NotFoundError) as error:
        return [Finding.of(error, path)]
    if digest.hexdigest() != file.sha256:
        detail = f"expected sha256 {file.sha256[:16]}…, found {digest.hexdigest()[:16]}…"
        return [Finding("file-corrupt", path, (), detail)]
    return []


def _blocks(fs: Filesystem, path: str, size: int) -> Iterator[bytes]:
    for offset in range(0, size, BLOCK_BYTES):
        yield fs.read_range(path, offset, min(BLOCK_BYTES, size - offset))


def _documents(fs: Filesystem) -> Iterator[Finding]:
    """What nobody reads every day: replaced commit records, the calibration, advice."""
    for name in sorted(set(fs.list(layout.COMMITS_DIR)) - set(latest_names(fs))):
        if layout.parse_commit(name) is not None:
            try:
                read_commit(fs, name)
            except HiddenstoreError as error:
                yield Finding.of(error, f"{layout.COMMITS_DIR}/{name}")
    try:
        read_profile(fs)
    except HiddenstoreError as error:
        yield Finding.of(error, PROFILE_PATH)
    for number in advice_numbers(fs):
        try:
            read_advice(fs, number)
        except HiddenstoreError as error:
            yield Finding.of(error, layout.advice_path(number))


def _slice(fs: Filesystem) -> list[Finding]:
    """A slice whose file has its size, but other bytes; the structure check finds the rest."""
    with suppress(HiddenstoreError):
        document = slice_document(fs)
        if document is not None:
            path = layout.slice_path(document.file_sha256)
            folder, name = path.split("/")
            return _file(
                fs, folder, FileEntry(path=name, size=document.size, sha256=document.file_sha256), lambda _: None
            )
    return []
