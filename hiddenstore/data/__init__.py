"""Reading a store for training: order, packing and prefetch. Any world size, any restart point, one global order."""

from hiddenstore.data.batches import PREFETCH_BYTES, Cursor, GlobalBatch, TokenBatches
from hiddenstore.data.order import BatchPlan, Order, first_fit, global_batches, permutation
from hiddenstore.data.packed import EncodedPack, PackedBatch
from hiddenstore.data.samples import SampleDataset, loader, pack
from hiddenstore.data.view import WHOLE, SampleView

__all__ = [
    "PREFETCH_BYTES",
    "WHOLE",
    "BatchPlan",
    "Cursor",
    "EncodedPack",
    "GlobalBatch",
    "Order",
    "PackedBatch",
    "SampleDataset",
    "SampleView",
    "TokenBatches",
    "first_fit",
    "global_batches",
    "loader",
    "pack",
    "permutation",
]
