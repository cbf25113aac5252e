"""Everything a step needs, made new or as the newest checkpoint left it, the same on every rank."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hiddenstore.cli.output import output
from hiddenstore.data import Cursor, TokenBatches
from hiddenstore.documents import seal, unseal
from hiddenstore.errors import ConfigError
from hiddenstore.head import HeadBundle
from hiddenstore.store import Store
from schemas.manifest import Snapshot
from trainer.config import TrainConfig, config_class
from trainer.drafters import DRAFTERS, drafter_kind
from trainer.drafters.base import Drafter, DrafterInUse, Needs, Objective, TargetSide
from trainer.run import checkpoint
from trainer.run.optim import Optimizer
from trainer.run.run_folder import Asked, create, open_new, read_facts, reopen
from trainer.run.spikes import SpikeGuard
from trainer.run.standing import Standing
from trainer.run.warm_start import load_start, read_start
from trainer.scale.compiled import compile_blocks
from trainer.scale.context import Context, meet
from trainer.scale.device import pick_device
from trainer.scale.group import Group
from trainer.scale.memory import keep_freed_memory
from trainer.scale.parallel import Parallel, first_has_whole, hold
from trainer.vocab import DraftVocab, count_store, coverage


@dataclass(eq=False)
class Session:
    """Everything a step needs. ``store`` is opened at the run's snapshot; ``step`` counts the steps done."""

    asked: Asked
    store: Store
    config: TrainConfig
    group: Group
    device: torch.device
    model: Drafter
    objective: Objective[Any]
    parallel: Parallel
    context: Context | None
    optimizer: Optimizer
    batches: TokenBatches
    vocab_coverage: float
    side: TargetSide
    spikes: SpikeGuard
    standing: Standing
    step: int = 0
    validation: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.asked.run

    @property
    def in_use(self) -> DrafterInUse:
        """The drafter as it is now, for proposing."""
        return DrafterInUse(drafter_kind(self.config.drafter.name), self.model, self.side)

    @property
    def total_steps(self) -> int:
        return self.optimizer.total_steps


def start(asked: Asked, group: Group) -> Session:
    """Make a new run, or stand where the newest checkpoint of an old one stands.

    Raises:
        ConfigError, ConflictError, NotFoundError: see `trainer.run.loop.train`.
    """
    keep_freed_memory()
    store, config = _agreed(asked, group, reopen if asked.resume else open_new)
    _check_context(config)
    context = meet(config.train.context_parallel, group)
    with group.together():
        device = _device(config, group)
        head = HeadBundle.load(store, device)
    vocab, covered = _vocabulary(asked, store, config, head.vocab_size, group)
    with group.together():
        kind = drafter_kind(config.drafter.name)
        side = TargetSide(head, vocab.to(device), store.capture.final_norm)
        model = kind.build(config.drafter, side, config.train.seed).to(device)
        model.borrow(head)
        model.train()
        model.recompute = config.train.checkpoint_activations
        if config.train.compile:
            compile_blocks(model)
        objective = kind.objective(model, side, config.loss)
        batches = token_batches(store, config, group)
        total = config.train.max_steps or sum(batches.batches_per_epoch(epoch) for epoch in range(config.train.epochs))
        found = _newest(asked)
        if found is not None:
            model.load_state_dict(found.drafter)
        elif config.train.init_from is not None:
            load_start(model, read_start(config.train.init_from))
        if group.is_first and not asked.resume:
            create(asked.run, store, config, vocab, covered)
    group.take_from_first(model.state_dict().values())
    parallel = hold(model, config.train.parallel, group, device)
    optimizer = Optimizer(model, config.optim, total)
    state = found.state if found is not None else None
    spikes = SpikeGuard(config.train.spike_factor, state.spikes if state else None)
    standing = Standing(config.train, state.standing if state else None)
    session = Session(
        asked, store, config, group, device, model, objective, parallel, context, optimizer, batches, covered, side,
        spikes, standing,
    )  # fmt: skip
    if found is not None:
        with group.together():
            _restore(session, found)
    if group.is_first:
        _warn_of_idle_ranks(session)
    return session


def token_batches(store: Store, config: TrainConfig, group: Group, *, validation: bool = False) -> TokenBatches:
    """This rank's packs of the global batches, which ``data.batch_tokens`` alone defines."""
    endless = config.train.max_steps is not None and not validation
    needs: Needs = drafter_kind(config.drafter.name).needs(config.drafter, config.loss)
    return TokenBatches(
        store,
        split="validation" if validation else "train",
        layers=needs.aux_layers,
        final=needs.final != "none",
        batch_tokens=config.data.batch_tokens,
        pack_tokens=config.data.pack_tokens,
        seed=config.data.seed,
        rank=group.rank.rank // config.train.context_parallel,
        world_size=group.rank.world_size // config.train.context_parallel,
        prefetch_bytes=config.data.prefetch_mb * 1_000_000,
        epochs=None if endless else 1 if validation else config.train.epochs,
    )


def _check_context(config: TrainConfig) -> None:
    if config.train.context_parallel > 1 and not drafter_kind(config.drafter.name).splits_context:
        able = [name for name in DRAFTERS if drafter_kind(name).splits_context]
        raise ConfigError(
            f"{config.drafter.name} cannot split a sequence over ranks (train.context_parallel="
            f"{config.train.context_parallel}); these can: {', '.join(able)}",
            kind="context-parallel",
            hint="train.context_parallel=1",
        )


def save(session: Session, cursor: Cursor) -> None:
    """Publish a checkpoint after ``session.step`` steps; the other ranks wait until it is durable."""
    group = session.group
    weights = first_has_whole(session.model.state_dict(), group)
    moments = first_has_whole(session.optimizer.tensors(), group)
    with group.together():
        if group.is_first:
            _save(session, cursor, weights, moments | checkpoint.rng_tensors())


def _save(session: Session, cursor: Cursor, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
    spec = checkpoint.DrafterSpec(
        config=session.config.drafter.model_dump(mode="json"),
        target=session.store.capture.target,
        head=session.store.manifest.head,
        store=str(Path(session.store.path).resolve()),
        seed=session.config.train.seed,
        step=session.step,
    )
    state = checkpoint.RunState(
        step=session.step,
        cursor=cursor.to_json(),
        total_steps=session.total_steps,
        spikes=session.spikes.state,
        standing=session.standing.state,
        files={},
    )
    checkpoint.save(session.path, spec, state, (weights, optimizer))
    checkpoint.keep(session.path, session.config.train.keep, session.standing.kept)


def _agreed(
    asked: Asked, group: Group, choose: Callable[[Asked], tuple[Store, TrainConfig]]
) -> tuple[Store, TrainConfig]:
    """Rank 0 chooses; the others open the very same list of samples, although the store may be growing meanwhile."""
    chosen: list[tuple[Store, TrainConfig]] = []

    def message() -> bytes:
        chosen.append(choose(asked))
        store, config = chosen[0]
        snapshot = seal(store.snapshot(f"run-{asked.run.name}")).decode()
        return json.dumps({"snapshot": snapshot, "config": config.model_dump_json()}).encode()

    if group.is_alone:
        return choose(asked)
    said = json.loads(group.from_first(message))
    with group.together():
        if not chosen:
            snapshot = unseal(said["snapshot"].encode(), Snapshot, "the list of samples of rank 0")
            chosen.append((Store.open(asked.store, snapshot), _config(said["config"])))
    return chosen[0]


def _config(text: str) -> TrainConfig:
    return config_class(json.loads(text)["drafter"]["name"]).model_validate_json(text)


def _newest(asked: Asked) -> checkpoint.Checkpoint | None:
    path = checkpoint.latest(asked.run) if asked.resume else None
    return None if path is None else checkpoint.load(path)


def _restore(session: Session, found: checkpoint.Checkpoint) -> None:
    """All but the weights, which the model took before it was shared out."""
    session.optimizer.load(found.optimizer)
    checkpoint.restore_rng(found.optimizer)
    session.batches.load_state_dict(Cursor.from_json(found.state.cursor).to_json())
    session.step = found.state.step


def _vocabulary(asked: Asked, store: Store, config: TrainConfig, size: int, group: Group) -> tuple[DraftVocab, float]:
    """Counted once, by rank 0: it reads the tokens of the whole store. ``size`` is the head's vocabulary."""

    def choose() -> tuple[DraftVocab, float]:
        if asked.resume:
            return DraftVocab.load(asked.run / checkpoint.VOCAB, size), read_facts(asked.run).vocab_coverage
        is_counted = config.drafter.vocab_file is not None or config.train.init_from is not None
        if not is_counted and config.drafter.vocab_size >= store.capture.target.vocab_size:
            return DraftVocab.full(size), 1.0
        counts = count_store(store, size)
        if config.train.init_from is not None:
            vocab = read_start(config.train.init_from).vocab(size)
        elif config.drafter.vocab_file is not None:
            vocab = DraftVocab.load(config.drafter.vocab_file, size)
        else:
            vocab = DraftVocab.of_counts(counts, config.drafter.vocab_size)
        return vocab, coverage(vocab, counts)

    def message() -> bytes:
        vocab, covered = choose()
        return json.dumps({"ids": vocab.target_ids.tolist(), "coverage": covered}).encode()

    if group.is_alone:
        return choose()
    said = json.loads(group.from_first(message))
    return DraftVocab.of_ids(torch.tensor(said["ids"], dtype=torch.int64), size), float(said["coverage"])


def _device(config: TrainConfig, group: Group) -> torch.device:
    device = torch.device(pick_device(config.train.device))
    if device.type != "cuda":
        return device
    if device.index is None:
        count, local = torch.cuda.device_count(), group.rank.local_rank
        # A launcher that shows each task its own GPU alone numbers it 0.
        device = torch.device("cuda", 0 if count == 1 else local)
        if local >= count > 1:
            raise ConfigError(
                f"{group.rank} is number {local} on this machine, which has {count} GPUs",
                kind="device-unavailable",
                hint=f"torchrun --nproc-per-node {count} …",
            )
    torch.cuda.set_device(device)
    return device


def _warn_of_idle_ranks(session: Session) -> None:
    """Batches of one epoch that have fewer samples than there are ranks leave some without work."""
    ranks = session.group.rank.world_size // session.config.train.context_parallel
    if ranks == 1:
        return
    samples = [len(ids) for _plan, ids in session.batches.plan(0)]
    idle = sum(max(0, ranks - count) for count in samples) / len(samples)
    if idle < 0.5:
        return
    longest = max(entry.tokens for _, entry in session.store.entries)
    output().warn(
        f"{idle:.1f} of {ranks} ranks have nothing to do in the average step: a batch of "
        f"{session.config.data.batch_tokens:,} tokens holds {sum(samples) / len(samples):.1f} samples; "
        f"try data.batch_tokens={longest * ranks}"
    )
