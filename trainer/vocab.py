"""The draft vocabulary: which of the target's V tokens the drafter can say.

Shapes: V target vocabulary, U draft vocabulary.
"""

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeGuard

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from hiddenstore.data import WHOLE, SampleView
from hiddenstore.errors import ConfigError, CorruptionError, Kind, NotFoundError
from hiddenstore.files.damage import raise_refusal
from hiddenstore.files.pickles import require_safe_torch
from hiddenstore.fs.disk import read_whole, require_whole_links
from hiddenstore.store import Store


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """t2d bool [V]: whether the drafter knows a target token. d2t int64 [U]: target id minus draft id (an offset, as
    engines store it); target ids ascend."""

    t2d: Tensor
    d2t: Tensor

    def __post_init__(self) -> None:
        ids = self.target_ids
        if self.t2d.ndim != 1 or self.d2t.ndim != 1 or not len(ids):
            raise ConfigError("a draft vocabulary needs t2d [V] and d2t [U], U > 0", kind=Kind.VOCAB_INVALID)
        if int(ids[0]) < 0 or int(ids[-1]) >= self.target_size or bool((ids[1:] <= ids[:-1]).any()):
            raise ConfigError(
                f"d2t must hold offsets that give ascending target ids below {self.target_size}",
                kind=Kind.VOCAB_INVALID,
            )
        if int(self.t2d.sum()) != len(ids) or not bool(self.t2d[ids].all()):
            raise ConfigError("t2d and d2t name different target tokens", kind=Kind.VOCAB_INVALID)

    @property
    def size(self) -> int:
        return int(self.d2t.shape[0])

    @property
    def target_size(self) -> int:
        return int(self.t2d.shape[0])

    @property
    def is_full(self) -> bool:
        return self.size == self.target_size

    @property
    def target_ids(self) -> Tensor:
        """Target id of each draft id: int64 [U], ascending."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    def draft_ids(self) -> Tensor:
        """Draft id of each target id, -1 where the drafter does not know it: int64 [V]."""
        return torch.where(self.t2d, self.t2d.long().cumsum(0) - 1, -1)

    def to(self, device: torch.device | str) -> "DraftVocab":
        return DraftVocab(self.t2d.to(device), self.d2t.to(device))

    def save_bytes(self) -> bytes:
        """safetensors bytes with ``t2d`` and ``d2t``."""
        return bytes(save_tensors({"d2t": self.d2t.cpu().contiguous(), "t2d": self.t2d.cpu().contiguous()}))

    @classmethod
    def of_ids(cls, ids: Tensor, target_size: int) -> "DraftVocab":
        """From target ids in any order."""
        ids = ids.long().sort().values
        if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= target_size):
            outside = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
            raise ConfigError(
                f"draft vocabulary names token {outside}, but the target has {target_size}",
                kind=Kind.VOCAB_INVALID,
            )
        t2d = torch.zeros(target_size, dtype=torch.bool)
        t2d[ids] = True
        return cls(t2d, ids - torch.arange(len(ids)))

    @classmethod
    def full(cls, target_size: int) -> "DraftVocab":
        return cls.of_ids(torch.arange(target_size), target_size)

    @classmethod
    def of_counts(cls, counts: np.ndarray, size: int) -> "DraftVocab":
        """The ``size`` most frequent tokens of counts int64 [V]; ties go to the lower id."""
        if not 0 < size <= len(counts):
            raise ConfigError(
                f"draft vocabulary of {size} tokens asked for, the target has {len(counts)}", kind=Kind.OPTION_INVALID
            )
        order = np.argsort(-counts, kind="stable")[:size]
        return cls.of_ids(torch.from_numpy(np.sort(order)), len(counts))

    @classmethod
    def load(cls, path: str | Path, target_size: int) -> "DraftVocab":
        """From ``vocab.safetensors`` or a peer's ``d2t.pt`` (a tensor, or a mapping with ``d2t``) or ``d2t.npy``.
        Raises NotFoundError: no such file; CorruptionError: the file cannot be read, or its two tensors name different
        tokens; ConfigError: it does not fit a target of ``target_size`` tokens; ``pickle-refused``."""
        path = Path(path)
        if not path.is_file():
            require_whole_links(str(path))
            raise NotFoundError(f"no draft vocabulary at {path}", kind=Kind.PATH_MISSING)
        d2t, t2d = _read_tensors(path, target_size)
        ids = torch.arange(len(d2t)) + d2t.long()
        # Nothing else says that no bit of the file is another one by now.
        if t2d is not None and not torch.equal(ids.sort().values, t2d.nonzero().flatten()):
            problem = f"{path} is damaged: its d2t and t2d name different target tokens"
            raise CorruptionError(problem, kind=Kind.VOCAB_CORRUPT, path=str(path))
        return cls.of_ids(ids, target_size)


def _reason(error: Exception) -> str:
    # torch advises to load untrusted pickles after its first sentence.
    return str(error).partition(". ")[0].partition("\n")[0]


def _read_tensors(path: Path, target_size: int) -> tuple[Tensor, Tensor | None]:
    """d2t [U] of a file, and t2d [V] where it has one."""
    if path.suffix not in (".safetensors", ".npy"):
        require_safe_torch()
    try:
        if path.suffix == ".safetensors":
            stored: object = load_tensors(read_whole(path))
        elif path.suffix == ".npy":
            # Mapped, a header that claims more than the file has is an error before it is memory.
            stored = torch.from_numpy(np.array(np.load(path, mmap_mode="r", allow_pickle=False)))
        else:
            is_archive = zipfile.is_zipfile(path)
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # a hostile file may raise anything
        raise_refusal(error, path)
        raise CorruptionError(
            f"{path} cannot be read: {_reason(error)}", kind=Kind.VOCAB_CORRUPT, path=str(path)
        ) from error
    d2t, t2d = (stored.get("d2t"), stored.get("t2d")) if isinstance(stored, dict) else (stored, None)
    if not _is_plain(d2t) or d2t.dtype.is_floating_point or len(d2t) > target_size:
        problem = f"{path} holds no tensor d2t [U] of at most {target_size} whole numbers"
        raise ConfigError(problem, kind=Kind.VOCAB_INVALID)
    return d2t, t2d if _is_plain(t2d) else None


def _is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor [N] all of whose numbers are stored: a few bytes can claim any size."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    if value.is_quantized or value.is_complex() or value.ndim != 1:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def count_tokens(samples: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int) -> np.ndarray:
    """How often each token is supervised: int64 [V] over (input_ids [T], loss_mask [T]) pairs."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for input_ids, loss_mask in samples:
        counts += np.bincount(input_ids[loss_mask.astype(bool)], minlength=vocab_size)
    return counts


def count_store(store: "Store", vocab_size: int, view: SampleView = WHOLE) -> np.ndarray:
    """Counts int64 [V] of the tokens that teach in the training split of a store; reads tokens, masks and turns only,
    and what it counted last once."""
    return _count_store(store, vocab_size, view)


# However a caller writes the arguments, equal ones are one key.
@lru_cache(maxsize=1)
def _count_store(store: "Store", vocab_size: int, view: SampleView) -> np.ndarray:
    samples = (store.sample(sample_id) for sample_id in store.sample_ids)
    cut = slice(view.max_tokens)
    return count_tokens(((s.input_ids[cut], view.mask(s)[cut]) for s in samples if s.split == "train"), vocab_size)


def coverage(vocab: DraftVocab, counts: np.ndarray) -> float:
    """Share of the counted tokens that the draft vocabulary holds."""
    total = int(counts.sum())
    return float(counts[vocab.t2d.cpu().numpy()].sum()) / total if total else 1.0


def coverage_curve(counts: np.ndarray, sizes: Iterable[int]) -> list[tuple[int, float]]:
    """(size, coverage) of the vocabularies that ``of_counts`` gives for counts int64 [V]: distinct sizes, ascending."""
    ordered = np.sort(counts)[::-1].cumsum()
    total = int(ordered[-1]) if len(ordered) else 0
    samples = sorted({min(size, len(counts)) for size in sizes if size > 0})
    return [(size, float(ordered[size - 1]) / total if total else 1.0) for size in samples]


def curve_sizes(target_size: int, distinct: int) -> list[int]:
    """Sizes worth looking at for a target of V tokens: powers of two and what engines' drafters use, up to the size
    that covers everything."""
    sizes = {1 << power for power in range(6, target_size.bit_length())} | {32000, distinct}
    return sorted(size for size in sizes if size <= min(target_size, max(distinct, 1)))
