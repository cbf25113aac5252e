"""The documents of a store: store.json, commit records, snapshots and the headers of index files."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.base import FORMAT_VERSION, Document, Format, FormatOfImages, Sparse, require_format
from schemas.capture import CaptureSpec, HeadSpec

Container = str
PackageRole = Literal["aux", "final", "container"]
Split = Literal["train", "validation"]
ROLES = ("system", "user", "assistant", "tool")
"""Role of a turn span; a span stores the index into this tuple."""
MAX_TOKENS = 1 << 31
"""A sample is shorter, so that columns of samples hold 32 bits."""


class FileEntry(Sparse):
    """One file of a segment or of ``target/``: path relative to its folder, size in bytes, and either the sha256 of the
    bytes or, of shards and tars, ``tree``: the sha256 over the crc32c of every 2^20 bytes."""

    absent = ("sha256", "tree")
    path: str
    size: int = Field(ge=0)
    sha256: str | None = None
    tree: str | None = None

    @model_validator(mode="after")
    def _has_one_digest(self) -> "FileEntry":
        if (self.sha256 is None) == (self.tree is None):
            raise ValueError(f"{self.path} names not exactly one of sha256 and tree")
        return self

    @property
    def digest(self) -> str:
        """The one that is named."""
        return self.sha256 or self.tree or ""


class Package(Document):
    """A distribution that has to be installed to read a store."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    version: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.!+_-]*$")


class StoreManifest(Sparse):
    """``store.json``: immutable, written once before anything else is trusted.

    ``packages``: which distribution brings a codec or the container, where hiddenstore does not have it itself: by
    ``aux``, ``final`` or ``container``. Absent where there is none.
    """

    absent = ("packages",)
    format: FormatOfImages = FORMAT_VERSION
    container: Container = "zarr"
    recipe: str
    capture: CaptureSpec
    head: HeadSpec
    target_files: tuple[FileEntry, ...]
    packages: dict[PackageRole, Package] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _says_whether_there_are_images(self) -> "StoreManifest":
        require_format(self.format, has_images=self.capture.images is not None)
        return self

    @model_validator(mode="after")
    def _names_the_file_of_its_codec(self) -> "StoreManifest":
        codec = self.capture.codecs.aux
        digest = codec.rpartition("-")[2]
        for file in self.target_files:
            if file.path == f"{codec}.safetensors" and file.digest[:16] != digest:
                raise ValueError(f"{codec} is not decoded by a file with sha256 {file.digest}")
        return self


class Engine(Document):
    """What ran the target for one unit: engine name, its version, the versions of what it stands on, its settings.

    ``settings`` are those that decide what the states are, such as the attention kernel or tensor parallelism.
    """

    name: str
    version: str
    versions: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, str] = Field(default_factory=dict)


class ImageEntry(Document):
    """An image of a sample: the digest of its file, and the ``height`` x ``width`` tokens from ``start`` on that stand
    for it, row by row."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    start: int = Field(ge=0)
    height: int = Field(gt=0, lt=MAX_TOKENS)
    width: int = Field(gt=0, lt=MAX_TOKENS)

    @property
    def tokens(self) -> int:
        return self.height * self.width


class SampleEntry(Sparse):
    """Where one sample lies in its segment.

    ``start`` and ``tokens`` count tokens of the unit, which are rows of the aux arrays where none are shared;
    ``final_start`` and ``final_rows`` rows of the final array.
    ``images`` is absent where there is none.
    """

    absent = ("images",)
    id: str
    split: Split
    start: int = Field(ge=0)
    tokens: int = Field(gt=0, lt=MAX_TOKENS)
    supervised: int = Field(ge=0, lt=MAX_TOKENS)
    final_start: int = Field(ge=0)
    final_rows: int = Field(ge=0, lt=MAX_TOKENS)
    images: tuple[ImageEntry, ...] = ()


class Reject(Document):
    """A sample refused at capture, or lost on disk since, and why. ``reason`` is a stable kebab-case kind."""

    id: str
    tokens: int = Field(gt=0)
    reason: str
    detail: str


class Recapture(Document):
    """Samples that another engine captured than the rest of their unit: after a repair, or in another store."""

    engine: Engine
    samples: tuple[str, ...]


class LayerStats(Document):
    """Row norms of one captured field over one unit; rms = sqrt(mean over channels of h²)."""

    rows: int
    rms_mean: float
    rms_median: float
    rms_max: float
    abs_max: float
    raw_rows: int = 0


class CommitHead(Sparse):
    """What a commit record says beside its samples.

    ``engine`` captured every sample that no member of ``recaptured`` names; that is absent where there is none.
    """

    absent = ("recaptured",)
    format: Format = FORMAT_VERSION
    unit: str
    input: str
    segment: str
    engine: Engine
    files: tuple[FileEntry, ...]
    rejects: tuple[Reject, ...] = ()
    stats: dict[str, LayerStats] = Field(default_factory=dict)
    recaptured: tuple[Recapture, ...] = ()

    @property
    def bytes_stored(self) -> int:
        return sum(file.size for file in self.files)


class CommitRecord(CommitHead):
    """``commits/<unit>.json``: the only truth about one unit."""

    samples: tuple[SampleEntry, ...]

    @model_validator(mode="after")
    def _samples_lie_end_to_end(self) -> "CommitRecord":
        row = final_row = 0
        for sample in self.samples:
            if sample.start != row or sample.final_start != final_row:
                raise ValueError(f"sample {sample.id} of {self.unit} does not start where the one before it ends")
            row += sample.tokens
            final_row += sample.final_rows
        return self

    @property
    def tokens(self) -> int:
        """They lie end to end, so the last one says it."""
        return self.samples[-1].start + self.samples[-1].tokens if self.samples else 0

    @property
    def final_rows(self) -> int:
        return self.samples[-1].final_start + self.samples[-1].final_rows if self.samples else 0


class SnapshotEntry(Document):
    """One commit record named by a snapshot: file name under ``commits/`` and sha256 of its bytes."""

    record: str
    sha256: str


class Snapshot(Document):
    """``snapshots/<name>.json``: a frozen list of commits, what a training run names."""

    format: Format = FORMAT_VERSION
    name: str
    commits: tuple[SnapshotEntry, ...]
    samples: int
    tokens: int


class IndexHeader(Document):
    """Under the key ``hiddenstore.index`` in the metadata of ``index/<n>.parquet``.

    Every list from ``records`` to ``input`` has one entry a record: file name under ``commits/``, sha256 of the file,
    samples, tokens, supervised tokens, bytes of the segment, number of rejects, place of the input in ``inputs``.
    ``replaces`` are numbers of index files that this one was merged from; ``fences`` the first sample id of each row
    group; ``rows`` counts samples, ``repeats`` those with the id of another before them.
    """

    format: Format = FORMAT_VERSION
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
