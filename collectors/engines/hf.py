"""The transformers engine: the target in this process, states taken by forward hooks.

Shapes: B batch, T tokens of the padded batch, N tokens of the unit, R final rows, L aux layers, D width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from collectors.engines import (
    ENGINES,
    Captured,
    CaptureRequest,
    Done,
    EngineOptions,
    nobody,
    raise_if_stopped,
    read_settings,
    refuse_scratch,
)
from collectors.engines.resources import optional_package
from collectors.targets.images import ImageError
from collectors.targets.load import EngineTarget, LoadedTarget, LoadOptions, first_tensor, load_weights
from hiddenstore.codecs.memory import fresh
from hiddenstore.doctor import DoctorCheck, install_command, version_of
from hiddenstore.errors import CaptureError, ConfigError, Kind, StorageError
from hiddenstore.records import image_positions
from hiddenstore.targets.attention import any_length
from hiddenstore.targets.families import Parts
from hiddenstore.targets.folder import first_line
from hiddenstore.targets.rope import rope_boundary, rope_kind
from schemas.capture import NormState
from schemas.manifest import Engine, ImageEntry

# Below this share of real tokens a batch is closed: a padded token costs as much as a real one.
MIN_FILL = 0.75


def plan_batches(lengths: Sequence[int], batch_tokens: int, boundary: int | None = None) -> list[list[int]]:
    """Group sample indices into batches of at most ``batch_tokens`` padded tokens.

    Shortest first, ties by index; a sample longer than the budget is a batch of its own. No batch mixes samples up to
    ``boundary`` tokens with longer ones (``rope_boundary``).

    >>> plan_batches([5, 90, 6, 100], 200)
    [[0, 2], [1, 3]]
    """
    batches: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        length = lengths[index]
        padded = (len(batches[-1]) + 1) * length if batches else 0
        crosses = boundary is not None and batches and lengths[batches[-1][-1]] <= boundary < length
        if not batches or padded > batch_tokens or crosses or real + length < MIN_FILL * padded:
            batches.append([])
            real = 0
        batches[-1].append(index)
        real += length
    return batches


@dataclass(frozen=True, eq=False)
class Placement:
    """Where one row of a batch goes, its tokens to ``aux`` of the unit, and its positions ``rows`` to ``final``: int64
    [r] ascending, or a slice of consecutive ones."""

    aux: slice
    final: slice
    tokens: int
    rows: Tensor | slice


class StateTap:
    """Installs the hooks for one unit; aux bf16 [L, N, D], final bf16 [R, D]. Set ``batch`` before each forward."""

    def __init__(self, parts: Parts, aux_layers: Sequence[int], tokens: int, final_rows: int) -> None:
        self._parts = parts
        self._layers = tuple(aux_layers)
        self._handles: list[RemovableHandle] = []
        width, device = parts.head.hidden_size, parts.head.norm_weight.device
        self.aux = fresh((len(self._layers), tokens, width), torch.bfloat16, device)
        self.final = fresh((final_rows, width), torch.bfloat16, device)
        self.batch: Sequence[Placement] = ()

    def __enter__(self) -> "StateTap":
        blocks = self._parts.blocks
        for slot, layer in enumerate(self._layers):
            if layer == -1:
                # The input of block 0, not the output of the embedding module: Granite scales in between.
                hook = blocks[0].register_forward_pre_hook(partial(self._take_input, slot), with_kwargs=True)
            else:
                hook = blocks[layer].register_forward_hook(partial(self._take, slot))
            self._handles.append(hook)
        self._handles.append(self._parts.final_norm.register_forward_pre_hook(self._take_final))
        return self

    def __exit__(self, *_error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _take_input(self, slot: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._take(slot, module, args, args if args else kwargs["hidden_states"])

    def _take(self, slot: int, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        states = first_tensor(output)
        for row, placement in enumerate(self.batch):
            self.aux[slot, placement.aux].copy_(states[row, : placement.tokens])

    def _take_final(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        states = first_tensor(args)
        for row, placement in enumerate(self.batch):
            self.final[placement.final].copy_(states[row, placement.rows])


Images = Sequence[tuple[ImageEntry, bytes]]
"""The images of a sample in order, each with its file."""
CHECKED_ROWS = 2


class HfEngine:
    """Runs ``target.parts.backbone`` over length-bucketed batches; the LM head runs on a few checked rows only.

    Settings: ``device_map`` and ``attention``, as ``LoadOptions`` has them. A LoadedTarget is used as it is.
    """

    final_norm: NormState = "pre_norm"

    def __init__(self, target: EngineTarget, options: EngineOptions) -> None:
        settings = read_settings("hf", options.extra, dict.fromkeys(ENGINES["hf"].flags))
        if options.tensor_parallel != 1:
            raise ConfigError(
                "engine hf has no tensor parallelism", kind=Kind.ENGINE_ARG, hint="--device-map auto spreads the layers"
            )
        refuse_scratch("hf", options)
        if not isinstance(target, LoadedTarget):
            target = load_weights(target.folder, LoadOptions(options.dtype, options.device, **settings))
        self.target: LoadedTarget = target
        self._options = options
        self._boundary = rope_boundary(target.config)

    def describe(self) -> Engine:
        import transformers

        attention = getattr(self.target.model.config, "_attn_implementation", None) or "unknown"
        return Engine(
            name="hf",
            version=transformers.__version__,
            versions={"torch": torch.__version__},
            settings={"attention": attention, "dtype": self.target.identity.dtype},
        )

    def close(self) -> None:
        """Nothing outlives the process."""

    def capture(
        self, requests: Sequence[CaptureRequest], stop: Callable[[], bool] = lambda: False, done: Done = nobody
    ) -> Captured:
        """States of one unit; its bytes depend on the unit, the options and the machine only."""
        lengths = [len(request.input_ids) for request in requests]
        self._require_stateless_positions(max(lengths, default=0))
        placements = _placements(requests, self.target.device)
        token_ids = np.empty(sum(lengths), dtype=np.int32)
        next_rows: list[Tensor] = []
        next_tokens: list[Tensor] = []
        final_rows = sum(len(request.final_rows) for request in requests)
        tap = StateTap(self.target.parts, self._options.aux_layers, sum(lengths), final_rows)
        with tap, torch.inference_mode(), any_length():
            for batch in self._batches(requests):
                raise_if_stopped(stop)
                ids = _pad([requests[i].input_ids for i in batch])
                tap.batch = [placements[i] for i in batch]
                images = requests[batch[0]].images
                try:
                    if images:
                        last = forward_with_images(self.target, ids[0], images, requests[batch[0]].source)
                    else:
                        last = self._forward(torch.from_numpy(ids).to(self.target.device))
                except torch.OutOfMemoryError as error:
                    raise self._too_large([requests[i] for i in batch], error) from error
                for row, placement in enumerate(tap.batch):
                    token_ids[placement.aux] = ids[row, : placement.tokens]
                rows, tokens = self._next_tokens(last, [requests[i] for i in batch], tap.batch)
                next_rows.append(rows)
                next_tokens.append(tokens)
                done(sum(lengths[i] for i in batch))
        return Captured(token_ids, tap.aux, tap.final, torch.cat(next_rows), torch.cat(next_tokens).cpu())

    def _too_large(self, requests: Sequence[CaptureRequest], error: Exception) -> StorageError:
        """Not tried in smaller batches: what a unit's bytes are would depend on what else was in memory."""
        longest = max(requests, key=lambda request: len(request.input_ids))
        tokens, device = len(longest.input_ids), self.target.device
        if len(requests) > 1:
            what = f"a batch of {len(requests)} samples of up to {tokens:,} tokens"
            hint = f"--batch-tokens {max(tokens, self._options.batch_tokens // 2)}"
        else:
            what = f"{longest.source or 'a sample'} of {tokens:,} tokens alone"
            hint = f"hiddenstore prepare INPUT -o DATA --target T --max-tokens {tokens // 2}; or --device-map auto"
        return StorageError(
            f"{what} does not fit into the memory of {device}: {first_line(error)}", kind=Kind.OUT_OF_MEMORY, hint=hint
        )

    def _batches(self, requests: Sequence[CaptureRequest]) -> Iterator[list[int]]:
        """Batches of text, and samples with images one by one: every row of a batch has positions of its own there."""
        texts = [number for number, request in enumerate(requests) if not request.images]
        lengths = [len(requests[number].input_ids) for number in texts]
        for batch in plan_batches(lengths, self._options.batch_tokens, self._boundary):
            yield [texts[place] for place in batch]
        yield from ([number] for number, request in enumerate(requests) if request.images)

    def _require_stateless_positions(self, longest: int) -> None:
        """Refuse what cannot be exact: ``dynamic`` rotary embeddings remember the longest sequence run before."""
        if self._boundary is not None and longest > self._boundary and rope_kind(self.target.config) == "dynamic":
            raise ConfigError(
                f"a sample has {longest} tokens, and beyond {self._boundary} this target's dynamic rotary embedding "
                f"depends on what was run before",
                kind=Kind.ROPE_DYNAMIC,
                hint=f"hiddenstore prepare INPUT -o DATA --target T --max-tokens {self._boundary}",
            )

    def _forward(self, ids: Tensor) -> Tensor:
        """Post-norm last hidden [B, T, D] of padded ids int64 [B, T]; the hooks fire inside."""
        states: Tensor = self.target.parts.backbone(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def _next_tokens(
        self, last: Tensor, requests: Sequence[CaptureRequest], placements: Sequence[Placement]
    ) -> tuple[Tensor, Tensor]:
        """The model's own top-1 at a few captured rows, int64 [C] and, where the target is, [C]: nothing waits for it
        between batches. Scale and softcap are monotone, so left out."""
        batch_rows, positions, final_rows = [], [], []
        for row, (request, placement) in enumerate(zip(requests, placements, strict=True)):
            rows = len(request.final_rows)
            count = min(CHECKED_ROWS, rows)
            for k in sorted({rows - 1 - (i * rows) // count for i in range(count)}):
                batch_rows.append(row)
                positions.append(int(request.final_rows[k]))
                final_rows.append(placement.final.start + k)
        picked = last[torch.tensor(batch_rows, dtype=torch.long), torch.tensor(positions, dtype=torch.long)]
        tokens = self.target.lm_head(picked).argmax(dim=-1)
        return torch.tensor(final_rows, dtype=torch.long), tokens


def forward_with_images(target: LoadedTarget, input_ids: np.ndarray, images: Images, source: str) -> Tensor:
    """Post-norm last hidden [1, T, D] of a sample int32 [T] of ``source`` with its images; hooks on the target's parts
    fire inside. Raises CaptureError: ``engine-request``, an image is not what ``prepare`` made of it."""
    entries, made = [entry for entry, _ in images], []
    for entry, data in images:
        try:
            pixels = target.images.read(data)
        except ImageError as error:
            raise _changed(source, entry, str(error)) from error
        if (pixels.height, pixels.width) != (entry.height, entry.width):
            found = f"it takes {pixels.height} x {pixels.width} tokens here, not {entry.height} x {entry.width}"
            raise _changed(source, entry, found)
        made.append(pixels)
    # Not the backbone: the whole model below the head puts the images where their tokens are.
    states: Tensor = target.model.model(
        input_ids=torch.from_numpy(input_ids.astype(np.int64))[None].to(target.device),
        pixel_values=torch.from_numpy(np.concatenate([pixels.values for pixels in made])).to(target.device),
        image_grid_thw=torch.from_numpy(np.concatenate([pixels.grid for pixels in made])).to(target.device),
        position_ids=torch.from_numpy(image_positions(len(input_ids), entries))[:, None].to(target.device),
        use_cache=False,
    ).last_hidden_state
    return states


def _changed(source: str, entry: ImageEntry, reason: str) -> CaptureError:
    return CaptureError(
        f"{source or 'a sample'}: image {entry.sha256[:12]} is not what prepare made of it: {reason}",
        kind=Kind.ENGINE_REQUEST,
        hint="the versions of Pillow and transformers that prepare ran with; or prepare INPUT again",
    )


def _placements(requests: Sequence[CaptureRequest], device: torch.device) -> list[Placement]:
    placements, start, final_start = [], 0, 0
    for request in requests:
        rows, tokens = request.final_rows, len(request.input_ids)
        aux, final = slice(start, start + tokens), slice(final_start, final_start + len(rows))
        if len(rows) and int(rows[-1]) - int(rows[0]) + 1 == len(rows):
            positions: Tensor | slice = slice(int(rows[0]), int(rows[-1]) + 1)
        else:
            positions = torch.from_numpy(rows.astype(np.int64)).to(device)
        placements.append(Placement(aux, final, tokens, positions))
        start, final_start = aux.stop, final.stop
    return placements


def _pad(ids: Sequence[np.ndarray]) -> np.ndarray:
    """int64 [B, T], right-padded with the row's first token, which every vocabulary has."""
    padded = np.empty((len(ids), max(len(row) for row in ids)), dtype=np.int64)
    for out, row in zip(padded, ids, strict=True):
        out[: len(row)] = row
        out[len(row) :] = row[0]
    return padded


def checks() -> Iterator[DoctorCheck]:
    """What ``doctor`` says of transformers and of accelerate beside it."""
    version = version_of("transformers")
    if version is None:
        yield DoctorCheck("engine hf", "problem", "transformers is not installed", install_command("transformers"))
    else:
        detail = f"transformers {version} · layers taken by forward hooks, final hidden pre-norm"
        yield DoctorCheck("engine hf", "ok", detail)
    yield optional_package("accelerate", "hf", "targets over several GPUs, quantised targets")
