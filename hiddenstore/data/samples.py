"""A store for ``torch.utils.data.DataLoader`` and what stands on it: samples by number, and packs of them.

Packs have the shapes of `PackedBatch`. `TokenBatches` is faster (it reads ahead in threads, packs to a token budget and
resumes at a cursor); this one is for trainers that shuffle and batch by themselves.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hiddenstore.data.packed import PackedBatch
from hiddenstore.data.view import WHOLE, SampleView, in_split
from hiddenstore.records import Record, TopK, drafter_positions
from hiddenstore.store import Store
from hiddenstore.targets.rebuild import layers_to_read
from schemas.manifest import Split


class SampleDataset(Dataset[Record]):
    """The records of a split by number, in the order of the store; a map-style dataset that workers can be given.

    ``layers``: of the aux states, in the order of packs, default all, ascending. ``final``: whether final rows are
    read. ``view``: where samples end and which of their tokens teach; the ``loss_mask`` of a record is that mask.
    Raises ConfigError: ``split-empty``."""

    def __init__(
        self,
        store: "Store",
        split: Split = "train",
        *,
        layers: Sequence[int] | None = None,
        final: bool = True,
        view: SampleView = WHOLE,
    ) -> None:
        self.store, self.split, self.layers, self.final, self.view = store, split, layers, final, view
        order = store.catalog.commit_order()
        self.sample_ids = store.catalog.table.ids.take(order[in_split(store, split)[order]])

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> Record:
        record = self.store.read(self.sample_ids[index], self.layers, self.final)
        read = layers_to_read(self.store.capture, self.layers, self.final)
        self.view.require_rows(record.sample, self.store.capture, read, self.final)
        sample = replace(record.sample, loss_mask=self.view.mask(record.sample))
        record = replace(record, sample=sample)
        return record if self.view.max_tokens is None else self.view.cut(record)


def pack(records: Sequence[Record]) -> PackedBatch:
    """Records end to end, as a ``collate_fn``; attention should stay inside one ``document``."""
    lengths = [record.sample.tokens for record in records]
    starts = np.cumsum([0, *lengths[:-1]])
    places = [drafter_positions(record.sample.tokens, record.sample.images) for record in records]
    rows = [record.final_rows.astype(np.int64) + start for record, start in zip(records, starts, strict=True)]
    tops = [record.topk for record in records if record.topk is not None]
    return PackedBatch(
        input_ids=torch.from_numpy(np.concatenate([r.sample.input_ids for r in records]).astype(np.int64)),
        loss_mask=torch.from_numpy(np.concatenate([r.sample.loss_mask for r in records]) != 0),
        positions=torch.from_numpy(np.concatenate(places)),
        document=torch.from_numpy(np.repeat(np.arange(len(records)), lengths)),
        aux=torch.cat([record.aux for record in records], dim=1),
        final=torch.cat([record.final for record in records]),
        final_rows=torch.from_numpy(np.concatenate(rows)),
        sample_ids=[record.sample.id for record in records],
        topk=TopK(*map(torch.cat, zip(*((t.ids, t.log_probs, t.lse) for t in tops), strict=True))) if tops else None,
    )


def loader(
    store: "Store", split: Split = "train", *, batch_size: int = 8, shuffle: bool | None = None, **options: Any
) -> DataLoader[Record]:
    """A ``DataLoader`` whose batches are a `PackedBatch` of ``batch_size`` samples.

    Samples are shuffled in training unless ``shuffle`` says otherwise; a ``batch_sampler`` takes the place of
    ``batch_size`` and ``shuffle``. Options of `SampleDataset` (layers, final, view) go there, all others to
    ``DataLoader`` (num_workers, generator, drop_last, …). Raises ConfigError: ``split-empty``."""
    reading = {name: options.pop(name) for name in ("layers", "final", "view") if name in options}
    dataset = SampleDataset(store, split, **reading)
    in_order = split != "train" if shuffle is None else not shuffle
    if options.get("num_workers") and store.fs.prefers_few_files:
        # A client of object storage has threads of its own, which a forked worker lacks.
        options.setdefault("multiprocessing_context", "spawn")
    if "batch_sampler" not in options:
        options |= {"batch_size": batch_size, "shuffle": not in_order and "sampler" not in options}
    return DataLoader(dataset, **{"collate_fn": pack, **options})
