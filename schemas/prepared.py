"""What ``hiddenstore prepare`` writes: ``data.json`` beside parquet parts."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.base import FORMAT_VERSION, Document, FormatOfImages, Sparse, require_format
from schemas.capture import ImageSpec
from schemas.manifest import FileEntry

LossOn = Literal["assistant", "last-turn", "all"]
LossChoice = Literal["stored", "assistant", "last-turn", "all"]
Overlong = Literal["cut", "drop"]
MaskFrom = Literal["generation-tags", "prefixes", "all"]


class RejectCount(Document):
    """Rows refused for one reason, with the first few places (``file:line``) as examples."""

    reason: str
    rows: int
    examples: tuple[str, ...]


class SourceCount(Document):
    """What one source gave: ``rows`` read of ``available`` (None: never counted), as ``cap`` or ``weight`` chose."""

    source: str
    rows: int
    samples: int
    tokens: int
    available: int | None = None
    cap: int | None = None
    weight: float | None = None


class PreparedImages(Document):
    """The images of DATA: how many samples hold some, and the parquet files that hold theirs."""

    spec: ImageSpec
    samples: int
    files: tuple[FileEntry, ...]


class PreparedData(Sparse):
    """``data.json``. ``digest`` = sha256 over (sample id, split) in file order: the name of this input in a store.
    ``tokenizer_rules_sha256`` as in ``TargetIdentity``.

    ``think_loss`` False: thoughts are not supervised. ``reasoning_lost`` counts samples whose last answer has reasoning
    that the chat template left out, ``words_lost`` those of which it left out other words of an answer, and
    ``ends_unlearned`` those whose last answer has no token that ends it: absent where there are none. ``final_rows``:
    where the final hidden is held of supervised text, absent in older documents. ``mix_seed`` chose the rows where a
    mix took a part of a source. ``images`` is absent where no sample has any, ``template_date`` where the chat template
    does not ask for today's date, which is this one for every sample.
    """

    absent = ("images", "final_rows", "words_lost", "ends_unlearned", "template_date")
    format: FormatOfImages = FORMAT_VERSION
    digest: str
    target: str
    tokenizer_sha256: str
    tokenizer_rules_sha256: str | None = None
    chat_template_sha256: str
    vocab_size: int
    loss_on: LossOn
    think_loss: bool = True
    mask_from: MaskFrom
    template_date: str | None = None
    max_tokens: int | None
    overlong: Overlong
    validation_share: float
    rows_read: int
    samples: int
    validation_samples: int
    tokens: int
    supervised_tokens: int
    final_rows: int | None = None
    longest: int
    cut: int
    duplicates: int
    reasoning_lost: int = 0
    words_lost: int | None = None
    ends_unlearned: int | None = None
    sources: tuple[SourceCount, ...] = ()
    mix_seed: int | None = None
    rejects: tuple[RejectCount, ...] = ()
    files: tuple[FileEntry, ...] = Field(default_factory=tuple)
    images: PreparedImages | None = None

    @model_validator(mode="after")
    def _says_whether_there_are_images(self) -> "PreparedData":
        require_format(self.format, has_images=self.images is not None)
        return self
