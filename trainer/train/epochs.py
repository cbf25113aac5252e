"""What each epoch of a run reads: the run's snapshot, or with ``train.follow`` what the store holds when it begins.

A run that follows publishes each epoch's list of commits in the store as the snapshot ``<the run's>.epoch-N`` before it
reads them, and takes the list that lies there: a resume reads what the run read, and gc leaves it.
"""

from dataclasses import replace

import torch

from hiddenstore.console.output import output
from hiddenstore.data import Cursor, SampleView, TokenBatches
from hiddenstore.errors import CorruptionError, StorageError
from hiddenstore.files import layout
from hiddenstore.store import Store
from trainer.config import TrainConfig
from trainer.drafters import drafter_kind
from trainer.drafters.base import Needs
from trainer.parallel.group import ProcessGroup
from trainer.train.run_folder import TrainOptions, run_snapshot


def view_of(config: TrainConfig) -> SampleView:
    """What the settings train on of every sample."""
    return SampleView(config.data.max_tokens, config.data.loss_on)


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
    # A store that grows may bring a longer sample than the settings were derived from.
    longest = int(store.catalog.table.tokens.max(initial=0)) if follows else 0
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


def batches_at(
    cursor: Cursor, first: Store, options: TrainOptions, config: TrainConfig, group: ProcessGroup, device: torch.device
) -> TokenBatches:
    """The batches from ``cursor`` on; ``first`` is the store at the run's snapshot. Raises ConflictError:
    ``cursor-mismatch``: the samples of its epoch are not those that it counts in."""
    name = group.broadcast_bytes(lambda: _snapshot_at(cursor, first, options, config).encode()).decode()
    with group.all_or_none():
        store = options.open_store(name) if name else first
        batches = token_batches(store, config, group, device, epoch=cursor.epoch)
        # Where an epoch begins, the cursor still names the samples of the one before.
        is_new = config.train.follow and not cursor.samples
        batches.load_state_dict(replace(cursor, snapshot=batches.digest if is_new else cursor.snapshot).to_json())
    return batches


def _snapshot_at(cursor: Cursor, first: Store, options: TrainOptions, config: TrainConfig) -> str:
    """Name of the published snapshot that the epoch of ``cursor`` reads; empty for the run's own."""
    prefix = f"{run_snapshot(options.run).name}.epoch-"
    published = {
        int(number): name.removesuffix(".json")
        for name in first.fs.list(layout.SNAPSHOTS_DIR)
        if (number := name.removeprefix(prefix).removesuffix(".json")).isdecimal() and name.startswith(prefix)
    }
    if config.train.follow and cursor.epoch and not cursor.samples and cursor.epoch not in published:
        try:
            name = f"{prefix}{cursor.epoch}"
            options.open_store().save_snapshot(name)
        except (StorageError, CorruptionError) as error:
            output().warn(f"epoch {cursor.epoch + 1} reads no more than the one before it: {error.message}")
        else:
            return name
    return published[max(numbers)] if (numbers := [n for n in published if n <= cursor.epoch]) else ""
