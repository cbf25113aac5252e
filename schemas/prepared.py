"""What ``hiddenstore prepare`` writes: ``data.json`` beside parquet parts."""

from typing import Literal

from pydantic import Field

from schemas.base import FORMAT_VERSION, Document
from schemas.manifest import FileEntry

LossOn = Literal["assistant", "last-turn", "all"]
Overlong = Literal["cut", "drop"]
MaskFrom = Literal["generation-tags", "prefixes", "all"]

ROLES = ("system", "user", "assistant", "tool")
"""Role of a turn span; a span stores the index into this tuple."""


class RejectCount(Document):
    """Rows refused for one reason, with the first few places (``file:line``) as examples."""

    reason: str
    rows: int
    examples: tuple[str, ...]


class PreparedData(Document):
    """``data.json``. ``digest`` = sha256 over (sample id, split) in file order: the name of this input in a store."""

    format: int = FORMAT_VERSION
    digest: str
    target: str
    tokenizer_sha256: str
    chat_template_sha256: str
    vocab_size: int
    loss_on: LossOn
    mask_from: MaskFrom
    max_tokens: int | None
    overlong: Overlong
    validation_share: float
    rows_read: int
    samples: int
    validation_samples: int
    tokens: int
    supervised_tokens: int
    longest: int
    cut: int
    duplicates: int
    rejects: tuple[RejectCount, ...] = ()
    files: tuple[FileEntry, ...] = Field(default_factory=tuple)
