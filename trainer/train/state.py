"""The state of a training run: everything a step needs, new or as the newest checkpoint left it, on every rank; and
the batches of each epoch, from the run's snapshot, or with ``train.follow`` from what the store holds when it begins.

A run that follows publishes each epoch's list of commits in the store as the snapshot ``<the run's>.epoch-N`` before it
reads them, and takes the list that lies there: a resume reads what the run read, and gc leaves it. A branch publishes
under a name of its own, and reads the other run's lists up to the epoch in which it left it.
"""

import json
import math
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenstore.console.output import output
from hiddenstore.data import Cursor, PackedBatch, TokenBatches
from hiddenstore.data.view import WHOLE
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, Kind, StorageError
from hiddenstore.files.documents import seal, unseal
from hiddenstore.files.lock import FolderLock
from hiddenstore.index.catalog import saved_snapshots
from hiddenstore.index.table import SPLITS
from hiddenstore.process import is_out_of_memory
from hiddenstore.store import Store
from hiddenstore.targets.load import pick_device
from hiddenstore.threads import keep_freed_memory
from schemas.manifest import Snapshot
from trainer.config import LoopConfig, TrainConfig
from trainer.drafters import DRAFTERS, drafter_kind
from trainer.drafters.base import Drafter, DrafterInUse, LossInputs, Needs, Objective
from trainer.drafters.blocks import compile_blocks
from trainer.drafters.eagle3 import TttLoss
from trainer.losses.teacher import TargetInterface
from trainer.parallel.context import ContextGroup, context_group, shard_of
from trainer.parallel.data_parallel import Ddp, full_state_dict, parallelize
from trainer.parallel.group import ProcessGroup, limit_kernel_caches, require_own_gpus, uses_nccl
from trainer.settings import config_class, view_of
from trainer.train import checkpoint
from trainer.train.epochs import epoch_name, snapshot_of
from trainer.train.guard import BestCheckpoints, SpikeGuard
from trainer.train.optim import Optimizer
from trainer.train.run_folder import (
    TrainOptions,
    create,
    describe,
    load_start,
    open_new,
    read_facts,
    reopen,
    run_snapshot,
    vocab_of,
)
from trainer.vocab import DraftVocab, count_store, coverage


@dataclass(eq=False)
class TrainState:
    """Everything a step needs. ``store`` is opened at the run's snapshot, ``batches.store`` at that of the epoch;
    ``seed`` is that of the first weights, whatever a resume changed; ``step`` counts the steps done; ``begun``: the
    epoch that just began over what the store holds now."""

    options: TrainOptions
    store: Store
    config: TrainConfig
    group: ProcessGroup
    device: torch.device
    model: Drafter
    objective: Objective[Any]
    parallel: Ddp
    context: ContextGroup | None
    optimizer: Optimizer
    batches: TokenBatches
    vocab_coverage: float
    target: TargetInterface
    spikes: SpikeGuard
    best: BestCheckpoints
    seed: int
    step: int = 0
    validation: dict[str, Any] = field(default_factory=dict)
    begun: int | None = None

    def go_to(self, cursor: Cursor) -> None:
        """Let the batches go on at a cursor, over the samples of its epoch. Raises ConflictError: ``cursor-mismatch``:
        they are not those that it counts in."""
        # Where an epoch begins, the cursor still names the samples of the one before.
        begins = self.config.train.follow and not cursor.samples
        name = self.group.broadcast_bytes(lambda: self._snapshot_at(cursor, begins).encode()).decode()
        with self.group.all_or_none():
            store = self.options.open_store(name) if name else self.store
            batches = token_batches(store, self.config, self.group, self.device, epoch=cursor.epoch)
            snapshot = batches.digest if begins else cursor.snapshot
            batches.load_state_dict(replace(cursor, snapshot=snapshot).to_json())
        self.batches = batches
        if begins and cursor.epoch:
            self.begun = cursor.epoch

    def _snapshot_at(self, cursor: Cursor, begins: bool) -> str:
        """Name of the published snapshot that the epoch of ``cursor`` reads; empty for the run's own."""
        run, epoch = run_snapshot(self.path).name, cursor.epoch
        if begins and epoch:
            name = epoch_name(run, epoch)
            if name in saved_snapshots(self.store.fs):
                return name
            try:
                self.options.open_store().save_snapshot(name)
            except (StorageError, CorruptionError) as error:
                output().warn(f"epoch {epoch + 1} reads no more than the one before it: {error.message}")
            else:
                return name
        return snapshot_of(self.store.fs, run, cursor)

    @property
    def path(self) -> Path:
        return self.options.run

    @property
    def in_use(self) -> DrafterInUse:
        """The drafter as it is now, for proposing."""
        return DrafterInUse(drafter_kind(self.config.drafter.name), self.model, self.target)

    @property
    def total_steps(self) -> int:
        return self.optimizer.total_steps

    def begin_step(self) -> None:
        """Tell the drafter which step comes, see `Drafter`."""
        self.model.rng_key, self.model.progress = (self.config.train.seed, self.step), self.step / self.total_steps

    @property
    def trainable(self) -> int:
        """Parameters that are trained."""
        return sum(parameter.numel() for parameter in self.optimizer.named.values())


def build_state(options: TrainOptions, group: ProcessGroup, lock: FolderLock) -> TrainState:
    """The state of a new run, whose folder is made, or of an old one at its newest checkpoint; rank 0 takes ``lock``.
    Raises what `trainer.train.loop.train` says."""
    keep_freed_memory()
    limit_kernel_caches()
    store, config = _open_on_every_rank(options, group, lock)
    _check_context(config)
    context = context_group(config.train.context_parallel, group)
    with group.all_or_none():
        device = _device(config, group)
        require_shards_by_nccl(config.train, group, device)
    if uses_nccl(config.train.dist_backend):
        require_own_gpus(group, device)
    with group.all_or_none():
        head = store.head(device)
    vocab, covered = _vocabulary(options, store, config, head.vocab_size, group)
    # A vocabulary that is read from a file has a size of its own.
    drafter = config.drafter.model_copy(update={"vocab_size": vocab.size})
    config = config.model_copy(update={"drafter": drafter})
    newest = _newest_checkpoint(options.run, group) if options.resume else None
    with group.all_or_none():
        seed = config.train.seed if newest is None else checkpoint.read_spec(newest).seed
        kind = drafter_kind(config.drafter.name)
        in_bf16 = multiplies_bf16(config, device)
        target = TargetInterface(head, vocab.to(device), store.capture.final_norm, in_bf16)
        model = kind.build(config.drafter, target, seed).to(device)
        model.tie_weights(head)
        model.train()
        model.recompute = config.train.checkpoint_activations
        if config.train.compile:
            compile_blocks(model)
        objective = kind.objective(model, target, config.loss)
        batches = token_batches(store, config, group, device)
        saved = checkpoint.load(newest) if newest is not None else None
        if saved is not None:
            checkpoint.fill(model, saved)
        elif config.train.init_from is not None:
            load_start(model, describe(config.train.init_from))
    group.broadcast(model.state_dict().values())
    parallel = parallelize(model, config.train.parallel, group, device)
    bf16 = config.train.precision == "bf16" or None
    optimizer = Optimizer(model, config.optim, config.train.max_steps or 0, bf16=bf16, group=group)
    spikes = SpikeGuard(config.train.spike_factor, saved.state.spikes if saved else None)
    best = BestCheckpoints(config.train, saved.state.standing if saved else None)
    state = TrainState(
        options, store, config, group, device, model, objective, parallel, context, optimizer, batches, covered, target,
        spikes, best, seed,
    )  # fmt: skip
    if saved is not None:
        _go_on(state, saved)
    optimizer.total_steps = _last_step(state)
    if not options.resume:
        _make_run(state, vocab, lock)
    if group.is_first:
        _warn_of_ranks(state)
    return state


def _go_on(state: TrainState, saved: checkpoint.Checkpoint) -> None:
    """Put a run where a checkpoint stands: all but the weights, which the model took before it was shared out."""
    with state.group.all_or_none():
        state.optimizer.load(saved.optimizer)
        checkpoint.restore_rng(saved.optimizer)
        state.step = saved.state.step
    state.go_to(Cursor.from_json(saved.state.cursor))


def _last_step(state: TrainState) -> int:
    """The step that a run ends with. Epochs that are done are not counted again: one that left off following its store
    read fewer samples in them."""
    loop, start = state.config.train, Cursor.from_json(state.batches.state_dict())
    if loop.max_steps is not None:
        return loop.max_steps
    with state.group.all_or_none():
        first = sum(1 for _ in state.batches.plan(start.epoch, start.samples)) if start.epoch < loop.epochs else 0
        later = sum(state.batches.batches_per_epoch(epoch) for epoch in range(start.epoch + 1, loop.epochs))
    return state.step + first + later


def _make_run(state: TrainState, vocab: DraftVocab, lock: FolderLock) -> None:
    """Make the folder of a new run, once it is known that its samples teach."""
    for split in SPLITS:
        _require_slots(state, split)
    with state.group.all_or_none():
        if state.group.is_first:
            create(state.path, state.store, state.config, vocab, state.vocab_coverage, lock=lock)


def _check_context(config: TrainConfig) -> None:
    if config.train.context_parallel > 1 and not drafter_kind(config.drafter.name).splits_context(config.loss):
        able = [name for name in DRAFTERS if drafter_kind(name).splits_context(drafter_kind(name).loss())]
        raise ConfigError(
            f"{config.drafter.name} cannot split a sequence over ranks (train.context_parallel="
            f"{config.train.context_parallel}) with this loss; with their default losses these can: {', '.join(able)}",
            kind=Kind.OPTION_INVALID,
            hint="train.context_parallel=1",
        )


def require_shards_by_nccl(train: LoopConfig, group: ProcessGroup, device: torch.device) -> None:
    """ConfigError ``option-invalid``: ranks on GPUs that share parameters otherwise."""
    if train.parallel == "fsdp" and not group.is_single and device.type == "cuda" and not uses_nccl(train.dist_backend):
        raise ConfigError(
            "train.parallel=fsdp shards parameters of a GPU by NCCL alone: over gloo torch ends the process (2.11)",
            kind=Kind.OPTION_INVALID,
            hint="train.dist_backend=auto with a GPU for each rank, or train.parallel=ddp",
        )


def save_checkpoint(state: TrainState, cursor: Cursor) -> None:
    """Publish a checkpoint after ``state.step`` steps; the other ranks wait until it is durable."""
    group = state.group
    weights = full_state_dict(state.model.state_dict(), group)
    moments = full_state_dict(state.optimizer.tensors(), group)
    with group.all_or_none():
        if group.is_first:
            _write_checkpoint(state, cursor, weights, moments | checkpoint.rng_tensors())


def _write_checkpoint(
    state: TrainState, cursor: Cursor, weights: dict[str, Tensor], optimizer: dict[str, Tensor]
) -> None:
    spec = checkpoint.DrafterSpec.of(state.config.drafter, state.store, state.seed, state.step)
    document = checkpoint.CheckpointState(
        step=state.step,
        cursor=cursor.to_json(),
        total_steps=state.total_steps,
        spikes=state.spikes.state,
        standing=state.best.state,
        files={},
    )
    checkpoint.save(state.path, spec, document, (weights, optimizer))
    checkpoint.remove_old(state.path, state.config.train.keep, state.best.names)


def _open_on_every_rank(options: TrainOptions, group: ProcessGroup, lock: FolderLock) -> tuple[Store, TrainConfig]:
    """Rank 0 opens the run; the others open the very same list of samples, although the store may be growing."""
    opened: list[tuple[Store, TrainConfig]] = []

    def open_run() -> tuple[Store, TrainConfig]:
        if options.run.is_dir():
            lock.take()
        return reopen(options) if options.resume else open_new(options)

    def message() -> bytes:
        store, config = open_run()
        opened.append((store, config))
        snapshot = seal(store.snapshot(f"run-{options.run.name}")).decode()
        return json.dumps({"snapshot": snapshot, "config": config.model_dump_json()}).encode()

    if group.is_single:
        return open_run()
    document = json.loads(group.broadcast_bytes(message))
    with group.all_or_none():
        if not opened:
            snapshot = unseal(document["snapshot"].encode(), Snapshot, "the list of samples of rank 0")
            model = config_class(json.loads(document["config"])["drafter"]["name"])
            opened.append((options.open_store(snapshot), model.model_validate_json(document["config"])))
    return opened[0]


def _newest_checkpoint(run: Path, group: ProcessGroup) -> Path | None:
    """The newest one that rank 0 sees; the others go on from the very same. Raises ConflictError: ``ranks-differ``,
    where this rank sees another under that name, or none."""

    def message() -> bytes:
        newest = checkpoint.latest(run)
        names = None if newest is None else (newest.name, checkpoint.state_digest(newest))
        return json.dumps([socket.gethostname(), names]).encode()

    host, names = json.loads(group.broadcast_bytes(message))
    if names is None:
        return None
    path, expected = run / checkpoint.FOLDER / names[0], names[1]
    with group.all_or_none():
        actual = checkpoint.state_digest(path)
        if actual != expected:
            source, copy = f"{host}:{run.resolve()}/", f"{run.resolve()}/"
            raise ConflictError(
                f"{group.rank} does not hold {path} as rank 0 on {host} does, which goes on from it: sha256 "
                f"{expected[:12]}… of its {checkpoint.STATE_JSON} expected, {actual[:12] or 'none'} found",
                kind=Kind.RANKS_DIFFER,
                hint=f"{shlex.join(['rsync', '-a', source, copy])}, or a RUN that every machine sees",
            )
    return path


def _vocabulary(
    options: TrainOptions, store: Store, config: TrainConfig, size: int, group: ProcessGroup
) -> tuple[DraftVocab, float]:
    """The draft vocabulary and its coverage, made by rank 0 alone: that reads the tokens of the whole store. ``size``
    is the head's vocabulary."""
    if group.is_single:
        return _choose_vocabulary(options, store, config, size)

    def message() -> bytes:
        vocab, covered = _choose_vocabulary(options, store, config, size)
        return json.dumps({"ids": vocab.target_ids.tolist(), "coverage": covered}).encode()

    document = json.loads(group.broadcast_bytes(message))
    return DraftVocab.of_ids(torch.tensor(document["ids"], dtype=torch.int64), size), float(document["coverage"])


def _choose_vocabulary(options: TrainOptions, store: Store, config: TrainConfig, size: int) -> tuple[DraftVocab, float]:
    """That of the run, of the drafter it starts from, of ``vocab_file``, or the most frequent tokens."""
    if options.resume:
        return vocab_of(options.run, size), read_facts(options.run).vocab_coverage
    init_from, file, known = config.train.init_from, config.drafter.vocab_file, config.drafter.vocab_size
    most = max(size, store.capture.target.vocab_size)
    if known > most:
        raise ConfigError(
            f"drafter.vocab_size={known} is more than the {most:,} tokens of the target of {store.path}",
            kind=Kind.DRAFTER_SHAPE,
            hint=f"drafter.vocab_size={most}",
        )
    _require_taught(store, config)
    if init_from is None and file is None and known >= store.capture.target.vocab_size:
        return DraftVocab.full(size), 1.0
    counts = count_store(store, size, view=view_of(config))
    if init_from is not None:
        vocab = describe(init_from).vocab(size)
    elif file is not None:
        vocab = DraftVocab.load(file, size)
    else:
        vocab = DraftVocab.of_counts(counts, known)
    return vocab, coverage(vocab, counts)


def _require_taught(store: Store, config: TrainConfig) -> None:
    """Refuse samples of which none teaches a token in this view of them; mostly the first one does. Of the validation
    split that is said, and refused where a run waits for it."""
    view, table = view_of(config), store.catalog.table
    for number, split in enumerate(SPLITS if len(table.split) else ()):
        samples = table.ids.take(np.flatnonzero(table.split == number))
        if not len(samples):
            if split == "validation":
                continue
            raise ConfigError(
                f"the training split of {store.path} holds no samples, the validation split all {len(table.split):,}",
                kind=Kind.SPLIT_EMPTY,
                hint="hiddenstore prepare INPUT -o DATA --target T --val 10%",
            )
        if any(view.mask(store.sample(name))[: view.max_tokens].any() for name in samples):
            continue
        words = "training split" if split == "train" else "validation split"
        problem, hint = f"no token of the {words} of {store.path} teaches", "data.loss_on=all"
        if view != WHOLE:
            problem = (
                f"data.max_tokens={config.data.max_tokens} and data.loss_on={config.data.loss_on} leave no token of "
                f"the {words} that teaches"
            )
            hint = "a larger data.max_tokens, or none"
        if split == "train" or config.train.patience is not None:
            raise ConfigError(problem, kind=Kind.MASK_EMPTY, hint=hint)
        output().warn(f"{problem}: nothing is validated; {hint}")


def _require_slots(state: TrainState, split: str) -> None:
    """Refuse what `_require_taught` does where the mask has tokens and the objective takes none: an answer of one token
    opens no block. Mostly the first batch teaches."""
    loop, batches = state.config.train, state.batches
    words = "training split" if split == "train" else "validation split"
    if split == "validation":
        if not loop.validate_every or not (state.store.catalog.table.split == SPLITS.index(split)).any():
            return
        batches = token_batches(state.store, state.config, state.group, state.device, validation=True)
    taught = torch.zeros((), dtype=torch.int64, device=state.device)
    helps = told_what_helps(f"the packs of a step of the {words}", state.device)
    each = iter(replace(batches, epochs=1, prefetch_bytes=1))
    with helps:
        while not taught:
            with state.group.all_or_none():
                batch = next(each, None)
                if batch is not None:
                    taught += sum(inputs.counts.sum() for inputs in inputs_of(state, batch.packs))
            if batch is None:
                break
            state.group.all_reduce([taught])
    if taught:
        return
    name = state.config.drafter.name
    problem = (
        f"no token of the {words} of {state.store.path} teaches {name} under its loss: the supervised tokens in a "
        "row are too few for a slot, or none of them is in the draft vocabulary"
    )
    hint = "data.loss_on=all, a shorter drafter.block_size or a larger drafter.vocab_size, where the drafter has them"
    if split == "train" or loop.patience is not None:
        raise ConfigError(problem, kind=Kind.MASK_EMPTY, hint=hint)
    output().warn(f"{problem}: nothing is validated; {hint}")


@contextmanager
def told_what_helps(what: str, device: torch.device) -> Iterator[None]:
    """StorageError ``out-of-memory`` where ``what`` does not fit into memory."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise StorageError(
            f"{what} do not fit into the memory of {device}: {(str(error).splitlines() or ['none is left'])[0]}",
            kind=Kind.OUT_OF_MEMORY,
            hint="shorter samples (data.max_tokens) or packs (data.pack_tokens), "
            "train.checkpoint_activations=true, or train.context_parallel=N",
        ) from error


def inputs_of(state: TrainState, packs: Sequence[PackedBatch]) -> list[LossInputs]:
    """What the losses of a rank's packs need, of its shards of them where ranks share a sequence."""
    if state.context is not None:
        # The deepest slot is taught `depths` rows on, by a row whose mask may lie one further.
        packs = [shard_of(pack, state.context, state.objective.depths + 2) for pack in packs]
    return [state.objective.prepare(pack) for pack in packs]


def multiplies_bf16(config: TrainConfig, device: torch.device) -> bool:
    """Whether a run with these settings multiplies bf16 on that device."""
    return config.train.precision == "bf16" or (config.train.precision == "auto" and device.type == "cuda")


def _device(config: TrainConfig, group: ProcessGroup) -> torch.device:
    device = torch.device(pick_device(config.train.device))
    if device.type != "cuda":
        return device
    if device.index is None:
        count, local = torch.cuda.device_count(), group.rank.local_rank
        # A launcher that shows each task its own GPU alone numbers it 0.
        device = torch.device("cuda", 0 if count == 1 else local)
        if local >= count > 1:
            problem = f"{group.rank} is number {local} on this machine, which has {count} GPUs"
            raise ConfigError(problem, kind=Kind.DEVICE_UNAVAILABLE, hint=f"torchrun --nproc-per-node {count} …")
    torch.cuda.set_device(device)
    return device


def _warn_of_ranks(state: TrainState) -> None:
    """Some losses depend on how many ranks there are, and batches of one epoch that have fewer samples than there are
    ranks leave some without work."""
    ranks = state.group.rank.world_size // state.config.train.context_parallel
    if ranks == 1:
        return
    loss = state.config.loss
    if isinstance(loss, TttLoss) and loss.blends_by_step:
        output().warn(
            f"loss.lk_blend=step blends by the mean of each pack: {ranks} ranks train something else than one process, "
            "or another number of ranks; loss.lk_blend=slot does not"
        )
    samples = [len(ids) for _plan, ids in state.batches.plan(0)]
    idle = sum(max(0, ranks - count) for count in samples) / len(samples)
    if idle < 0.5:
        return
    enough = math.ceil(ranks * state.batches.tokens / sum(samples))
    output().warn(
        f"{idle:.1f} of {ranks} ranks have nothing to do in the average step: a batch of "
        f"{state.config.data.batch_tokens:,} tokens holds {sum(samples) / len(samples):.1f} samples; "
        f"try data.batch_tokens={enough}"
    )


def token_batches(
    store: Store,
    config: TrainConfig,
    group: ProcessGroup,
    device: torch.device,
    *,
    validation: bool = False,
    epoch: int = 0,
) -> TokenBatches:
    """This rank's packs of the global batches on ``device``; ``data.batch_tokens`` alone defines the batches. Of a run
    that follows its store, those of ``epoch`` and the ones before."""
    follows = config.train.follow and not validation
    endless = config.train.max_steps is not None and not validation and not follows
    needs: Needs = drafter_kind(config.drafter.name).needs(config.drafter, config.loss)
    # A store that grows may bring a longer training sample than the settings were derived from; those of the run's own
    # list fit a pack, so that a resume in a later epoch packs it as before.
    table = store.catalog.table
    longest = int(table.tokens[table.split == SPLITS.index("train")].max(initial=0)) if follows or epoch else 0
    longest = min(longest, config.data.max_tokens or longest)
    return TokenBatches(
        store,
        split="validation" if validation else "train",
        layers=needs.aux_layers,
        final=needs.final != "none",
        batch_tokens=config.data.batch_tokens,
        pack_tokens=max(config.data.pack_tokens, longest),
        seed=config.data.seed,
        view=view_of(config),
        rank=group.rank.rank // config.train.context_parallel,
        world_size=group.rank.world_size // config.train.context_parallel,
        prefetch_bytes=config.data.prefetch_mb * 1_000_000,
        epochs=None if endless else epoch + 1 if follows else 1 if validation else config.train.epochs,
        device=device,
    )
