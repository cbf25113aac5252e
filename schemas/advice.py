"""The documents of ``calibration/`` and ``advice/``: a raw slice of a capture, and what each recipe does to it."""

from math import inf

from pydantic import Field, model_validator

from schemas.base import FORMAT_VERSION, Document, Format, Sparse


class SliceSample(Document):
    """Consecutive tokens of one sample: ``start`` counts in the sample; ``final_rows`` of them hold a final hidden."""

    id: str
    start: int = Field(ge=0)
    tokens: int = Field(gt=0)
    final_rows: int = Field(ge=0)


class CalibrationSlice(Document):
    """``calibration/slice.json``: what lies in ``calibration/slice-<first 16 hex of sha256>.safetensors``.

    ``fields`` are its bf16 tensors: a captured layer has a row per token, ``final`` one per final row, samples end to
    end; ``file_sha256`` and ``size`` are those of the file.
    """

    format: Format = FORMAT_VERSION
    fields: tuple[str, ...] = Field(min_length=1)
    samples: tuple[SliceSample, ...] = Field(min_length=1)
    file_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(gt=0)

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)

    @property
    def final_rows(self) -> int:
        return sum(sample.final_rows for sample in self.samples)


class AdviceRow(Document):
    """What one recipe costs and does. Each number is None where nothing is held that it could be measured on.

    kl: mean over final rows of KL(p || p'), nats, p the target's distribution from the original final hidden and p'
    from the decoded one; for top tokens, which leave the rest of p' at zero, KL(p' || p). overlap: mean of sum
    min(p, p'). top1_flips: share of rows whose most probable token changes. channel_error: of the worst aux layer, see
    ``channel_errors``, which has every one. raw_rows: share of state rows kept verbatim. clipped: share of values
    beyond the reach of their codes. within: both limits are kept.
    """

    recipe: str
    bytes_per_token: float = Field(gt=0)
    kl: float | None
    overlap: float | None
    top1_flips: float | None
    channel_error: float | None
    channel_errors: dict[str, float]
    raw_rows: float
    clipped: float
    within: bool
    chosen: bool


class SourceLoss(Document):
    """The difference of a ``PairedRow`` over the held-out samples of one input, and its 95 % half-width.

    ``source``: how the input's digest begins.
    """

    source: str
    samples: int
    difference: float
    half_width: float


class PairedRow(Document):
    """Drafters trained on states of ``recipe`` against ones on the original states, a pair per seed, all judged on the
    original states of held-out text. Acceptance is the mean over slots of sum min(p, q) at the first drafted token.

    ``difference`` is that of the recipe minus that of the original, mean over seeds, and ``standard_error`` its own.
    ``half_width``: of the 95 % interval over seeds and held-out samples, that ``minutes`` of training bought; None for
    one held-out sample. These and ``sources`` are absent in older advice.
    """

    recipe: str
    drafter: str
    steps: int
    seeds: tuple[int, ...]
    acceptance: tuple[float, ...]
    original_acceptance: tuple[float, ...]
    difference: float
    standard_error: float
    half_width: float | None = None
    minutes: float | None = None
    sources: tuple[SourceLoss, ...] = ()

    @property
    def most_lost(self) -> float:
        """Acceptance lost at the far end of the interval, a share; infinite where no interval was measured."""
        return inf if self.half_width is None else self.half_width - self.difference


class Advice(Sparse):
    """``advice/<n>.json``: the recipes measured on one slice; the highest n is the latest.

    ``tokens`` and ``final_rows`` were measured on; ``chosen`` is the smallest recipe of states within the limits.
    ``max_loss``, acceptance as a share, is absent where nothing was trained.
    """

    absent = ("max_loss",)
    format: Format = FORMAT_VERSION
    tokens: int
    final_rows: int
    max_kl: float
    max_channel_error: float
    max_loss: float | None = None
    chosen: str
    rows: tuple[AdviceRow, ...]
    paired: tuple[PairedRow, ...] = ()

    @model_validator(mode="after")
    def _one_row_is_chosen(self) -> "Advice":
        if [row.recipe for row in self.rows if row.chosen] != [self.chosen]:
            raise ValueError(f"{self.chosen} is not the one row marked as chosen")
        return self
