"""What a recipe costs in acceptance: short EAGLE-3 drafters trained in pairs on original and on decoded states.

A pair has one seed, so one start and one order of samples, and differs in the states alone; both are judged on the
original states of held-out text. That resolves differences of hundredths of a point where two seeds differ by half a
point. Why pairs: docs/design/003.

Shapes: K TTT steps.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.inspect.advise import inexact_fields
from hiddenstore.process import Rank
from hiddenstore.store import Store
from schemas.advice import PairedRow
from schemas.manifest import CommitRecord, SampleEntry
from trainer.drafters import drafter_kind
from trainer.parallel.group import ProcessGroup
from trainer.settings import load_config
from trainer.train.epochs import token_batches
from trainer.train.lock import RunLock
from trainer.train.run_folder import TrainOptions
from trainer.train.state import TrainState, build_state
from trainer.train.step import steps

DRAFTER = "eagle3"
DEFAULTS = {"train.max_steps": "200", "loss.steps": "3"}
VALIDATION_TOKENS = 32_768

Advance = Callable[..., None]
"""Called after every step with the steps there are in all; ``doing`` says whose."""


def measure_paired(
    store: Store,
    recipes: Sequence[str],
    seeds: Sequence[int],
    words: Sequence[str],
    advance: Advance,
    target: str | None = None,
) -> list[PairedRow]:
    """Train a drafter per seed on the original states and one per recipe; a row per recipe.

    ``words`` are settings of ``train``; ``target`` the checkpoint of the states, for recipes that rebuild some. As many
    samples as the steps need are copied into a temporary folder, once per recipe. Raises ConfigError:
    ``states-rounded``, the store's own codecs are not exact; ``validation-missing``; a wrong setting.
    """
    rounded = inexact_fields(store.capture)
    if rounded:
        raise ConfigError(
            f"the {' and '.join(rounded)} of {store.path} are rounded already: no original states to train on",
            kind=Kind.STATES_ROUNDED,
            hint="hiddenstore collect DATA -o RAW --target T --recipe raw, then: hiddenstore advise RAW --paired",
        )
    words = (*(f"{name}={value}" for name, value in DEFAULTS.items()), *words)
    config = load_config(store, DRAFTER, None, words)
    count = config.train.max_steps or 0
    ids = _sample_ids(store, count * config.data.batch_tokens)
    total = count * len(seeds) * (1 + len(recipes))
    with TemporaryDirectory(prefix="hiddenstore-paired-") as folder:
        original = _copy(store, Path(folder) / "original", None, ids, None)
        decoded = {name: _copy(store, Path(folder) / name, name, ids, target) for name in recipes}

        def acceptances(name: str, trained_on: Store) -> list[float]:
            results = []
            for seed in seeds:
                on_step = partial(advance, total, doing=f"{name}, seed {seed}")
                state = _train(trained_on, [*words, f"train.seed={seed}", f"data.seed={seed}"], on_step)
                results.append(acceptance(state, original))
            return results

        reference = acceptances("original", original)
        return [_row(name, count, seeds, acceptances(name, copy), reference) for name, copy in decoded.items()]


def paired_difference(recipe: Sequence[float], original: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences of pairs, and its standard error; at least two pairs."""
    differences = [one - other for one, other in zip(recipe, original, strict=True)]
    return statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5


@torch.no_grad()
def acceptance(state: TrainState, original: Store) -> float:
    """Mean over slots of sum min(p, q) at the first drafted token, over the held-out states of ``original``."""
    kind = drafter_kind(state.config.drafter.name)
    overlap = state.config.loss.model_copy(update={"kind": "tv"})
    objective = kind.objective(state.model, state.target, overlap)
    lost = slots = 0.0
    state.model.eval()
    for batch in token_batches(original, state.config, state.group, validation=True):
        for pack in batch.packs:
            inputs = objective.prepare(pack.to(state.device))
            losses = objective.losses(inputs, objective.denominators(inputs))
            lost += float(losses.sums[0])
            slots += float(losses.counts[0])
    return 1 - lost / slots


def _row(
    name: str, count: int, seeds: Sequence[int], acceptances: Sequence[float], reference: Sequence[float]
) -> PairedRow:
    difference, error = paired_difference(acceptances, reference)
    return PairedRow(
        recipe=name,
        drafter=DRAFTER,
        steps=count,
        seeds=tuple(seeds),
        acceptance=tuple(acceptances),
        original_acceptance=tuple(reference),
        difference=difference,
        standard_error=error,
    )


def _train(store: Store, words: Sequence[str], on_step: Callable[[], None]) -> TrainState:
    """The state after the last step; the run folder is gone."""
    words = [*words, "train.validate_every=0"]
    with TemporaryDirectory(prefix="hiddenstore-run-") as folder, RunLock(Path(folder) / "run") as lock:
        options = TrainOptions(store.path, Path(folder) / "run", DRAFTER, None, words)
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
