"""Sources go when everything in them is in the store and has been read back from it; not before, and not unasked."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from collectors.engines.dump.peer import PeerSource
from hiddenstore.codecs import get_codec
from hiddenstore.errors import CorruptionError, Kind, StorageError
from hiddenstore.inputs.prepared import PreparedInput
from hiddenstore.records import Record
from hiddenstore.store import Store
from schemas.manifest import CommitRecord


class SourceDeleter:
    """Knows what is only in each file of a dump: ``deleted`` files are gone, ``remaining`` are not all imported."""

    def __init__(self, store: Store, source: PeerSource, locations: Sequence[str]) -> None:
        self._store, self._source = store, source
        self._left: dict[Path, set[str]] = {}
        for location in locations:
            self._left.setdefault(source.file_of(location), set()).add(location)
        self.deleted = 0

    @property
    def remaining(self) -> int:
        return sum(path.is_file() for path in self._left)

    def on_commit(self, commit: CommitRecord, records: Sequence[Record]) -> None:
        """Read a unit back that was just committed; files that hold no sample outside the store are deleted."""
        read_back(self._store, commit, records)
        self._release(record.sample.source for record in records)

    def catch_up(self, prepared: PreparedInput, digest: str) -> None:
        """The same for units of an input that were committed before this run."""
        locations = {sample.id: sample.source for sample in prepared.samples()}
        for commit in Store.open(self._store.fs).commits():
            if commit.input != digest:
                continue
            sources = [locations[sample.id] for sample in commit.samples if sample.id in locations]
            if any(self._source.file_of(location).is_file() for location in sources):
                read_back(self._store, commit, ())
            self._release(sources)

    def _release(self, locations: Iterable[str]) -> None:
        for location in locations:
            path = self._source.file_of(location)
            left = self._left.get(path, set())
            left.discard(location)
            if path in self._left and not left:
                self._delete(path)

    def _delete(self, path: Path) -> None:
        del self._left[path]
        try:
            self.deleted += path.is_file()
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"{path} is imported but cannot be deleted: {error}", kind=Kind.SOURCE_UNDELETED
            ) from error


def read_back(store: Store, commit: CommitRecord, records: Sequence[Record]) -> None:
    """Decode every sample of a committed unit; ``records`` it was made from are compared where the codec is exact.

    Raises:
        CorruptionError: what was written does not come back; the sources stay.
    """
    if not commit.samples:
        return
    capture, reader = store.capture, store.open_unit(commit)
    exact_aux = get_codec(capture.codecs.aux).exact
    exact_final = capture.holds_final_hidden and get_codec(capture.codecs.final).exact
    written = {record.sample.id: record for record in records}
    counts = Counter(entry.id for entry in commit.samples)
    for index, entry in enumerate(commit.samples):
        stored, expected = reader.read(index), written.get(entry.id)
        if expected is None or counts[entry.id] > 1:
            continue
        same = not exact_aux or _equal(stored.aux, expected.aux)
        if not same or (exact_final and not _equal(stored.final, expected.final)):
            raise CorruptionError(
                f"{store.path}/{commit.segment} does not give back sample {entry.id} as it was written",
                kind=Kind.READ_BACK,
                path=commit.segment,
                samples=(entry.id,),
                hint=f"check the disk; the source stays. hiddenstore verify {store.path} --full",
            )


def _equal(stored: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(stored.contiguous().view(torch.int16), expected.cpu().contiguous().view(torch.int16))
