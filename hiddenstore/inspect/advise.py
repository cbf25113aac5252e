"""The advisor: every recipe on one calibration slice, and the smallest one that keeps the limits.

Shapes: L aux layers, T tokens of the slice, R final rows, D target width, V vocabulary.
"""

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import CODECS, FITTED, LAYOUTS, blosc_chunks, get_codec, get_layout
from hiddenstore.codecs.base import RAW_INDEX, Codec, Encoded, MaskedCodec, bits_to_tensor
from hiddenstore.codecs.channels import channel_statistics
from hiddenstore.codecs.recipes import RECIPES, recipe_name
from hiddenstore.codecs.topk import TOPK_CODEC, pack_rows, top_tokens, unpack_rows
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.files import layout
from hiddenstore.files.documents import seal
from hiddenstore.fs.seam import Filesystem
from hiddenstore.inspect.choice import FP8, RecipeLimits, choose
from hiddenstore.inspect.facts import advice_numbers
from hiddenstore.records import Sample, TopK
from hiddenstore.segments import CONTAINERS
from hiddenstore.segments.base import unit_tokens
from hiddenstore.store import Store
from hiddenstore.targets.calibration import Slice, read_slice, slice_document, take_slice
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.rebuild import Rebuilder, whole_samples
from schemas.advice import Advice, AdviceRow
from schemas.capture import FINAL, REBUILT, TOPK, CaptureSpec, Codecs, NormState
from schemas.layers import field_name

_LOGITS_AT_ONCE = 1 << 24
_E4M3_LARGEST = 448.0
# A chunk's crc32c, and its offset and length in the index.
_CHUNK_OVERHEAD = 4 + 16
_TOKEN_AND_MASK_BYTES = 5
_POSITION_BYTES = 4


@dataclass(frozen=True)
class DistributionChange:
    """Means over final rows: KL in nats, overlap sum min(p, p'), share of rows whose most probable token differs."""

    kl: float
    overlap: float
    top1_flips: float


_UNCHANGED = DistributionChange(kl=0.0, overlap=1.0, top1_flips=0.0)


def distribution_change(
    head: HeadBundle, original: Tensor, decoded: Tensor, state: NormState
) -> DistributionChange | None:
    """KL(p || p') and the rest, p from final hiddens bfloat16 [R, D] as captured and p' from them decoded.

    Rows whose own logits overflow are left out; None where no number comes of the others.
    """
    return _mean_change(
        (_log_probs(head, original[rows], state), _log_probs(head, decoded[rows], state))
        for rows in _blocks(head, original)
    )


def truncation_change(head: HeadBundle, original: Tensor, top: TopK, state: NormState) -> DistributionChange | None:
    """The same where p' is what top tokens say, scaled to one and else zero; KL(p' || p), as the other is infinite."""
    pairs = (
        (_log_probs(head, original[rows], state).gather(1, top.ids[rows]), top.log_probs[rows].double().log_softmax(-1))
        for rows in _blocks(head, original)
    )
    return _mean_change(pairs, reverse=True)


def _log_probs(head: HeadBundle, final: Tensor, state: NormState) -> Tensor:
    return head.logits(final, state).double().log_softmax(-1)


def _blocks(head: HeadBundle, original: Tensor) -> Iterator[slice]:
    step = max(1, _LOGITS_AT_ONCE // head.vocab_size)
    return (slice(start, start + step) for start in range(0, len(original), step))


def _mean_change(pairs: Iterable[tuple[Tensor, Tensor]], reverse: bool = False) -> DistributionChange | None:
    """From log-probabilities [n, V] before and after; ``reverse``: KL(after || before)."""
    kl = overlap = flips = 0.0
    count = 0
    for before, after in pairs:
        finite = before.isfinite().all(-1)
        if not finite.all():
            before, after = before[finite], after[finite]
        p, q = (after, before) if reverse else (before, after)
        kl += float((p.exp() * (p - q)).sum())
        overlap += float(torch.minimum(before, after).exp().sum())
        flips += float((before.argmax(-1) != after.argmax(-1)).sum())
        count += len(before)
    if not count or not isfinite(kl):
        return None
    return DistributionChange(max(0.0, kl / count), min(1.0, overlap / count), flips / count)


def channel_error(original: Tensor, decoded: Tensor) -> float:
    """Root mean square over tokens of |(h' - h) / c| / |(h - mu) / c|, norms over channels; bfloat16 [T, D] each.

    mu and c are the robust centre and size of each channel: dividing by c lets every channel count alike, where a
    plain relative error sees the few massive ones only; the quotient per token keeps attention sinks from being all
    that counts. Tokens that hold a NaN or an infinity are left out; one that decodes to a NaN is the largest error.
    Why it is judged so: docs/design/003.
    """
    scale, offset = channel_statistics(original)
    before = original.float()
    size = ((before - offset) / scale).double().square().sum(1)
    error = ((decoded.float() - before) / scale).double().square().sum(1)
    counted = torch.isfinite(size) & (size > 0)
    if not bool(counted.any()):
        return 0.0
    mean = (error[counted] / size[counted]).mean().nan_to_num(nan=torch.inf)
    return min(float(mean.sqrt()), sys.float_info.max)


@dataclass(frozen=True, eq=False)
class Trial:
    """decoded bfloat16 [T, D]; bytes of a row and once per unit; rows kept verbatim, values beyond their codes."""

    decoded: Tensor
    row_bytes: float
    unit_bytes: float
    raw_rows: int = 0
    clipped: int = 0


Form = Callable[[Tensor], Trial]
"""One layer bfloat16 [T, D], as a unit of its own, encoded and decoded."""


def through_codec(name: str, most_rows: int | None = None, fine: np.ndarray | None = None) -> Form:
    """The form that codec ``name`` gives a layer; a compressed chunk has at most ``most_rows``, where that is given.
    ``fine`` bool [T]: the classes of the rows, of a ``MaskedCodec``."""
    codec = CODECS[name]

    def run(layer: Tensor) -> Trial:
        if isinstance(codec, MaskedCodec) and fine is not None:
            encoded = codec.encode_layers([[layer]], fine=fine).joined()
            stored = codec.to_pieces(encoded.codes[0].cpu().numpy(), fine)
        else:
            encoded = codec.encode([layer])
            stored = encoded.codes[0].cpu().numpy()
        row_bytes, unit_bytes = _sizes(codec, encoded, stored, layer, most_rows or len(layer))
        raw = len(encoded.small[RAW_INDEX]) if RAW_INDEX in encoded.small else 0
        clipped = 0 if codec.reach is None else clipped_values(layer, encoded, codec.reach)
        return Trial(codec.decode(encoded)[0], row_bytes, unit_bytes, raw, clipped)

    return run


def fp8_per_token(layer: Tensor) -> Trial:
    """E4M3 with one bf16 scale per token: the form of the fp8 backend of vllm ``speculators`` (PR 1028)."""
    values = layer.float()
    peak = values.abs().amax(dim=1, keepdim=True)
    scale = (peak / _E4M3_LARGEST).bfloat16().float()
    # The scale of a row of zeros is zero, and that of one near it rounds there.
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = values / scale
    decoded = scaled.clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn).float() * scale
    # Values up to half a step beyond the largest code round to it.
    clipped = int((scaled.abs() > _E4M3_LARGEST * (1 + 2**-5)).sum())
    return Trial(decoded.bfloat16(), layer.shape[1] + 2.0, 0.0, 0, clipped)


def clipped_values(layer: Tensor, encoded: Encoded, reach: float) -> int:
    """How many values lie beyond what their codes can hold: |h - mu| / c > reach * token scale (``Codec.reach``)."""

    def small(name: str, otherwise: float) -> Tensor:
        if name not in encoded.small:
            return torch.full((1,), otherwise, device=layer.device)
        return bits_to_tensor(encoded.small[name][0], layer.device).float()

    y = ((layer.float() - small("channel_offset", 0.0)) / small("channel_scale", 1.0)).abs()
    token_scale = small("token_scale", 1.0)
    coded = torch.ones(len(layer), dtype=torch.bool, device=layer.device)
    if RAW_INDEX in encoded.small:
        coded[torch.from_numpy(encoded.small[RAW_INDEX][:, 1].astype(np.int64)).to(layer.device)] = False
    # y is divided here and multiplied by a reciprocal in the codec: the last bit may differ.
    return int((y > reach * (1 + 2**-20) * token_scale[:, None])[coded].sum())


def _sizes(codec: Codec, encoded: Encoded, codes: np.ndarray, layer: Tensor, most_rows: int) -> tuple[float, float]:
    """Bytes a row takes in a Zarr segment, chunk checksums and index included, and bytes that a unit takes once;
    ``codes`` as they are stored."""
    rows, width = layer.shape
    chunk, stored = min(codec.chunk_tokens(width), rows, most_rows), codes.nbytes
    if codec.compressed:
        stored = sum(len(blosc_chunks.compress(codes[start : start + chunk])) for start in range(0, rows, chunk))
    row_bytes, unit_bytes = stored / rows + _CHUNK_OVERHEAD / chunk, 0.0
    for name, field in codec.small.items():
        size = encoded.small[name].nbytes
        if {"T", "N"} & set(field.axes):
            row_bytes += size / rows
        else:
            unit_bytes += size
    return row_bytes, unit_bytes


@dataclass(frozen=True)
class Extent:
    """What is or will be stored: samples, their tokens, and how many of these hold a final hidden."""

    samples: int
    tokens: int
    final_rows: int

    @classmethod
    def of(cls, store: Store) -> "Extent":
        table = store.catalog.table
        return cls(len(table), *(int(column.sum(dtype=np.int64)) for column in (table.tokens, table.final_rows)))


def advise_store(
    store: Store, limits: RecipeLimits, advance: Callable[[], None] = lambda: None, rebuilder: Rebuilder | None = None
) -> Advice:
    """Advice for a store, from its calibration slice, or from its own states where these are exact; with a
    ``rebuilder`` also of the recipe ``rebuilt``, where the store ``holds_its_slice``. Raises ConfigError:
    ``calibration-missing``, ``store-empty``; CorruptionError: the slice or a sample is damaged."""
    extent = Extent.of(store)
    if not extent.tokens:
        problem = f"{store.path} holds no sample yet"
        hint = f"hiddenstore collect DATA -o {shlex.quote(store.path)} --target T"
        raise ConfigError(problem, kind=Kind.STORE_EMPTY, hint=hint)
    head = store.head(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    states, rebuilding = raw_slice(store), None
    if rebuilder is not None and holds_its_slice(store):
        rebuilding = Rebuilding(rebuilder, [store.sample(entry.id) for entry in states.samples])
    return advise(states, store.capture, head, extent, limits, store.manifest.container, advance, rebuilding)


def holds_its_slice(store: Store) -> bool:
    """Whether the tokens of every sample of the calibration slice are stored: a filtered copy may lack some, and
    nothing of it can be rebuilt then."""
    document = slice_document(store.fs)
    return document is None or all(entry.id in store for entry in document.samples)


def raw_slice(store: Store) -> Slice:
    """The states to judge recipes on; ConfigError ``calibration-missing`` where a store has none that are exact."""
    states = read_slice(store.fs, store.capture)
    rounded = inexact_fields(store.capture)
    if states is None and not rounded:
        states = take_slice((store.read(sample_id) for sample_id in store.sample_ids), store.capture)
    if states is None:
        raise ConfigError(
            f"{store.path} has no calibration slice, and its {' and '.join(rounded)} are rounded already: nothing is "
            "left to measure against",
            kind=Kind.CALIBRATION_MISSING,
            hint="hiddenstore collect DATA -o SMALL --target T --recipe raw   (a few conversations do), then: "
            "hiddenstore advise SMALL",
        )
    return states


def inexact_fields(capture: CaptureSpec) -> list[str]:
    """Which of the stored groups cannot be read back bit for bit."""
    groups = {"aux layers": capture.codecs.aux} if capture.aux_layers else {}
    groups |= {"final rows": capture.codecs.final} if capture.final != "none" else {}
    return [name for name, codec in groups.items() if not get_layout(codec).exact]


@dataclass(frozen=True)
class Rebuilding:
    """What brings back states of a slice, on the CPU, and the samples of that slice in its order."""

    rebuilder: Rebuilder
    samples: Sequence[Sample]


def trials(capture: CaptureSpec, rebuilds: bool = False) -> int:
    """How often ``advise`` calls ``advance``."""
    return len(_candidates(capture, rebuilds))


def advise(
    states: Slice,
    capture: CaptureSpec,
    head: HeadBundle,
    extent: Extent,
    limits: RecipeLimits,
    container: str,
    advance: Callable[[], None],
    rebuilding: Rebuilding | None,
) -> Advice:
    """Measure every recipe and choose the smallest that keeps both limits.

    ``capture`` says what is held; its codecs do not matter. Works on the device of ``head``. ``rebuilt`` is measured
    where something is there to rebuild with.
    """
    bench = _Bench(states, capture, head, extent, container, rebuilding)
    rows: list[AdviceRow] = []
    for name, codecs in _candidates(capture, rebuilding is not None).items():
        rows.append(bench.row(name, *codecs))
        advance()
    return choose(rows, limits, states.tokens, len(states.final))


def _candidates(capture: CaptureSpec, rebuilds: bool) -> dict[str, tuple[str, str]]:
    """Recipes that this capture can be stored in, codecs that other packages add, then the peer's format."""
    has_top_tokens = capture.aux_layers and capture.final != "none" and capture.target.vocab_size >= capture.topk
    recipes = {name: codecs for name, codecs in RECIPES.items() if codecs[1] != TOPK or has_top_tokens}
    # A slice is fewer states than a codec wants to be fitted to, and those that it would be judged by.
    recipes = {name: codecs for name, codecs in recipes.items() if codecs[0] not in FITTED}
    if not rebuilds:
        recipes = {name: codecs for name, codecs in recipes.items() if codecs[1] != REBUILT}
    added = {recipe_name(Codecs(aux=name, final=name)): (name, name) for name in CODECS.packages}
    return {**recipes, **added, FP8: (FP8, FP8)}


@dataclass(frozen=True)
class _GroupCost:
    """One form on one group of fields: bytes per token; rows, raw rows, values and clipped ones over its layers."""

    token_bytes: float
    rows: int = 0
    raw_rows: int = 0
    values: int = 0
    clipped: int = 0
    errors: dict[str, float] | None = None
    change: DistributionChange | None = None


class _Bench:
    """One slice on one device; every form is tried once per group of fields."""

    def __init__(
        self,
        states: Slice,
        capture: CaptureSpec,
        head: HeadBundle,
        extent: Extent,
        container: str,
        rebuilding: Rebuilding | None,
    ) -> None:
        self.device = head.embed_tokens.device
        self.states, self.capture, self.head, self.extent = states, capture, head, extent
        self.container, self.rebuilding = CONTAINERS[container], rebuilding
        self._aux, self._final = cache(self._measure_aux), cache(self._measure_final)

    def row(self, name: str, aux: str, final: str) -> AdviceRow:
        """What a recipe costs and does; not judged yet."""
        if final == REBUILT:
            stored = self._capture_with(aux, final).stored_layers
            first, second = self._aux(aux, stored), self._measure_rebuilt(aux)
        else:
            first, second = self._aux(aux, self.capture.aux_layers), self._final(final)
        errors = (first.errors if self.capture.aux_layers else second.errors) or {}
        change = second.change
        states, values = first.rows + second.rows, first.values + second.values
        return AdviceRow(
            recipe=name,
            bytes_per_token=first.token_bytes + second.token_bytes + self._bytes_beside_states(aux, final),
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

    def _measure_aux(self, form: str, stored: tuple[int, ...]) -> _GroupCost:
        numbered = enumerate(self.capture.aux_layers)
        layers = {field_name(k): self.states.aux[i].to(self.device) for i, k in numbered if k in stored}
        return self._cost(form, layers, self.extent.tokens)[0]

    def _measure_rebuilt(self, form: str) -> _GroupCost:
        """The final hidden as it comes back from the top aux layer in a form; it takes no byte."""
        if self.capture.final == "none":
            return _GroupCost(0.0)
        assert self.rebuilding is not None
        top, pairs = through_codec(form, fine=self._fine(form))(self.states.aux[-1]).decoded, []
        for rows, finals, sample in whole_samples(self.states, self.rebuilding.samples):
            pairs.append((self.states.final[finals], self.rebuilding.rebuilder.final_of(sample, top[rows])))
        if not pairs:
            return _GroupCost(0.0)
        original, again = (torch.cat(part).to(self.device) for part in zip(*pairs, strict=True))
        finite = torch.isfinite(original).all(dim=1) & torch.isfinite(again).all(dim=1)
        change = distribution_change(self.head, original[finite], again[finite], self.capture.final_norm)
        return _GroupCost(0.0, change=change)

    def _measure_final(self, form: str) -> _GroupCost:
        if self.capture.final == "none":
            return _GroupCost(0.0)
        share = self.extent.final_rows / self.extent.tokens
        norm, final = self.capture.final_norm, self._finite_final
        exact = form in CODECS and get_codec(form).exact
        if not len(final):
            bits = 8.0 * final.shape[1] if form == FP8 else get_layout(form).row_bits(final.shape[1])
            return _GroupCost(bits / 8 * share, change=_UNCHANGED if exact else None)
        if form == TOPK:
            width = final.shape[1]
            row_bytes = TOPK_CODEC.row_bits(width) / 8 + _CHUNK_OVERHEAD / min(
                TOPK_CODEC.chunk_tokens(width), len(final)
            )
            packed = pack_rows([top_tokens(self.head, final, norm, self.capture.topk)], self.capture.topk)
            stored = unpack_rows(packed).to(self.device)
            return _GroupCost(row_bytes * share, change=truncation_change(self.head, final, stored, norm))
        cost, (trial,) = self._cost(form, {FINAL: final}, self.extent.final_rows)
        change = _UNCHANGED if exact else distribution_change(self.head, final, trial.decoded, norm)
        return replace(cost, change=change)

    def _cost(self, name: str, layers: dict[str, Tensor], rows: int) -> tuple[_GroupCost, list[Trial]]:
        """Layers [T, D] through a form, of which the capture has ``rows`` rows; what a unit takes once is spread over
        its tokens."""
        form: Form = fp8_per_token
        if name != FP8:
            apart = self.container.samples_apart and self.extent.samples > 0
            fine = None if FINAL in layers else self._fine(name)
            form = through_codec(name, max(1, round(rows / self.extent.samples)) if apart else None, fine)
        tried = {field: form(layer) for field, layer in layers.items()}
        share, codec = rows / self.extent.tokens, name if name in CODECS else "q8"
        final = codec if codec in LAYOUTS else "q8"
        unit = min(self.extent.tokens, unit_tokens(self._capture_with(codec, final)))
        cost = _GroupCost(
            token_bytes=sum(trial.row_bytes * share + trial.unit_bytes / unit for trial in tried.values()),
            rows=sum(len(trial.decoded) for trial in tried.values()),
            raw_rows=sum(trial.raw_rows for trial in tried.values()),
            values=sum(trial.decoded.numel() for trial in tried.values()),
            clipped=sum(trial.clipped for trial in tried.values()),
            errors={field: channel_error(layers[field], trial.decoded) for field, trial in tried.items()},
        )
        return cost, list(tried.values())

    def _fine(self, name: str) -> np.ndarray | None:
        """The classes of the rows of the slice by the masks of its samples, of a codec whose rows have any."""
        codec = CODECS[name]
        if not isinstance(codec, MaskedCodec) or self.rebuilding is None:
            return None
        classes = []
        for window, sample in zip(self.states.samples, self.rebuilding.samples, strict=False):
            rows = codec.fine_rows(sample.loss_mask, [sample.tokens])
            classes.append(rows[window.start : window.start + window.tokens])
        return np.concatenate(classes)

    @cached_property
    def _finite_final(self) -> Tensor:
        final = self.states.final.to(self.device)
        return final[torch.isfinite(final).all(dim=1)]

    def _capture_with(self, aux: str, final: str) -> CaptureSpec:
        return self.capture.with_codecs(Codecs(aux=aux, final=final))

    def _bytes_beside_states(self, aux: str, final: str) -> float:
        """Bytes per token of ids, mask, positions of final rows, and what the container adds."""
        tokens = self.extent.tokens
        rows = 0 if self.capture.final == "none" else self.extent.final_rows
        plain = _TOKEN_AND_MASK_BYTES + _POSITION_BYTES * rows / tokens
        if aux == FP8:
            return plain
        capture = self._capture_with(aux, final)
        segments = -(-tokens // unit_tokens(capture))
        return plain + self.container.overhead(capture, self.extent.samples, segments).size_bytes / tokens


_ROW = "{:{}}  {:>7}  {:>7}  {:>7}  {:>7}  {:>6}  {:>7}  {:>8}"
_HEADER = ("recipe", "B/token", "smaller", "KL", "overlap", "flips", "channel", "raw rows")


def table_lines(advice: Advice, bytes_raw: float) -> list[str]:
    """A line per recipe under a header, the chosen one marked; ``bytes_raw`` is what a token takes as plain bf16."""
    widest = max(len(row.recipe) for row in advice.rows)
    lines = ["  " + _ROW.format(_HEADER[0], widest, *_HEADER[1:])]
    for row in advice.rows:
        size = f"{row.bytes_per_token:,.0f}", f"{bytes_raw / row.bytes_per_token:.2f}x"
        kl = "–" if row.kl is None else "0" if row.kl == 0 else f"{row.kl:.1e}"
        overlap = "–" if row.overlap is None else f"{row.overlap:.4f}"
        shares = map(_percent, (row.top1_flips, row.channel_error, row.raw_rows))
        lines.append(("→ " if row.chosen else "  ") + _ROW.format(row.recipe, widest, *size, kl, overlap, *shares))
    return lines


def _percent(share: float | None) -> str:
    if share is None or share == 0:
        return "–" if share is None else "0 %"
    return f"{100 * share:.1f} %" if share < 1e3 else f"{100 * share:.0e} %"


def write_advice(fs: Filesystem, advice: Advice) -> str:
    """Publish advice under the next number, unless the latest says the same; the path of the document that holds it."""
    number = max(advice_numbers(fs), default=0)
    if number and fs.read(layout.advice_path(number)) == seal(advice):
        return layout.advice_path(number)
    while not fs.put_if_absent(layout.advice_path(number + 1), seal(advice)):
        number += 1
    return layout.advice_path(number + 1)
