"""What an index file says of the records it covers."""

from pydantic import Field, model_validator

from schemas.base import FORMAT_VERSION, Document


class IndexHeader(Document):
    """Under the key ``hiddenstore.index`` in the metadata of ``index/<n>.parquet``.

    Every list from ``records`` to ``input`` has one entry a record: file name under ``commits/``, sha256 of the file,
    samples, tokens, supervised tokens, bytes of the segment, number of rejects, place of the input in ``inputs``.
    ``replaces`` are numbers of index files that this one was merged from; ``fences`` the first sample id of each row
    group; ``rows`` counts samples, ``repeats`` those with the id of another before them.
    """

    format: int = FORMAT_VERSION
    records: tuple[str, ...]
    sha256s: tuple[str, ...]
    samples: tuple[int, ...]
    tokens: tuple[int, ...]
    supervised: tuple[int, ...]
    bytes_stored: tuple[int, ...]
    rejects: tuple[int, ...]
    input: tuple[int, ...]
    inputs: tuple[str, ...]
    replaces: tuple[int, ...] = ()
    fences: tuple[str, ...] = ()
    rows: int = Field(ge=0)
    repeats: int = Field(ge=0)

    @model_validator(mode="after")
    def _lists_fit(self) -> "IndexHeader":
        columns = (
            self.sha256s,
            self.samples,
            self.tokens,
            self.supervised,
            self.bytes_stored,
            self.rejects,
            self.input,
        )
        if any(len(column) != len(self.records) for column in columns) or sum(self.samples) != self.rows:
            raise ValueError("its lists do not fit each other")
        if any(not 0 <= place < len(self.inputs) for place in self.input):
            raise ValueError("it names no input for a record")
        return self
