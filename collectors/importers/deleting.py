"""Sources go when everything in them is in the store and has been read back from it; not before, and not unasked."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from collectors.importers.peer import PeerSource
from hiddenstore.codecs import get_codec
from hiddenstore.errors import CorruptionError, StorageError
from hiddenstore.records import Record
from hiddenstore.segment import open_segment
from hiddenstore.store import Store
from schemas.manifest import CommitRecord


class SourceKeeper:
    """Counts what is still only in each file of a dump. ``deleted`` files are gone, ``kept`` are not all imported."""

    def __init__(self, source: PeerSource, places: Sequence[str]) -> None:
        self._source = source
        self._left: dict[Path, set[str]] = {}
        for place in places:
            self._left.setdefault(source.file_of(place), set()).add(place)
        self.deleted = 0

    @property
    def kept(self) -> int:
        return sum(path.is_file() for path in self._left)

    def has_any(self, places: Iterable[str]) -> bool:
        """Whether a file of one of them is still there."""
        return any(self._source.file_of(place).is_file() for place in places)

    def stored(self, places: Iterable[str]) -> None:
        """Samples that were read back; files that hold no other sample are deleted."""
        for place in places:
            path = self._source.file_of(place)
            left = self._left.get(path)
            if left is None:
                continue
            left.discard(place)
            if not left:
                self._delete(path)

    def _delete(self, path: Path) -> None:
        del self._left[path]
        try:
            self.deleted += path.is_file()
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{path} is imported but cannot be deleted: {error}", kind="delete-failed") from error


def read_back(store: Store, record: CommitRecord, records: Sequence[Record]) -> None:
    """Decode every sample of a committed unit; ``records`` it was made from are compared where the codec is exact.

    Raises:
        CorruptionError: what was written does not come back; the sources stay.
    """
    if not record.samples:
        return
    capture, reader = store.capture, open_segment(store, record)
    exact_aux = get_codec(capture.codecs.aux).exact
    exact_final = capture.holds_final_hidden and get_codec(capture.codecs.final).exact
    given = {one.sample.id: one for one in records}
    counts = Counter(entry.id for entry in record.samples)
    for index, entry in enumerate(record.samples):
        found, expected = reader.read(index), given.get(entry.id)
        if expected is None or counts[entry.id] > 1:
            continue
        same = not exact_aux or _equal(found.aux, expected.aux)
        if not same or (exact_final and not _equal(found.final, expected.final)):
            raise CorruptionError(
                f"{store.path}/{record.segment} does not give back sample {entry.id} as it was written",
                kind="read-back",
                path=record.segment,
                samples=(entry.id,),
                hint=f"check the disk; the source stays. hiddenstore verify {store.path} --full",
            )


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.int16), expected.cpu().contiguous().view(torch.int16))
