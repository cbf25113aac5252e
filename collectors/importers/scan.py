"""The first pass over a dump: tokens and masks of every sample as prepared DATA, so that units follow from it alone.

It lies in ``STORE/.import/`` and stays there: an interrupted import goes on from it, also when the sources of finished
units are gone, and a dump that has grown adds another one.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from collectors.importers.matching import Matcher, rows_of
from collectors.importers.peer import PeerSource, Unusable
from collectors.prepare_batches import SCHEMA
from collectors.prepare_parts import REJECTS_JSONL, PartWriter, RejectsWriter, new_folder, write_document
from collectors.rows import Problem
from collectors.target_folder import TargetFolder
from hiddenstore.documents import seal
from hiddenstore.errors import CaptureError, HiddenstoreError, InterruptError
from hiddenstore.inputs import PreparedInput
from hiddenstore.layout import DATA_JSON
from hiddenstore.progress import Progress
from hiddenstore.records import Sample
from hiddenstore.registered import input_digest
from schemas.prepared import PreparedData, RejectCount

FOLDER = ".import"
# Counted and shown, and no fault of the dump: they do not spend the budget of rejects.
SKIPPED = ("duplicate", "already-stored", "nothing-supervised", "not-captured")
_EXAMPLES = 3
_LATEST = 3


@dataclass(frozen=True, eq=False)
class ScannedInput:
    """One finished pass: the samples found, and what was left out, by reason."""

    prepared: PreparedInput
    left_out: dict[str, int]

    @property
    def rejects(self) -> dict[str, int]:
        return {reason: rows for reason, rows in self.left_out.items() if reason not in SKIPPED}

    @property
    def skipped(self) -> dict[str, int]:
        return {reason: rows for reason, rows in self.left_out.items() if reason in SKIPPED}


@dataclass(frozen=True, eq=False)
class ScanContext:
    """What a pass needs to know besides the dump.

    ``stored``: whether a sample id is in the store already. ``max_rejects``: share of places that may be refused.
    """

    folder: TargetFolder
    vocab_size: int
    matcher: Matcher
    stored: Callable[[str], bool]
    max_rejects: float
    stopping: Callable[[], bool]


@dataclass
class _Tally:
    places: int = 0
    samples: int = 0
    validation: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    padding: int = 0
    seen: set[bytes] = field(default_factory=set)
    names: list[tuple[str, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    latest: list[str] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        self.samples += 1
        self.validation += sample.split == "validation"
        self.tokens += sample.tokens
        self.supervised += sample.supervised
        self.longest = max(self.longest, sample.tokens)
        self.names.append((sample.id, sample.split))

    def leave_out(self, problem: Problem) -> None:
        self.reasons[problem.reason] += 1
        line = f"{problem.place}: {problem.detail}"
        examples = self.examples.setdefault(problem.reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(line)
        if problem.reason not in SKIPPED:
            self.latest = [*self.latest, line][-_LATEST:]

    @property
    def refused(self) -> int:
        return sum(count for reason, count in self.reasons.items() if reason not in SKIPPED)


def scan_key(peer: str, folder: Path, *settings: str) -> str:
    """Names the passes over one dump under settings that decide what its samples are."""
    text = "\n".join([peer, str(folder.resolve()), *settings])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def finished_scans(store: Path, key: str) -> list[ScannedInput]:
    """The passes made so far, oldest first."""
    found = sorted((store / FOLDER).glob(f"{key}-*")) if (store / FOLDER).is_dir() else []
    return [_opened(folder) for folder in found if (folder / DATA_JSON).is_file()]


def covered_places(scans: Sequence[ScannedInput]) -> set[str]:
    """Places that need no further look: imported ones and skipped ones; a rejected place is tried again."""
    covered: set[str] = set()
    for scan in scans:
        covered |= {sample.source for sample in scan.prepared.samples()}
        path = scan.prepared.folder / REJECTS_JSONL
        if path.is_file():
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            covered |= {line["place"] for line in lines if line["reason"] in SKIPPED}
    return covered


def scan(
    source: PeerSource, places: Sequence[str], store: Path, key: str, context: ScanContext
) -> tuple[ScannedInput | None, dict[str, int], int]:
    """Read tokens and masks at ``places``; returns the pass (None: no sample), what was left out, padding stripped.

    Raises:
        CaptureError: ``too-many-rejects``; nothing is left behind.
        InterruptError: asked to stop; the pass begins anew next time.
    """
    number = len(finished_scans(store, key))
    out = store / FOLDER / f"{key}-{number:03d}"
    tally = _Tally(places=len(places))
    try:
        with new_folder(out) as fs:
            parts, rejects = PartWriter(fs), RejectsWriter(fs)
            try:
                _read(source, places, context, tally, parts, rejects)
                if not tally.samples:
                    raise _NothingError
                rejects.close()
                files = parts.close()
            except BaseException:
                with suppress(HiddenstoreError):
                    parts.abort()
                    rejects.abort()
                raise
            document = _document(context, tally).model_copy(update={"files": files})
            write_document(fs, DATA_JSON, seal(document))
    except _NothingError:
        return None, dict(tally.reasons), tally.padding
    finally:
        for folder in (store / FOLDER, store):
            with suppress(OSError):
                folder.rmdir()  # only when nothing came of it
    return _opened(out), dict(tally.reasons), tally.padding


class _NothingError(Exception):
    """A pass found no sample to import."""


def _read(
    source: PeerSource,
    places: Sequence[str],
    context: ScanContext,
    tally: _Tally,
    parts: PartWriter,
    rejects: RejectsWriter,
) -> None:
    allowed = max(1, int(len(places) * context.max_rejects))
    with Progress("read tokens", len(places), "samples") as progress:
        for place in places:
            if context.stopping():
                raise InterruptError("stopped by a signal", kind="interrupted")
            try:
                sample = _sample(source, place, context, tally)
            except Unusable as unusable:
                problem = Problem(place, unusable.reason, unusable.detail)
                tally.leave_out(problem)
                rejects.write(problem)
                if tally.refused > allowed:
                    raise _too_many(tally, allowed) from None
            else:
                tally.add(sample)
                parts.write(_row(sample), sample.tokens)
            progress.advance(1, samples=tally.samples, rejects=tally.refused)


def _sample(source: PeerSource, place: str, context: ScanContext, tally: _Tally) -> Sample:
    peer = source.read(place, states=False)
    sample = context.matcher.sample(peer, place)
    if not sample.tokens:
        raise Unusable("empty", "it is padding only")
    if int(sample.input_ids.max()) >= context.vocab_size:
        raise Unusable(
            "token-out-of-range", f"token {int(sample.input_ids.max())}, but the target has {context.vocab_size} tokens"
        )
    if not sample.supervised:
        raise Unusable("nothing-supervised", "its loss mask is all zero")
    if context.stored(sample.id):
        raise Unusable("already-stored", f"the store holds sample {sample.id}")
    key = bytes.fromhex(sample.id)
    if key in tally.seen:
        raise Unusable("duplicate", f"another place holds sample {sample.id}")
    tally.seen.add(key)
    tally.padding += peer.rows - rows_of(peer, sample).stop
    return sample


def _row(sample: Sample) -> pa.RecordBatch:
    row = {
        "sample_id": sample.id,
        "input_ids": sample.input_ids.astype(np.int32).tolist(),
        "loss_mask": sample.loss_mask.astype(np.uint8).tolist(),
        "spans": [{"role": int(r), "start": int(a), "end": int(b)} for r, a, b in sample.spans],
        "split": sample.split,
        "source": sample.source,
    }
    return pa.RecordBatch.from_pylist([row], schema=SCHEMA)


def _document(context: ScanContext, tally: _Tally) -> PreparedData:
    folder = context.folder
    return PreparedData(
        digest=input_digest(_each(tally.names)),
        target=folder.label,
        tokenizer_sha256=folder.tokenizer_sha256,
        chat_template_sha256=folder.chat_template_sha256,
        vocab_size=context.vocab_size,
        loss_on="all" if context.matcher.all_supervised else "assistant",
        mask_from="all" if context.matcher.all_supervised else "prefixes",
        max_tokens=None,
        overlong="cut",
        validation_share=context.matcher.validation,
        rows_read=tally.places,
        samples=tally.samples,
        validation_samples=tally.validation,
        tokens=tally.tokens,
        supervised_tokens=tally.supervised,
        longest=tally.longest,
        cut=0,
        duplicates=tally.reasons["duplicate"],
        rejects=tuple(
            RejectCount(reason=reason, rows=rows, examples=tuple(tally.examples[reason]))
            for reason, rows in sorted(tally.reasons.items())
        ),
    )


def _each(names: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return iter(names)


def _opened(folder: Path) -> ScannedInput:
    prepared = PreparedInput.open(folder)
    return ScannedInput(prepared, {count.reason: count.rows for count in prepared.info.rejects})


def _too_many(tally: _Tally, allowed: int) -> CaptureError:
    counts = ", ".join(f"{tally.reasons[reason]} {reason}" for reason in sorted(tally.reasons) if reason not in SKIPPED)
    return CaptureError(
        f"{tally.refused} of {tally.places} samples cannot be imported ({counts}), more than the {allowed} allowed; "
        f"latest {'; '.join(tally.latest)}",
        kind="too-many-rejects",
        hint="if the dump is known to be damaged, allow more of it: --max-rejects 5%",
    )
