"""ModelOpt's offline trainer on a store: what its ``OfflineSupervisedDataset`` reads from dumped files, from the store.

    train_dataset = ModelOptDataset("store")          # in the place of OfflineSupervisedDataset(files, True)
    eval_dataset = ModelOptDataset("store", "validation")

Read from release 0.47. Its collator and models take the items as they are. Shapes: T tokens, L aux layers, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hiddenstore.dumps.common import MissingFinal, PeerSamples
from hiddenstore.dumps.torch_files import MODELOPT, side_by_side
from hiddenstore.store import Store
from schemas.manifest import Split

IGNORED = -100


class ModelOptDataset(Dataset[dict[str, Any]]):
    """The samples of a split, in the order of the store; workers of a loader open it for themselves.

    ``layers``, in our numbers, default to all that are held. Raises as ``hiddenstore.dumps.common.export_samples``.
    """

    def __init__(
        self,
        store: str,
        split: Split = "train",
        *,
        layers: Sequence[int] | None = None,
        missing_final: MissingFinal = "refuse",
    ) -> None:
        self._store, self._layers, self._missing_final = store, layers, missing_final
        self._samples: PeerSamples | None = None
        opened = Store.open(store)
        self._open(opened)
        self.sample_ids = [entry.id for _, entry in opened.entries if entry.split == split]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_samples": None}

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``input_ids``, ``attention_mask``, ``loss_mask``, ``labels`` int64 [T]; ``base_model_hidden_states``
        bf16 [T, D] after the final norm, ``aux_hidden_states`` bf16 [T, L·D], ``base_hidden_prenorm`` False."""
        samples = self._samples or self._open(Store.open(self._store))
        exported, _ = samples.read(self.sample_ids[index])
        ids = torch.from_numpy(exported.sample.input_ids.astype("int64"))
        final: Tensor | None = exported.final
        assert final is not None
        return {
            "input_ids": ids,
            "base_model_hidden_states": final,
            "aux_hidden_states": side_by_side(exported.aux),
            "attention_mask": torch.ones_like(ids),
            "loss_mask": torch.from_numpy(exported.sample.loss_mask.astype("int64")),
            "labels": torch.cat([ids[1:], torch.full_like(ids[:1], IGNORED)]),
            "base_hidden_prenorm": False,
        }

    def _open(self, store: Store) -> PeerSamples:
        self._samples = PeerSamples(store, MODELOPT, self._layers, self._missing_final)
        return self._samples
