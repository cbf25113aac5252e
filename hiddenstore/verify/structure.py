"""Is everything there: documents, target files, commits, their files in their sizes, units of the inputs.

Reads metadata only, never a segment's bytes.
"""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from hiddenstore import layout
from hiddenstore.commit import Commit, committed_units, lost_samples, read_snapshot, scan_commits
from hiddenstore.console.text import plural
from hiddenstore.damage import DAMAGE, drop_caches, require_absent, twice
from hiddenstore.documents import load
from hiddenstore.errors import ConfigError, CorruptionError, Kind
from hiddenstore.fs.seam import TEMP_PREFIX, Filesystem
from hiddenstore.inputs import registered_inputs
from hiddenstore.store import Store, load_snapshot
from hiddenstore.targets.calibration import SLICE_PATH, slice_document, unnamed_slices
from hiddenstore.verify.garbage import leftovers, unnamed_segments
from hiddenstore.verify.report import Finding, Report
from schemas.manifest import CommitRecord, StoreManifest

THREADS = 8
SHOWN = 3
_FATES = {
    "orphan": "no commit names it, and none can: its writer was stopped or came second; hiddenstore gc removes it",
    "superseded": "a later record replaced the one that names it; hiddenstore gc removes it",
    "frozen": "a later record replaced the one that names it; a snapshot names that, so it stays",
    "unfinished": "no commit names it yet: its writer is at work or was stopped; gc --abandoned gives it up",
}


def check_structure(fs: Filesystem, report: Report) -> Store | None:
    """Add what is wrong to ``report``; returns the store with every commit that can be read, None without store.json.

    A damaged ``store.json`` is a finding, and what can be checked without it still is.
    """
    manifest = _manifest(fs, report)
    scan = scan_commits(fs)
    report.findings += [Finding.of(error) for error in scan.damaged]
    records = [commit.record for commit in scan.commits]
    report.units = len(records)
    report.samples = sum(len(record.samples) for record in records)
    report.files = sum(len(record.files) for record in records)
    with ThreadPoolExecutor(THREADS) as pool:
        for findings in pool.map(lambda record: list(_files_of(fs, record)), records):
            report.findings += findings
    report.findings += [*_inputs(fs, scan.commits), *_snapshots(fs), *_calibration(fs)]
    for finding, is_error in _duplicates(records):
        (report.findings if is_error else report.notes).append(finding)
    report.notes += [*_unregistered(fs, records), *_pending(scan.commits), *_garbage(fs, scan.commits)]
    return None if manifest is None else Store(fs, manifest, scan)


def _manifest(fs: Filesystem, report: Report) -> StoreManifest | None:
    try:
        manifest = twice(fs, lambda: load(fs, layout.STORE_JSON, StoreManifest), layout.STORE_JSON)
    except DAMAGE as error:
        report.findings.append(Finding.of(error, layout.STORE_JSON))
        return None
    if layout.HEAD_NAME not in [file.path for file in manifest.target_files]:
        detail = f"{layout.STORE_JSON} names no {layout.HEAD_PATH}: there is no way to logits"
        report.findings.append(Finding("head-missing", layout.STORE_JSON, (), detail))
    for file in manifest.target_files:
        report.findings += _size(fs, f"{layout.TARGET_DIR}/{file.path}", file.size)
    return manifest


def _files_of(fs: Filesystem, record: CommitRecord) -> Iterator[Finding]:
    samples = tuple(sample.id for sample in record.samples)
    for file in record.files:
        yield from _size(fs, f"{record.segment}/{file.path}", file.size, samples)


def require_files(store: Store) -> None:
    """Raise CorruptionError for the first file of ``store`` that is missing or has another size; one stat a file."""
    with ThreadPoolExecutor(THREADS) as pool:
        wrong = pool.map(lambda record: next(_files_of(store.fs, record), None), store.commits())
        first = next((finding for finding in wrong if finding is not None), None)
    if first is not None:
        raise CorruptionError(
            f"{store.path}/{first.path} is damaged: {first.detail} (all {plural(len(first.samples), 'sample')} of its "
            "unit)",
            kind=Kind(first.kind),  # type: ignore[call-arg]  # mypy takes __new__ for the lookup
            hint=shlex.join(["hiddenstore", "repair", store.path]),
            path=first.path,
            samples=first.samples,
        )


def _size(fs: Filesystem, path: str, expected: int, samples: tuple[str, ...] = ()) -> list[Finding]:
    if fs.size(path) == expected:
        return []
    drop_caches(fs, [path])
    size = fs.size(path)
    if size is None:
        require_absent(fs, path)
        return [Finding("file-missing", path, samples, f"named with {expected:,} bytes, but it does not exist")]
    if size != expected:
        return [Finding("file-size", path, samples, f"expected {expected:,} bytes, found {size:,}")]
    return []


def _inputs(fs: Filesystem, commits: Iterable[Commit]) -> Iterator[Finding]:
    by_unit = {commit.record.unit: commit for commit in commits}
    named = committed_units(fs)
    for digest, registered in registered_inputs(fs).items():
        path = layout.input_path(digest)
        try:
            units = twice(fs, registered.unit_samples, path)
        except DAMAGE as error:
            yield Finding.of(error, path)
            continue
        missing = [unit for unit in units if unit not in named]
        if missing:
            lost = tuple(name for unit in missing for name in units[unit])
            detail = (
                f"{len(missing)} of {len(units)} units have no commit ({_some(missing)}): what made it "
                "(collect, copy, import) is not finished, and the same command goes on"
            )
            yield Finding("incomplete", path, lost, detail)
        for unit, samples in units.items():
            if unit in by_unit:
                yield from _membership(by_unit[unit], samples)


def _membership(commit: Commit, expected: list[str]) -> Iterator[Finding]:
    """Samples and rejects of a unit must add up to what its input says."""
    record, path = commit.record, f"{layout.COMMITS_DIR}/{commit.name}"
    named = Counter([sample.id for sample in record.samples] + [reject.id for reject in record.rejects])
    if lost := tuple((Counter(expected) - named).elements()):
        detail = f"{len(lost)} samples of the input are neither stored nor rejected: {_some(lost)}"
        yield Finding("samples-missing", path, lost, detail)
    if extra := tuple((named - Counter(expected)).elements()):
        detail = f"{len(extra)} samples are not in the input: {_some(extra)}"
        yield Finding("samples-unexpected", path, extra, detail)


def _snapshots(fs: Filesystem) -> Iterator[Finding]:
    for name in fs.list(layout.SNAPSHOTS_DIR):
        if not name.startswith(TEMP_PREFIX):
            path = f"{layout.SNAPSHOTS_DIR}/{name}"
            try:
                read_snapshot(fs, twice(fs, partial(load_snapshot, fs, name.removesuffix(".json")), path))
            except (*DAMAGE, ConfigError) as error:
                yield Finding.of(error, path)


def _calibration(fs: Filesystem) -> list[Finding]:
    try:
        document = twice(fs, lambda: slice_document(fs), SLICE_PATH)
    except DAMAGE as error:
        return [Finding.of(error, SLICE_PATH)]
    return [] if document is None else _size(fs, layout.slice_path(document.file_sha256), document.size)


def _duplicates(records: Iterable[CommitRecord]) -> Iterator[tuple[Finding, bool]]:
    """Twice in one input is an error (True); the same conversation in two inputs is read once and noted."""
    homes: dict[str, list[CommitRecord]] = defaultdict(list)
    for record in records:
        for sample in record.samples:
            homes[sample.id].append(record)
    for name, units in homes.items():
        if len(units) > 1:
            detail = f"sample {name} is in units {', '.join(record.unit for record in units)}; the first one is read"
            in_one_input = len({record.input for record in units}) < len(units)
            yield Finding("duplicate", units[1].segment, (name,), detail), in_one_input


def _unregistered(fs: Filesystem, records: Iterable[CommitRecord]) -> Iterator[Finding]:
    """``collect`` registers an input before its first unit, so one that is named but absent has been lost."""
    named = Counter(record.input for record in records)
    for digest in sorted(named.keys() - registered_inputs(fs).keys()):
        detail = (
            f"the input of {plural(named[digest], 'unit')} is not there, so that units still missing cannot be seen; "
            "collecting the same DATA again brings it back"
        )
        yield Finding("input-missing", layout.input_path(digest), (), detail)


def _pending(commits: Iterable[Commit]) -> Iterator[Finding]:
    for commit in commits:
        if lost := tuple(sorted(lost_samples(commit.record))):
            detail = f"a repair dropped {plural(len(lost), 'sample')}; the same collect brings them back"
            yield Finding("pending", f"{layout.COMMITS_DIR}/{commit.name}", lost, detail)


def _garbage(fs: Filesystem, commits: Iterable[Commit]) -> Iterator[Finding]:
    for path in unnamed_slices(fs):
        yield Finding("orphan", path, (), "calibration/slice.json does not name it: left by a writer that was stopped")
    # A snapshot that cannot be read is a finding; what it names is then unknown.
    with suppress(*DAMAGE):
        for path, fate in unnamed_segments(fs, commits).items():
            if fs.list(path):
                yield Finding("superseded" if fate == "frozen" else fate, path, (), _FATES[fate])
    for path in leftovers(fs):
        yield Finding("orphan", path, (), "a temporary file of a writer that was stopped")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
