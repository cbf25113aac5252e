"""``klt``: normalised rows turned by a Karhunen-Loève transform of their layer, in 3.4 bits a value on average.

    y = (h - mu_d) / c_d            as in ``q8``; the same rows are kept raw
    u_k = sum over d of y_d basis_kd / (s_t step_k)          s_t: root mean square of the row
    y ~ s_t scale sum over k of level_k weight_kd            level: the odd number 2 code + 1 - 2**bits_k

Neighbouring states of one layer are correlated: in the basis of their covariance most of a row lies in few components,
and these take the bits. A component has one bit at least. The transform is fitted to states of the store's own mix, and
is a file of the store, whose digest the codec's name ends with: a unit is never decoded by another.

Both products are exact on every machine: levels and rows are whole numbers, weights are whole numbers cut in two, and
no partial sum reaches 2**24, where float32 would begin to round. Measurements: docs/design/022.

Shapes: D width, K = 8 G components (D filled up), G groups of components with equal bits, n and m rows, C code columns.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from hiddenstore.codecs.affine import SMALL, AffineCodec, Seen, round_up_
from hiddenstore.codecs.base import Codec, EncodedLayers, RowPart, SmallField
from hiddenstore.codecs.channels import channel_statistics, raw_rows
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.targets.matmul import without_autocast

TRANSFORM = "transform"
"""Small array int32 [L]: which transform of the file a layer has."""
MEAN_BITS, MOST_BITS = 3.4, 7
GROUP = 8
FIT_TOKENS, FIT_TOKENS_PER_CHANNEL = 16_384, 4
_BASIS_SHARE = 0.75
_GAUSSIAN_STEPS = (1.596, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569)
# A weight is 128 high + low, both of seven bits and a sign.
_HALF_WEIGHT = 128
_LARGEST_WEIGHT = 16_000
# Steps of a row's root mean square: |row| <= 64 sqrt(K), so that its products stay exact.
_ROW_STEPS = 64.0
_EXACT = 2**24
_SMALLEST_SCALE = 2.0**-100
_SMALLEST_VARIANCE = 1e-6
# A row whose components lie beyond their codes takes larger steps, the best of these.
_COARSER = (1.0, 1.25, 1.5, 2.0)
# Of a row's energy, from which it is kept raw: the median is 0.01.
_LARGEST_ERROR = 0.1
_HALF_ULP, _SIXTEEN_BITS = 0x80, -0x100


@dataclass(frozen=True, eq=False)
class Transform:
    """Of one layer: weight int16 [K, D], row k component k's share in every channel at level 1; bits uint8 [G] of the
    components of each group, descending; scale: what weights count in."""

    weight: Tensor
    bits: Tensor
    scale: float
    _moved: dict[tuple[str, str], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def fit(cls, rows: Tensor) -> "Transform":
        """From states bfloat16 [n, D] of the whole mix, on any device: the basis from the first three quarters, the
        size of every component from the rest, since a basis overrates what it was made from. ConfigError
        ``codec-unfit``: there is no row that would not be kept raw."""
        scale, offset = channel_statistics(rows)
        y = (rows.float() - offset) / scale
        y = y[~raw_rows(y.abs().amax(1), scale)]
        if not len(y):
            problem = f"no transform can be fitted: none of {len(rows):,} rows is finite and below 2**125"
            raise ConfigError(problem, kind=Kind.CODEC_UNFIT, hint="--recipe rebuilt")
        y = y / y.square().mean(1, keepdim=True).sqrt().clamp(min=_SMALLEST_SCALE)
        cut = max(1, round(len(y) * _BASIS_SHARE))
        first, rest = y[:cut], y[cut:] if len(y) > cut else y
        basis = torch.linalg.eigh((_matmul(first.T, first) / len(first)).double()).eigenvectors.float()
        variance = _matmul(rest, basis).square().mean(0).clamp(min=_SMALLEST_VARIANCE)
        order = variance.argsort(descending=True)
        return cls._of(basis[:, order].T, variance[order].sqrt())

    @classmethod
    def _of(cls, basis: Tensor, sizes: Tensor) -> "Transform":
        """basis fp32 [D, D] by rows, sizes fp32 [D] of the components, descending."""
        width = len(sizes)
        filled = torch.nn.functional.pad(sizes, (0, -width % GROUP)).view(-1, GROUP)
        bits = torch.tensor(allocation(filled.square().mean(1).tolist(), code_bytes(width)), device="cpu")
        step = sizes.new_tensor((0.0, *_GAUSSIAN_STEPS))[bits].repeat_interleave(GROUP)[:width] * sizes
        # Far below the others a component would be a row of zeros, which cannot be turned back.
        step = step.clamp(min=float(step.max()) / 64)
        shares = basis * (step / 2)[:, None]
        scale = float(shares.abs().max() / _LARGEST_WEIGHT)
        weight = torch.nn.functional.pad((shares / scale).round().to(torch.int16), (0, 0, 0, -width % GROUP))
        return cls(weight.cpu().contiguous(), bits.to(torch.uint8), scale)

    @property
    def width(self) -> int:
        """D."""
        return self.weight.shape[1]

    @cached_property
    def levels(self) -> Tensor:
        """How many values the code of a component has: int64 [K]."""
        return (1 << self.bits.long()).repeat_interleave(GROUP)

    @cached_property
    def planes(self) -> list[int]:
        """Groups that have a first, second, … bit."""
        return [int((self.bits > bit).sum()) for bit in range(int(self.bits.max()))]

    def fault(self, width: int) -> str | None:
        """What is wrong with a transform for states of a width."""
        shape = (-(-width // GROUP) * GROUP, width)
        if (self.weight.dtype, self.bits.dtype) != (torch.int16, torch.uint8):
            return f"weights of {self.weight.dtype} and bits of {self.bits.dtype}, expected int16 and uint8"
        if tuple(self.weight.shape) != shape or tuple(self.bits.shape) != (shape[0] // GROUP,):
            return f"weights {list(self.weight.shape)}, expected {list(shape)}"
        if (
            int(self.bits.sum()) != code_bytes(width)
            or bool((self.bits.long().diff() > 0).any())
            or not self.bits.all()
            or int(self.bits.max()) > MOST_BITS
        ):
            return "bits that do not fill a row"
        largest = max(float(_matmul((self.levels - 1).float(), half.abs()).max()) for half in _halves(self.weight))
        is_exact = largest < _EXACT and 0 < self.scale < float("inf")
        return None if is_exact else "weights whose sums are not exact"

    def decoder(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The halves of the weights, [K, D] each: bf16 on a GPU, else fp32."""
        return self._on(device, "decoder", lambda: self.weight)

    def sums(self, device: torch.device, levels: Tensor) -> tuple[Tensor, Tensor]:
        """levels [m, K], fp32 or bf16, times the halves of the weights: fp32 [m, D] each."""
        high, low = self.decoder(device)
        return _sums(levels, high), _sums(levels, low)

    def encoder(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The halves of the basis in steps of 1 / ``_LARGEST_WEIGHT`` of its largest number, [D, K] each, as above."""
        return self._on(device, "encoder", lambda: (self._basis / self._largest).round().T.contiguous())

    @cached_property
    def _basis(self) -> Tensor:
        weight = self.weight.float()
        return weight / weight.norm(dim=1, keepdim=True).clamp(min=1.0)

    @cached_property
    def _largest(self) -> float:
        return float(self._basis.abs().max()) / _LARGEST_WEIGHT

    @cached_property
    def step(self) -> Tensor:
        """Of every component, in root mean squares of the row: fp32 [K]; infinite where it only fills up."""
        size = self.weight.float().norm(dim=1) * (2 * self.scale)
        return torch.where(size > 0, size, float("inf"))

    @cached_property
    def per_step(self) -> Tensor:
        """Steps of a component that one unit of the encoder's product is: fp32 [K]."""
        return self._largest / (_ROW_STEPS * self.step)

    @cached_property
    def weights_of_error(self) -> Tensor:
        """Squared error of a row by a component that is a step beside its value: fp32 [K]."""
        return self.step.nan_to_num(posinf=0.0).square()

    def inside(self, parts: Tensor, factor: Tensor) -> Tensor:
        """Parts fp32 [m, K] times factor [m], in steps, as their codes hold them: fp32 [m, K]."""
        half = (self.levels // 2).to(parts)
        return torch.minimum(torch.maximum((parts * factor[:, None]).floor_(), -half), half - 1).add_(0.5)

    def _on(self, device: torch.device, name: str, make: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        key = str(device), name
        if key not in self._moved:
            kind = torch.bfloat16 if device.type == "cuda" else torch.float32
            high, low = _halves(make())
            self._moved[key] = high.to(device, kind), low.to(device, kind)
        return self._moved[key]


def _halves(weight: Tensor) -> tuple[Tensor, Tensor]:
    """high and low of 128 high + low: of weights below 2**14 and of the encoder's rows, at most 64 sqrt(D), each is a
    whole number of at most 256."""
    high = (weight.float() / _HALF_WEIGHT).round()
    return high, weight.float() - _HALF_WEIGHT * high


def _product(rows: Tensor, halves: tuple[Tensor, Tensor]) -> Tensor:
    """rows fp32 [m, a] of whole numbers times the halves [a, b] of weights: fp32 [m, b], rounded once."""
    high, low = (_sums(rows, half) for half in halves)
    return high.mul_(_HALF_WEIGHT).add_(low)


def _sums(rows: Tensor, half: Tensor) -> Tensor:
    """Exact: rows fp32 or bf16 [m, a] of whole numbers times one half [a, b] of weights: fp32 [m, b].

    GPUs multiply bf16 some fifteen times as fast as fp32 and sum it in fp32. It holds whole numbers to 256, so larger
    ones are cut in two as weights are.
    """
    if half.dtype is not torch.bfloat16:
        return _matmul(rows.float(), half)
    with without_autocast(rows.device):
        if rows.dtype is torch.bfloat16:
            return torch.mm(rows, half, out_dtype=torch.float32)
        upper, lower = (part.bfloat16() for part in _halves(rows))
        sums = torch.mm(upper, half, out_dtype=torch.float32).mul_(_HALF_WEIGHT)
        return sums.add_(torch.mm(lower, half, out_dtype=torch.float32))


def _matmul(one: Tensor, other: Tensor) -> Tensor:
    # Whoever reads inside a training step is under its mixed precision, which would round what is exact.
    with without_autocast(one.device):
        return one @ other


def code_bytes(width: int) -> int:
    """C, and the bits of all groups of ``GROUP`` components together."""
    return math.floor(MEAN_BITS * -(-width // GROUP))


def allocation(variances: Sequence[float], total: int) -> list[int]:
    """Bits of each group of components, given their variances, descending: one, then where a bit takes most of the
    error."""
    bits = [1] * len(variances)
    worst = [(-variance, index) for index, variance in enumerate(variances)]
    heapq.heapify(worst)
    for _ in range(total - len(variances)):
        error, index = heapq.heappop(worst)
        bits[index] += 1
        if bits[index] < MOST_BITS:
            heapq.heappush(worst, (error / 4, index))
    return sorted(bits, reverse=True)


@dataclass(frozen=True)
class KltCodec(AffineCodec):
    """Codes by bit planes and a bf16 scale s_t per token; 3.42 bits a value at D = 576.

    h = bf16( y * c_d + mu_d ), y = s_t * scale * sum over k of level_k * weight_kd. A row of the code array is the
    first bit of components 0 … K-1, then the second bit of the components that have two, and so on: component 8 g + i
    is bit i of byte g of its plane. level = 2 code + 1 - 2**bits.

    Without ``read`` it says what its arrays look like, and neither encodes nor decodes: transforms are a store's.
    """

    name: str = "klt"
    code_dtype: str = "uint8"
    formula: str = (
        "bf16(y * channel_scale + channel_offset) in float32; rows in raw_index verbatim; y = token_scale * scale * "
        "(2 code + 1 - 2**bits) @ weight, by the layer's transform in the file of target/ with the codec's name; "
        "component 8 g + i is bit i of byte g in each plane of bits, the lowest bit first, and plane j has the groups "
        "of more than j bits"
    )
    nominal_bits: float = 4.0
    reach: float | None = None
    same_layer: float = 4e-3
    small: Mapping[str, SmallField] = field(default_factory=lambda: {**SMALL, TRANSFORM: SmallField("int32", ("L",))})
    read: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)
    transform: Transform | None = field(default=None, compare=False, repr=False)

    def columns(self, width: int) -> int:
        if self.transform is not None and self.transform.width != width:
            raise ConfigError(
                f"{self.name} is fitted to states of width {self.transform.width}, and these have {width}",
                kind=Kind.CODEC_UNFIT,
            )
        return -(-width // GROUP) * GROUP

    def code_columns(self, width: int) -> int:
        return code_bytes(width)

    def row_parts(self, width: int) -> tuple[RowPart, ...]:
        return (RowPart("codes", "|u1", code_bytes(width)),)

    def fit_tokens(self, width: int) -> int:
        return max(FIT_TOKENS, FIT_TOKENS_PER_CHANNEL * width)

    def fit_bytes(self, width: int) -> int:
        return self.columns(width) * width * torch.int16.itemsize + self.columns(width) // GROUP

    def layers_of(self, codec: Codec) -> int:
        assert isinstance(codec, KltCodec)
        return len(codec.transforms)

    def fit(self, layers: Iterable[Tensor]) -> bytes:
        """The file of transforms of the stored layers, from rows bfloat16 [n, D] of each, ascending."""
        tensors: dict[str, Tensor] = {}
        for layer, rows in enumerate(layers):
            transform = Transform.fit(rows)
            if (fault := transform.fault(rows.shape[1])) is not None:
                raise ConfigError(
                    f"no transform fits layers of width {rows.shape[1]}: {fault}",
                    kind=Kind.CODEC_UNFIT,
                    hint="--recipe rebuilt",
                )
            tensors |= {
                f"{layer}.weight": transform.weight,
                f"{layer}.bits": transform.bits,
                f"{layer}.scale": torch.tensor([transform.scale], dtype=torch.float32),
            }
        return bytes(save_tensors(tensors))

    def of(self, name: str, read: Callable[[], bytes]) -> "KltCodec":
        """The codec of a store, by the bytes of its file."""
        return replace(self, name=name, read=read)

    @cached_property
    def transforms(self) -> tuple["KltCodec", ...]:
        """The codec of each layer. Raises ConfigError ``codec-unfit``: it is no store's."""
        if self.read is None:
            raise ConfigError(
                f"{self.name} has no transform: it is fitted to states of the store that it is to be written to",
                kind=Kind.CODEC_UNFIT,
                hint="hiddenstore copy STORE NEW --recipe rebuilt-klt",
            )
        data = self.read()
        try:
            tensors = load_tensors(data)
            layers = [
                Transform(tensors[f"{n}.weight"], tensors[f"{n}.bits"], float(tensors[f"{n}.scale"]))
                for n in range(len(tensors) // 3)
            ]
        except (SafetensorError, KeyError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the transforms of {self.name} cannot be read: {error}", kind=Kind.CODEC_UNFIT
            ) from error
        for layer in layers:
            # What has no width is held against one that it cannot have.
            if (fault := layer.fault(layer.weight.shape[-1] if layer.weight.numel() > 1 else 1)) is not None:
                raise ConfigError(f"a transform of {self.name} has {fault}", kind=Kind.CODEC_UNFIT)
        return tuple(replace(self, transform=layer) for layer in layers)

    def of_layer(self, layer: int, small: Mapping[str, np.ndarray] | None) -> "KltCodec":
        index = layer if small is None else int(small[TRANSFORM][..., layer].flat[0])
        if not 0 <= index < len(self.transforms):
            raise ConfigError(
                f"{self.name} has {len(self.transforms)} transforms, and there is none at {index}",
                kind=Kind.CODEC_UNFIT,
            )
        return self.transforms[index]

    def encode_layers(
        self,
        layers: Iterable[Sequence[Tensor]],
        shared: Mapping[str, np.ndarray] | None = None,
        fine: np.ndarray | None = None,
        seen: Sequence[Seen] | None = None,
    ) -> EncodedLayers:
        encoded = super().encode_layers(layers, shared, fine, seen)
        count = len(encoded.codes)
        if shared is None and count not in (0, len(self.transforms)):
            raise ConfigError(
                f"{self.name} is fitted to {len(self.transforms)} layers, and {count} are to be written",
                kind=Kind.CODEC_UNFIT,
                hint="hiddenstore copy STORE NEW --recipe aux=klt,final=q8, which fits it anew",
            )
        places = np.arange(count, dtype=np.int32) if shared is None else shared[TRANSFORM]
        return EncodedLayers(encoded.codes, {**encoded.small, TRANSFORM: places} if count else {})

    def _decoded_by(
        self, kernels: Any, codes: Tensor, rows: Sequence[slice], small: Sequence[Mapping[str, Any]], out: Tensor
    ) -> bool:
        of_samples = [arrays for span, arrays in zip(rows, small, strict=True) if span.stop > span.start]
        if type(self) is not KltCodec or any(
            not np.array_equal(arrays[TRANSFORM], of_samples[0][TRANSFORM]) for arrays in of_samples
        ):
            return False
        layers = [self.of_layer(layer, of_samples[0])._fitted() for layer in range(len(codes) if of_samples else 0)]
        of_layers = [kernels.KltLayer(one.planes, one.scale, partial(one.sums, codes.device)) for one in layers]
        kernels.decode_klt(of_layers, codes, rows, small, out)
        return True

    def codes_of(self, y: Tensor, codes: Tensor, token_scale: Tensor, peak: Tensor, fine: Tensor | None = None) -> None:
        fitted = self._fitted()
        torch.maximum(y.amax(dim=1), y.amin(dim=1).neg_(), out=peak)
        size = torch.linalg.vector_norm(y, dim=1) / y.shape[1] ** 0.5
        scale = round_up_(size).clamp_(min=_SMALLEST_SCALE)
        rows = y[:, : fitted.width].mul_(_ROW_STEPS / scale[:, None]).round_()
        # A row that is not finite is kept raw, whatever its codes.
        parts = _product(rows.nan_to_num_(0.0, 0.0, 0.0), fitted.encoder(y.device)).mul_(fitted.per_step.to(y.device))
        least = torch.full_like(scale, float("inf"))
        for factor in _COARSER:
            coarser = round_up_(scale * factor)
            error = (parts * (scale / coarser)[:, None]).sub_(fitted.inside(parts, scale / coarser)).square_()
            error = _matmul(error, fitted.weights_of_error.to(y.device)).mul_((coarser / scale).square_())
            torch.where(error < least, coarser, token_scale, out=token_scale)
            torch.minimum(least, error, out=least)
        peak[~((least < _LARGEST_ERROR * fitted.width) & size.isfinite())] = float("inf")
        half = (fitted.levels // 2).to(parts)
        levels = fitted.inside(parts, scale / token_scale).add_(half - 0.5).to(torch.uint8)
        _pack(levels, fitted.planes, codes)

    def values_of(self, codes: Tensor, token_scale: Tensor, values: Tensor) -> None:
        fitted = self._fitted()
        levels = _unpack(codes, fitted.planes, values.shape[1]).mul_(2).add_(1 - fitted.levels.to(values))
        decoder = fitted.decoder(codes.device)
        product = _product(levels.to(decoder[0].dtype), decoder).mul_(token_scale[:, None] * fitted.scale)
        # Sixteen bits of it, so that the product with a scale is exact, and fused or not only the sum is rounded.
        product.view(torch.int32).add_(_HALF_ULP).bitwise_and_(_SIXTEEN_BITS)
        values[:, : product.shape[1]].copy_(product)

    def _fitted(self) -> Transform:
        assert self.transform is not None, "asked of the codec of a layer alone"
        return self.transform


def _pack(levels: Tensor, planes: Sequence[int], codes: Tensor) -> None:
    """Codes uint8 [m, K] by bit planes into ``codes`` uint8 [m, C]."""
    grouped = levels.view(len(levels), -1, GROUP)
    places = torch.arange(GROUP, dtype=torch.uint8, device=levels.device)
    start = 0
    for bit, groups in enumerate(planes):
        plane = grouped[:, :groups].bitwise_right_shift(bit).bitwise_and_(1).bitwise_left_shift_(places)
        codes[:, start : start + groups] = plane.sum(2, dtype=torch.uint8)
        start += groups


def _unpack(codes: Tensor, planes: Sequence[int], columns: int) -> Tensor:
    """The inverse: fp32 [m, K]."""
    levels = torch.zeros((len(codes), columns // GROUP, GROUP), dtype=torch.uint8, device=codes.device)
    places = torch.arange(GROUP, dtype=torch.uint8, device=codes.device)
    start = 0
    for bit, groups in enumerate(planes):
        plane = codes[:, start : start + groups, None].bitwise_right_shift(places).bitwise_and_(1)
        levels[:, :groups].bitwise_or_(plane.bitwise_left_shift_(bit))
        start += groups
    return levels.view(len(codes), columns).float()


KLT = KltCodec()
