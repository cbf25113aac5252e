"""The import job: a dump, sample by sample, checked and committed unit by unit; the same command goes on.

The first pass reads tokens and masks and cuts the units; the second reads states, checks them as a capture is checked,
encodes and commits. Nothing of the dump is touched unless ``delete_source`` asks for it, and then only what a committed
unit has been read back from.
"""

import time
from collections.abc import Callable
from pathlib import Path

from collectors.importers import find_format, open_source
from collectors.importers.input_job import ImportJob
from collectors.importers.opening import ImportOptions, OpenedDump, open_dump
from collectors.importers.report import ImportReport
from collectors.importers.scan import SKIPPED, ScanContext, ScannedInput, covered_places, finished_scans, scan, scan_key
from collectors.importers.torch_files import TorchFiles
from collectors.layer_profile import profile_target
from collectors.target import EngineTarget
from collectors.target_folder import open_target
from collectors.template import read_template
from hiddenstore.codecs import recipe_name
from hiddenstore.errors import ConfigError, NotFoundError
from hiddenstore.inputs import PreparedInput
from hiddenstore.rank import Drain
from hiddenstore.store import Store
from hiddenstore.verify.profile import write_profile
from hiddenstore.writer import create_store


def import_dump(
    options: ImportOptions,
    drain: Drain | None = None,
    note: Callable[[str], None] = print,
    files: TorchFiles | None = None,
) -> ImportReport:
    """Import every sample of a dump that the store does not hold yet.

    Raises:
        ConfigError, FormatError, NotFoundError, ConflictError: before anything is written.
        CaptureError: ``too-many-rejects``; what is committed stays.
        InterruptError: ``drain`` asked to stop; the same command goes on.
    """
    began, drain = time.monotonic(), drain or Drain()
    peer = find_format(options.peer)
    _require_local(options.store)
    template = None if options.template is None else read_template(options.template)
    target = EngineTarget(open_target(options.target, options.revision, template), None)
    source = open_source(peer, Path(options.source), target.head.hidden_size, files or TorchFiles())
    report = ImportReport(str(options.store), peer.name)
    try:
        opened = open_dump(options, peer, target, source, note)
        report.evidence, report.explained = opened.evidence, opened.explained
        report.final_norm = opened.capture.final_norm if peer.final else None
        scans = _scans(options, target, opened, drain, report)
        if scans:
            store = _create(options, target, opened, scans[0])
            for one in scans:
                ImportJob(store, target, one, opened, options, drain, report).run()
    finally:
        source.close()
    report.seconds = time.monotonic() - began
    return report


def _scans(
    options: ImportOptions, target: EngineTarget, opened: OpenedDump, drain: Drain, report: ImportReport
) -> list[ScannedInput]:
    """The passes made before, and one over what they do not cover."""
    store, matcher = Path(options.store), opened.matcher
    settings = (_digest_of(options.tokens_from), str(matcher.all_supervised), f"{matcher.validation:g}")
    key = scan_key(opened.peer.name, Path(options.source), *settings)
    scans = finished_scans(store, key)
    covered = covered_places(scans)
    new = [place for place in opened.places if place not in covered]
    if not new:
        return scans
    context = ScanContext(
        target.folder,
        target.head.vocab_size,
        matcher,
        _stored(options.store),
        options.max_rejects,
        lambda: drain.requested,
    )
    found, left_out, report.padding = scan(opened.source, new, store, key, context)
    for reason, rows in left_out.items():
        (report.skipped if reason in SKIPPED else report.rejects)[reason] += rows
    return [*scans, found] if found else scans


def _create(options: ImportOptions, target: EngineTarget, opened: OpenedDump, first: ScannedInput) -> Store:
    capture = opened.capture
    recipe, files = recipe_name(capture.codecs), target.target_files()
    store = create_store(options.store, capture, target.head.spec, recipe, files, options.container)
    if opened.reference is not None:
        write_profile(store.fs, profile_target(opened.reference, first.prepared, capture.final))
    return store


def _stored(store: str | Path) -> Callable[[str], bool]:
    try:
        return Store.open(store).__contains__
    except NotFoundError:
        return lambda _name: False


def _digest_of(data: str | Path | None) -> str:
    return "" if data is None else PreparedInput.open(data).info.digest


def _require_local(store: str | Path) -> None:
    if "://" in str(store):
        raise ConfigError(
            f"{store} is remote, and an import keeps its place beside the store",
            kind="store-remote",
            hint="import into a local store, then: hiddenstore copy LOCAL REMOTE",
        )
