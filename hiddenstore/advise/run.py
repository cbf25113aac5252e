"""The advisor: every recipe on one calibration slice, and the smallest one that keeps the limits.

Shapes: L aux layers, T tokens of the slice, R final rows, D target width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hiddenstore.advise.formats import Form, Trial, fp8_per_token, through_codec, top_token_bytes
from hiddenstore.advise.measure import Change, channel_error, distribution_change, truncation_change
from hiddenstore.calibration import Slice, read_slice, take_slice
from hiddenstore.codecs import CODECS, RECIPES, get_codec, get_layout
from hiddenstore.codecs.topk import pack_rows, top_tokens, unpack_rows
from hiddenstore.containers import get_container
from hiddenstore.errors import ConfigError
from hiddenstore.head import HeadBundle
from hiddenstore.inputs import unit_tokens
from hiddenstore.store import Store
from schemas.advice import Advice, AdviceRow
from schemas.capture import FINAL, TOPK, CaptureSpec, Codecs

FP8 = "fp8-per-token"
"""A peer's format, measured beside the recipes and never chosen."""

_TOKEN_AND_MASK_BYTES = 5
_POSITION_BYTES = 4


@dataclass(frozen=True)
class Limits:
    """What a recipe may cost: KL in nats through the LM head, and channel-normalised error of the worst aux layer."""

    kl: float = 1e-3
    channel_error: float = 0.03


@dataclass(frozen=True)
class Extent:
    """What is or will be stored: samples, their tokens, and how many of these hold a final hidden."""

    samples: int
    tokens: int
    final_rows: int

    @classmethod
    def of(cls, store: Store) -> "Extent":
        entries = [entry for _, entry in store.entries]
        rows = sum(entry.final_rows for entry in entries)
        return cls(len(entries), sum(entry.tokens for entry in entries), rows)


@dataclass(frozen=True)
class _Tried:
    """One form on one group of fields: bytes per token, share of raw rows and clipped values summed over its layers."""

    token_bytes: float
    rows: int = 0
    raw_rows: int = 0
    values: int = 0
    clipped: int = 0
    errors: dict[str, float] | None = None
    change: Change | None = None


_UNCHANGED = Change(kl=0.0, overlap=1.0, top1_flips=0.0)


def advise_store(store: Store, limits: Limits, advance: Callable[[], None] = lambda: None) -> Advice:
    """Advice for a store, from its calibration slice, or from its own states where these are exact.

    Raises:
        ConfigError: ``calibration-missing``, ``store-empty``.
        CorruptionError: the slice or a sample is damaged.
    """
    capture, extent = store.capture, Extent.of(store)
    if not extent.tokens:
        raise ConfigError(
            f"{store.path} holds no sample yet",
            kind="store-empty",
            hint=f"hiddenstore collect DATA -o {store.path} --target T",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = HeadBundle.load(store, device)
    return advise(raw_slice(store), capture, head, extent, limits, store.manifest.container, advance)


def raw_slice(store: Store) -> Slice:
    """The states to judge recipes on; ConfigError ``calibration-missing`` where a store has none that are exact."""
    taken = read_slice(store.fs, store.capture)
    if taken is not None:
        return taken
    rounded = inexact_fields(store.capture)
    if not rounded:
        taken = take_slice((store.read(sample_id) for sample_id in store.sample_ids), store.capture)
    if taken is None:
        raise ConfigError(
            f"{store.path} has no calibration slice, and its {' and '.join(rounded)} are rounded already: nothing is "
            "left to measure against",
            kind="calibration-missing",
            hint="hiddenstore collect DATA -o SMALL --target T --recipe raw   (a few conversations do), then: "
            "hiddenstore advise SMALL",
        )
    return taken


def inexact_fields(capture: CaptureSpec) -> list[str]:
    """Which of the stored groups cannot be read back bit for bit."""
    held = {"aux layers": (capture.codecs.aux, capture.aux_layers), "final rows": (capture.codecs.final, True)}
    if capture.final == "none":
        del held["final rows"]
    return [name for name, (codec, there) in held.items() if there and not get_layout(codec).exact]


def trials(capture: CaptureSpec) -> int:
    """How often ``advise`` calls ``advance``."""
    return len(list(_candidates(capture)))


def advise(
    taken: Slice,
    capture: CaptureSpec,
    head: HeadBundle,
    extent: Extent,
    limits: Limits = Limits(),
    container: str = "zarr",
    advance: Callable[[], None] = lambda: None,
) -> Advice:
    """Measure every recipe and choose the smallest that keeps both limits.

    ``capture`` says what is held; its codecs do not matter. Works on the device of ``head``. ``tiny`` is measured but
    never chosen: top tokens cannot become the final hidden again, so that choice is a person's.
    """
    bench = _Bench(taken, capture, head, extent, container)
    rows: list[AdviceRow] = []
    for name, codecs in _candidates(capture):
        row = bench.row(name, *codecs)
        rows.append(row.model_copy(update={"within": _keeps(row, limits, capture)}))
        advance()
    able = [row for row in rows if row.within and row.recipe != FP8 and RECIPES[row.recipe][1] != TOPK]
    chosen = min(able, key=lambda row: row.bytes_per_token).recipe
    return Advice(
        tokens=taken.tokens,
        final_rows=len(taken.final),
        max_kl=limits.kl,
        max_channel_error=limits.channel_error,
        chosen=chosen,
        rows=tuple(row.model_copy(update={"chosen": row.recipe == chosen}) for row in rows),
    )


def _candidates(capture: CaptureSpec) -> Iterator[tuple[str, tuple[str, str]]]:
    """Recipes that this capture can be stored in, then the peer's format."""
    for name, (aux, final) in RECIPES.items():
        if final != TOPK or (capture.aux_layers and capture.final != "none" and _has_top_tokens(capture)):
            yield name, (aux, final)
    yield FP8, (FP8, FP8)


def _keeps(row: AdviceRow, limits: Limits, capture: CaptureSpec) -> bool:
    """A final hidden that could not be measured keeps no limit."""
    if row.kl is None and capture.final != "none":
        return False
    return (row.kl or 0.0) <= limits.kl and (row.channel_error or 0.0) <= limits.channel_error


def _has_top_tokens(capture: CaptureSpec) -> bool:
    return capture.target.vocab_size >= capture.topk


class _Bench:
    """One slice on one device; every form is tried once per group of fields."""

    def __init__(self, taken: Slice, capture: CaptureSpec, head: HeadBundle, extent: Extent, container: str) -> None:
        self.device = head.embed_tokens.device
        self.taken, self.capture, self.head, self.extent = taken, capture, head, extent
        self.container = get_container(container)
        self._aux: dict[str, _Tried] = {}
        self._final: dict[str, _Tried] = {}

    def row(self, name: str, aux: str, final: str) -> AdviceRow:
        """What a recipe costs and does; not judged yet."""
        first, second = self._try_aux(aux), self._try_final(final)
        errors = (first.errors if self.capture.aux_layers else second.errors) or {}
        change = second.change
        states, values = first.rows + second.rows, first.values + second.values
        return AdviceRow(
            recipe=name,
            bytes_per_token=first.token_bytes + second.token_bytes + self._beside(aux, final),
            kl=None if change is None else change.kl,
            overlap=None if change is None else change.overlap,
            top1_flips=None if change is None else change.top1_flips,
            channel_error=max(errors.values(), default=None),
            channel_errors=errors,
            raw_rows=(first.raw_rows + second.raw_rows) / states if states else 0.0,
            clipped=(first.clipped + second.clipped) / values if values else 0.0,
            within=False,
            chosen=False,
        )

    def _try_aux(self, form: str) -> _Tried:
        if form not in self._aux:
            layers = {name: self.taken.aux[i].to(self.device) for i, name in enumerate(self.capture.aux_fields)}
            tested = self._form(form, self.extent.tokens)
            tried = {name: (layer, tested(layer)) for name, layer in layers.items()}
            self._aux[form] = self._sum(form, tried, share=1.0)
        return self._aux[form]

    def _try_final(self, form: str) -> _Tried:
        if form not in self._final:
            self._final[form] = self._measure_final(form)
        return self._final[form]

    def _measure_final(self, form: str) -> _Tried:
        if self.capture.final == "none":
            return _Tried(0.0)
        share = self.extent.final_rows / self.extent.tokens
        norm, final = self.capture.final_norm, self._finite_final
        exact = form in CODECS and get_codec(form).exact
        if not len(final):
            nominal = 8.0 * final.shape[1] if form == FP8 else get_layout(form).row_bits(final.shape[1])
            return _Tried(nominal / 8 * share, change=_UNCHANGED if exact else None)
        if form == TOPK:
            packed = pack_rows([top_tokens(self.head, final, norm, self.capture.topk)], self.capture.topk)
            stored = unpack_rows(packed).to(self.device)
            return _Tried(top_token_bytes(final) * share, change=truncation_change(self.head, final, stored, norm))
        trial = self._form(form, self.extent.final_rows)(final)
        change = _UNCHANGED if exact else distribution_change(self.head, final, trial.decoded, norm)
        return replace(self._sum(form, {FINAL: (final, trial)}, share), change=change)

    def _sum(self, form: str, tried: dict[str, tuple[Tensor, Trial]], share: float) -> _Tried:
        """``share``: rows a token has; what a unit takes once is spread over its tokens."""
        trials = [trial for _, trial in tried.values()]
        return _Tried(
            token_bytes=sum(t.row_bytes * share + t.unit_bytes / self._unit_tokens(form) for t in trials),
            rows=sum(len(trial.decoded) for trial in trials),
            raw_rows=sum(trial.raw_rows for trial in trials),
            values=sum(trial.decoded.numel() for trial in trials),
            clipped=sum(trial.clipped for trial in trials),
            errors={name: channel_error(layer, trial.decoded) for name, (layer, trial) in tried.items()},
        )

    def _form(self, name: str, rows: int) -> Form:
        """A form as the container stores it; ``rows`` the capture has of the field."""
        if name == FP8:
            return fp8_per_token
        apart = self.container.samples_apart and self.extent.samples > 0
        return through_codec(name, max(1, round(rows / self.extent.samples)) if apart else None)

    @cached_property
    def _finite_final(self) -> Tensor:
        final = self.taken.final.to(self.device)
        return final[torch.isfinite(final).all(dim=1)]

    def _unit_tokens(self, form: str) -> int:
        codec = form if form in CODECS else "q8"
        capture = self.capture.model_copy(update={"codecs": Codecs(aux=codec, final=codec)})
        return min(self.extent.tokens, unit_tokens(capture))

    def _beside(self, aux: str, final: str) -> float:
        """Bytes per token that are no states: ids, mask, positions of final rows, and what the container adds."""
        tokens = self.extent.tokens
        positions = 0.0 if self.capture.final == "none" else _POSITION_BYTES * self.extent.final_rows / tokens
        if aux == FP8:
            return _TOKEN_AND_MASK_BYTES + positions
        capture = self.capture.model_copy(update={"codecs": Codecs(aux=aux, final=final)})
        segments = -(-tokens // unit_tokens(capture))
        added = self.container.overhead(capture, self.extent.samples, segments).size_bytes / tokens
        return _TOKEN_AND_MASK_BYTES + positions + added
