"""What a recipe costs in acceptance: short drafters trained in pairs on original and on decoded states.

A pair has one seed, so one start and one order of samples, and differs in the states alone; both are judged on the
original states of held-out text. That resolves differences of hundredths of a point where two seeds differ by half a
point. Why pairs: docs/design/003.

Shapes: S seeds, N held-out samples.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.files.lock import FolderLock
from hiddenstore.inspect.advise import inexact_fields
from hiddenstore.process import Rank
from hiddenstore.store import Store
from schemas.advice import PairedRow, SourceLoss
from schemas.manifest import CommitRecord, SampleEntry
from trainer.config import LossConfig
from trainer.drafters import DRAFTERS, drafter_kind
from trainer.parallel.group import ProcessGroup
from trainer.settings import load_config
from trainer.train.run_folder import TrainOptions
from trainer.train.state import TrainState, build_state, token_batches
from trainer.train.step import steps

DEFAULTS = {"eagle3": ("train.max_steps=200", "loss.steps=3")}
"""Settings of a short run, by drafter; of others the steps alone."""
VALIDATION_TOKENS = 32_768
FEWEST_SEEDS = 2
SOURCE_LETTERS = 12
FEWEST_SAMPLES = 2
"""Of one held-out sample no interval is known."""
ORIGINAL = "original"

Advance = Callable[..., None]
"""Called after every step with the steps there are in all; ``doing`` says whose."""


def measure_paired(
    store: Store,
    recipes: Sequence[str],
    seeds: Sequence[int],
    words: Sequence[str],
    advance: Advance,
    target: str | None = None,
    minutes: float | None = None,
    drafter: str = "eagle3",
) -> list[PairedRow]:
    """Train a drafter per seed on the original states and one per recipe; a row per recipe.

    ``words`` are settings of ``train``; ``target`` the checkpoint of the states, for recipes that rebuild some. Behind
    the second seed none begins that would end after ``minutes``. As many samples as the steps need are copied into a
    temporary folder, once per recipe. Raises ConfigError: ``states-rounded``, the store's own codecs are not exact;
    ``split-empty``; ``option-invalid``, the drafter's loss knows no overlap; a wrong setting.
    """
    with TemporaryDirectory(prefix="hiddenstore-paired-") as folder:
        original, copies, plan = paired_copies(store, recipes, seeds, words, Path(folder), target, drafter)
        began, by_seed = time.monotonic(), list[dict[str, HeldOut]]()
        count_step = partial(advance, plan.steps * len(plan.seeds) * (1 + len(copies)))
        for done, seed in enumerate(plan.seeds):
            spent = (time.monotonic() - began) / 60
            if minutes is not None and done >= FEWEST_SEEDS and spent * (done + 1) / done > minutes:
                break
            by_seed.append(overlaps_of_seed(original, copies, plan, seed, count_step))
        return pair_rows(plan, by_seed, store, (time.monotonic() - began) / 60)


def paired_copies(
    store: Store,
    recipes: Sequence[str],
    seeds: Sequence[int],
    words: Sequence[str],
    folder: Path,
    target: str | None,
    drafter: str,
) -> tuple[Store, dict[str, Store], "PairPlan"]:
    """What `measure_paired` compares, in a folder: original states, those of each recipe, and how they are trained on;
    raises what it does."""
    rounded = inexact_fields(store.capture)
    if rounded:
        raise ConfigError(
            f"the {' and '.join(rounded)} of {store.path} are rounded already: no original states to train on",
            kind=Kind.STATES_ROUNDED,
            hint="hiddenstore collect DATA -o RAW --target T --recipe raw, then: hiddenstore advise RAW --paired",
        )
    words = (*DEFAULTS.get(drafter, ("train.max_steps=200",)), *words)
    config = load_config(store, drafter, None, words)
    if config.loss.as_rejection() is None:
        able = [name for name in DRAFTERS if drafter_kind(name).loss.as_rejection is not LossConfig.as_rejection]
        problem = f"acceptance of {drafter} is not measured by overlap; it is of {', '.join(able)}"
        raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint="hiddenstore advise STORE --paired --drafter eagle3")
    count = config.train.max_steps
    if count is None:
        problem = "train.max_steps=none: every drafter of a pair takes as many steps, and the samples follow from them"
        raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint="train.max_steps=200")
    ids = _sample_ids(store, count * config.data.batch_tokens)
    original = _copy(store, folder / ORIGINAL, None, ids, None)
    copies = {name: _copy(store, folder / name, name, ids, target) for name in recipes}
    return original, copies, PairPlan(drafter, tuple(seeds), tuple(words), count)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out samples, ``ids`` ascending: overlaps fp64 [N], the sum over a sample's slots of sum min(p, q) at the
    first drafted token; slots fp64 [N]."""

    ids: Sequence[str]
    overlaps: Tensor
    slots: Tensor

    @property
    def acceptance(self) -> float:
        """Mean over all slots."""
        return float(self.overlaps.sum() / self.slots.sum())


@dataclass(frozen=True)
class PairPlan:
    """Drafter, settings of ``train`` and steps that all runs of a comparison share."""

    drafter: str
    seeds: tuple[int, ...]
    words: tuple[str, ...]
    steps: int


def overlaps_of_seed(
    original: Store, copies: Mapping[str, Store], plan: PairPlan, seed: int, advance: Callable[..., None]
) -> dict[str, HeldOut]:
    """What drafters of one seed do that were trained on the original states and on those of every copy, by name."""
    words = [*plan.words, f"train.seed={seed}", f"data.seed={seed}"]
    by_name = {}
    for name, trained_on in ((ORIGINAL, original), *copies.items()):
        state = _train(trained_on, plan.drafter, words, partial(advance, doing=f"{name}, seed {seed}"))
        by_name[name] = held_out_overlaps(state, original)
    return by_name


def pair_rows(
    plan: PairPlan, by_seed: Sequence[Mapping[str, HeldOut]], whole: Store, minutes: float
) -> list[PairedRow]:
    """A row per copy, of the first seeds of a plan; ``whole``: a store of the held-out samples, with their inputs."""
    some = by_seed[0][ORIGINAL]
    sources = [whole.locate(sample_id)[0].input[:SOURCE_LETTERS] for sample_id in some.ids]
    plan = replace(plan, seeds=plan.seeds[: len(by_seed)])
    sums = {name: torch.stack([of_seed[name].overlaps for of_seed in by_seed]) for name in by_seed[0]}
    reference = sums.pop(ORIGINAL)
    rows = (pair_row(plan, name, overlaps, reference, some.slots, sources) for name, overlaps in sums.items())
    return [row.model_copy(update={"minutes": minutes}) for row in rows]


@torch.no_grad()
def held_out_overlaps(state: TrainState, original: Store) -> HeldOut:
    """What a drafter does on the held-out states of ``original``, each sample on its own; those it cannot be judged on
    are left out. ConfigError ``split-empty``: that is all of them."""
    kind = drafter_kind(state.config.drafter.name)
    rejection = state.config.loss.as_rejection()
    assert rejection is not None
    objective = kind.objective(state.model, state.target, rejection)
    rows = {}
    state.model.eval()
    for batch in token_batches(original, state.config, state.group, state.device, validation=True):
        for sample in (sample for pack in batch.packs for sample in _samples(pack)):
            inputs = objective.prepare(sample)
            losses = objective.losses(inputs, objective.denominators(inputs))
            count = float(losses.counts[0])
            rows[sample.sample_ids[0]] = count - float(losses.sums[0]), count
    ids = sorted(name for name, (_, count) in rows.items() if count)
    if not ids:
        problem = f"no validation sample of {original.path} ({len(rows)}) has a supervised token to judge a drafter on"
        raise ConfigError(problem, kind=Kind.SPLIT_EMPTY, hint="hiddenstore prepare INPUT -o DATA --target T --val 10%")
    overlaps, slots = torch.tensor([rows[name] for name in ids], dtype=torch.float64).unbind(1)
    return HeldOut(ids, overlaps, slots)


def _samples(pack: PackedBatch) -> Iterator[PackedBatch]:
    """The samples of a pack as packs of their own."""
    lengths = torch.bincount(pack.document, minlength=len(pack.sample_ids)).tolist()
    for name, (start, stop) in zip(pack.sample_ids, pairwise(accumulate(lengths, initial=0)), strict=True):
        rows = slice(start, stop)
        final = (pack.final_rows >= start) & (pack.final_rows < stop)
        yield replace(
            pack,
            input_ids=pack.input_ids[rows],
            loss_mask=pack.loss_mask[rows],
            positions=pack.positions[rows],
            document=torch.zeros_like(pack.document[rows]),
            aux=pack.aux[:, rows],
            final=pack.final[final],
            final_rows=pack.final_rows[final] - start,
            sample_ids=[name],
        )


def pair_row(
    plan: PairPlan, recipe: str, overlaps: Tensor, reference: Tensor, slots: Tensor, sources: Sequence[str]
) -> PairedRow:
    """A recipe's overlaps fp64 [S, N] against those of the original states; slots fp64 [N] and input of every held-out
    sample."""
    whole, per_source = paired_difference(overlaps, reference, slots), []
    for source in sorted(set(sources)):
        of_it = torch.tensor([one == source for one in sources])
        samples = int(of_it.sum())
        if samples < FEWEST_SAMPLES:
            continue
        part = paired_difference(overlaps[:, of_it], reference[:, of_it], slots[of_it])
        per_source.append(SourceLoss(source=source, samples=samples, difference=part.mean, half_width=part.half_width))
    return PairedRow(
        recipe=recipe,
        drafter=plan.drafter,
        steps=plan.steps,
        seeds=plan.seeds,
        acceptance=tuple((overlaps.sum(1) / slots.sum()).tolist()),
        original_acceptance=tuple((reference.sum(1) / slots.sum()).tolist()),
        difference=whole.mean,
        standard_error=whole.standard_error,
        half_width=whole.half_width if math.isfinite(whole.half_width) else None,
        sources=tuple(per_source),
    )


def _train(store: Store, drafter: str, words: Sequence[str], on_step: Callable[[], None]) -> TrainState:
    """The state after the last step; the run folder is gone."""
    words = [*words, "train.validate_every=0"]
    with TemporaryDirectory(prefix="hiddenstore-run-") as folder, FolderLock(Path(folder) / "run") as lock:
        options = TrainOptions(store.path, Path(folder) / "run", drafter, None, words)
        state = build_state(options, ProcessGroup(Rank()), lock)
        for _ in steps(state):
            on_step()
        return state


def _sample_ids(store: Store, train_tokens: int) -> frozenset[str]:
    """Ids of enough samples of each split, taken in the order of their ids, which is a random one."""
    ids: set[str] = set()
    for split, limit in (("train", train_tokens), ("validation", VALIDATION_TOKENS)):
        samples = sorted((entry.id, entry.tokens) for _, entry in store.entries if entry.split == split)
        if not samples:
            raise ConfigError(
                f"{store.path} holds no {split} samples, and --paired trains on one split and judges on the other",
                kind=Kind.SPLIT_EMPTY,
                hint="hiddenstore prepare INPUT -o DATA --target T --val 2%",
            )
        total = 0
        for sample_id, tokens in samples:
            if total >= limit:
                break
            ids.add(sample_id)
            total += tokens
    return frozenset(ids)


def _copy(store: Store, location: Path, recipe: str | None, ids: frozenset[str], target: str | None) -> Store:
    def is_copied(_record: CommitRecord, entry: SampleEntry) -> bool:
        return entry.id in ids

    run_copy(open_copy([store], location, recipe, is_copied, "zarr", target=target))
    return Store.open(location)


_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % points of Student's t for 1 to 9 degrees of freedom."""
_NORMAL_95 = 1.959964


@dataclass(frozen=True)
class Difference:
    """A mean difference of acceptance, its standard error over seeds, and the half-width of its 95 % interval, infinite
    for one held-out sample."""

    mean: float
    standard_error: float
    half_width: float


def paired_difference(recipe: Tensor, original: Tensor, slots: Tensor) -> Difference:
    """From overlaps summed per sample fp64 [S, N] of either side and the slots of each sample fp64 [N]; S at least 2.

    The interval adds what another seed and what other held-out text would change: Student's t over the seeds, and over
    the samples' parts of the mean, samples being drawn as a whole.
    """
    total, parts = slots.sum(), recipe - original
    by_seed = (parts.sum(1) / total).tolist()
    mean = statistics.fmean(by_seed)
    error = statistics.stdev(by_seed) / len(by_seed) ** 0.5
    count = len(slots)
    if count == 1:
        return Difference(mean, error, math.inf)
    beside = parts.mean(0) - mean * slots
    text = float((beside.square().sum() * count / (count - 1)).sqrt() / total)
    return Difference(mean, error, math.hypot(_student_95(len(by_seed) - 1) * error, _student_95(count - 1) * text))


def _student_95(freedom: int) -> float:
    """The two-sided 95 % point of Student's t, to 0.003 (beyond the table: Abramowitz and Stegun 26.7.5)."""
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    z = _NORMAL_95
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
