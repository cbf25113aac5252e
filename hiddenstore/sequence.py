"""A store as a sequence of records, and as a prompt or a notebook shows it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

from hiddenstore.errors import ConfigError, Kind, NotFoundError
from hiddenstore.records import Record, facts_table

if TYPE_CHECKING:
    from schemas.capture import CaptureSpec


class RecordSequence(ABC):
    """``for record in store``; ``store[0]``, ``store[-1]``, ``store[2:5]``; ``store["4f2a"]`` by the start of an id.

    A slice reads its records into a list, an iteration one after the other.
    """

    path: str

    @property
    @abstractmethod
    def capture(self) -> "CaptureSpec": ...

    @property
    @abstractmethod
    def sample_ids(self) -> Sequence[str]: ...

    @abstractmethod
    def ids_starting(self, text: str) -> Sequence[str]: ...

    @property
    @abstractmethod
    def totals(self) -> dict[str, int]: ...

    @abstractmethod
    def read(self, sample_id: str) -> Record: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, sample_id: object) -> bool: ...

    def __iter__(self) -> Iterator[Record]:
        return map(self.read, self.sample_ids)

    @overload
    def __getitem__(self, key: int | str) -> Record: ...

    @overload
    def __getitem__(self, key: slice) -> list[Record]: ...

    def __getitem__(self, key: int | str | slice) -> Record | list[Record]:
        if isinstance(key, slice):
            return [self.read(sample_id) for sample_id in self.sample_ids[key]]
        return self.read(self.id_starting(key) if isinstance(key, str) else self.id_at(key))

    def id_at(self, index: int) -> str:
        """The id at an index, negative from the end; NotFoundError ``sample-missing``."""
        if -len(self) <= index < len(self):
            return self.sample_ids[index]
        places = f"0 to {len(self) - 1:,}: there is none at {index}" if len(self) else f"so none at {index}"
        raise self._missing(f"{self.path} holds {len(self):,} samples, {places}")

    def id_starting(self, text: str) -> str:
        """The id that is ``text``, or the only one that starts with it. Raises NotFoundError: ``sample-missing``;
        ConfigError: ``sample-ambiguous`` listing the candidates."""
        if text in self:
            return text
        matches = self.ids_starting(text.lower()) if text else []
        if len(matches) == 1:
            return matches[0]
        if matches:
            shown = ", ".join(matches[:4]) + (", …" if len(matches) > 4 else "")
            raise ConfigError(f"{len(matches)} samples start with {text!r}: {shown}", kind=Kind.SAMPLE_AMBIGUOUS)
        raise self._missing(f"{self.path} holds {len(self):,} samples, and none is {text!r}")

    def __repr__(self) -> str:
        facts = self._facts()
        return (
            f"Store {self.path}\n"
            f"  {facts['samples']} samples, {facts['tokens']}, {facts['units']} units, {facts['size']}\n"
            f"  target {facts['target']}\n  aux {facts['aux']}; final {facts['final']}"
        )

    def _repr_html_(self) -> str:
        return facts_table(f"Store {self.path}", self._facts())

    def _facts(self) -> dict[str, str]:
        capture, target, totals = self.capture, self.capture.target, self.totals
        tokens = totals["tokens"]
        share = f"{totals['supervised'] / tokens:.0%}" if tokens else "none"
        return {
            "samples": f"{len(self):,}",
            "tokens": f"{tokens:,} tokens ({share} supervised)",
            "units": f"{totals['units']:,}",
            "size": f"{totals['bytes_stored'] / 1e9:.2f} GB",
            "target": f"{target.name}: {target.model_type}, {target.num_layers} layers, width {target.hidden_size}",
            "aux": f"{', '.join(capture.aux_fields) or 'none'} ({capture.codecs.aux})",
            "final": f"{capture.final}, {capture.final_norm} ({capture.codecs.final})",
        }

    def _missing(self, message: str) -> NotFoundError:
        return NotFoundError(message, kind=Kind.SAMPLE_MISSING, hint=f"hiddenstore ls {self.path}")
