"""What a recipe costs in acceptance: short EAGLE-3 drafters trained in pairs on original and on decoded states.

A pair has one seed, so one start and one order of samples, and differs in the states alone; both are judged on the
original states of held-out text. That resolves differences of hundredths of a point where two seeds differ by half a
point. Source of the method: the codec study, section 3.

Shapes: K TTT steps.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from hiddenstore.advise.run import inexact_fields
from hiddenstore.copying import plan_copy, run_copy
from hiddenstore.errors import ConfigError
from hiddenstore.rank import Rank
from hiddenstore.store import Store
from schemas.advice import PairedRow
from schemas.manifest import CommitRecord, SampleEntry
from trainer.config import load_config
from trainer.drafters import drafter_kind
from trainer.run.run_folder import Asked
from trainer.run.session import Session, start, token_batches
from trainer.run.step import steps
from trainer.scale.group import Group

DRAFTER = "eagle3"
DEFAULTS = {"train.max_steps": "200", "loss.steps": "3"}
HELD_OUT_TOKENS = 32_768

Advance = Callable[..., None]
"""Called after every step with the steps there are in all; ``doing`` says whose."""


@dataclass(frozen=True)
class _Trial:
    """Stores of one experiment, the same samples in each, by recipe; ``original`` judges."""

    original: Store
    decoded: dict[str, Store]
    words: tuple[str, ...]
    total: int
    advance: Advance


def measure_paired(
    store: Store, recipes: Sequence[str], seeds: Sequence[int], words: Sequence[str], advance: Advance
) -> list[PairedRow]:
    """Train a drafter per seed on the original states and one per recipe; a row per recipe.

    ``words`` are settings of ``train``. As many samples as the steps need are copied into a temporary folder, once per
    recipe.

    Raises:
        ConfigError: ``states-rounded``, the store's own codecs are not exact; ``validation-missing``; a wrong setting.
    """
    rounded = inexact_fields(store.capture)
    if rounded:
        raise ConfigError(
            f"the {' and '.join(rounded)} of {store.path} are rounded already: no original states to train on",
            kind="states-rounded",
            hint="hiddenstore collect DATA -o RAW --target T --recipe raw, then: hiddenstore advise RAW --paired",
        )
    said = {word.split("=", 1)[0] for word in words}
    words = (*(f"{name}={value}" for name, value in DEFAULTS.items() if name not in said), *words)
    config = load_config(store, DRAFTER, None, words)
    count = config.train.max_steps or 0
    chosen = _chosen(store, count * config.data.batch_tokens)
    with TemporaryDirectory(prefix="hiddenstore-paired-") as folder:
        original = _copy(store, Path(folder) / "original", None, chosen)
        decoded = {name: _copy(store, Path(folder) / name, name, chosen) for name in recipes}
        trial = _Trial(original, decoded, tuple(words), count * len(seeds) * (1 + len(decoded)), advance)
        reference = _acceptances(trial, original, "original", seeds)
        return [
            _row(name, count, seeds, _acceptances(trial, held, name, seeds), reference)
            for name, held in trial.decoded.items()
        ]


def paired_difference(recipe: Sequence[float], original: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences of pairs, and its standard error; at least two pairs."""
    differences = [one - other for one, other in zip(recipe, original, strict=True)]
    return statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5


@torch.no_grad()
def acceptance(session: Session, original: Store) -> float:
    """Mean over slots of sum min(p, q) at the first drafted token, over the held-out states of ``original``."""
    kind = drafter_kind(session.config.drafter.name)
    overlap = session.config.loss.model_copy(update={"kind": "tv"})
    objective = kind.objective(session.model, session.side, overlap)
    lost = slots = 0.0
    session.model.eval()
    for batch in token_batches(original, session.config, session.group, validation=True):
        for pack in batch.packs:
            work = objective.plan(pack.to(session.device))
            losses = objective.losses(work, objective.divisors(work))
            lost += float(losses.sums[0])
            slots += float(losses.counts[0])
    return 1 - lost / slots


def _row(name: str, count: int, seeds: Sequence[int], found: Sequence[float], reference: Sequence[float]) -> PairedRow:
    difference, error = paired_difference(found, reference)
    return PairedRow(
        recipe=name,
        drafter=DRAFTER,
        steps=count,
        seeds=tuple(seeds),
        acceptance=tuple(found),
        original_acceptance=tuple(reference),
        difference=difference,
        standard_error=error,
    )


def _acceptances(trial: _Trial, store: Store, name: str, seeds: Sequence[int]) -> list[float]:
    return [_train(trial, store, f"{name}, seed {seed}", seed) for seed in seeds]


def _train(trial: _Trial, store: Store, doing: str, seed: int) -> float:
    """One drafter, trained and judged; its run folder is gone afterwards."""
    words = (*trial.words, f"train.seed={seed}", f"data.seed={seed}", "train.validate_every=0")
    with TemporaryDirectory(prefix="hiddenstore-run-") as folder:
        session = start(Asked(store.path, Path(folder) / "run", DRAFTER, None, words), Group(Rank()))
        for _ in steps(session):
            trial.advance(trial.total, doing=doing)
        return acceptance(session, trial.original)


def _chosen(store: Store, train_tokens: int) -> frozenset[str]:
    """Ids of enough samples of each split, taken in the order of their ids, which is a random one."""
    chosen: set[str] = set()
    for split, wanted in (("train", train_tokens), ("validation", HELD_OUT_TOKENS)):
        held = sorted((entry.id, entry.tokens) for _, entry in store.entries if entry.split == split)
        if not held:
            raise ConfigError(
                f"{store.path} holds no {split} samples, and --paired trains on one split and judges on the other",
                kind=f"{'validation' if split == 'validation' else 'split'}-missing",
                hint="hiddenstore prepare INPUT -o DATA --target T --val 2%",
            )
        seen = 0
        for sample_id, tokens in held:
            if seen >= wanted:
                break
            chosen.add(sample_id)
            seen += tokens
    return frozenset(chosen)


def _copy(store: Store, location: Path, recipe: str | None, chosen: frozenset[str]) -> Store:
    def keep(_record: CommitRecord, entry: SampleEntry) -> bool:
        return entry.id in chosen

    run_copy(plan_copy([store], location, recipe, keep, "zarr"))
    return Store.open(location)
