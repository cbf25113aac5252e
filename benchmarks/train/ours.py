"""Our trainer behind the calls the peers have: a real store, a real session, the loop's own step.

Shapes: L aux layers, T tokens, D width.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from safetensors.torch import save_file

from benchmarks.train.case import BETAS, CLIP, LR, NORM_EPS, SEED, Case, Tensors
from hiddenstore.files.lock import FolderLock
from hiddenstore.process import Rank
from hiddenstore.records import Record, Sample, final_row_positions, sample_id
from hiddenstore.store import Store
from hiddenstore.testing import builders
from hiddenstore.writer import create_store, write_unit
from schemas.capture import HeadSpec
from trainer.drafters import drafter_kind
from trainer.parallel.group import ProcessGroup
from trainer.train.run_folder import TrainOptions
from trainer.train.state import TrainState, build_state
from trainer.train.step import steps
from trainer.vocab import DraftVocab

HEAD = HeadSpec(norm_flavour="rms", norm_eps=NORM_EPS, tied=False)


def make_store(case: Case, tensors: Tensors, folder: Path, recipe: str) -> Store:
    """A store of the one sample, its final hidden at the rows a capture keeps by default."""
    ids = tensors.input_ids.numpy().astype(np.int32)
    mask = tensors.loss_mask.numpy().astype(np.uint8)
    spans = np.array([[2, case.first_supervised, case.tokens]], np.int32)
    sample = Sample(sample_id(ids, mask), ids, mask, spans, "train", "synthetic:0")
    capture = builders.capture_spec(width=case.width, codec=recipe)
    target = capture.target.model_copy(update={"vocab_size": case.vocab, "num_layers": case.target_layers})
    capture = capture.model_copy(update={"target": target, "aux_layers": case.aux_layers})
    head = {"embed_tokens": tensors.embed_tokens, "lm_head": tensors.lm_head, "norm_weight": tensors.norm_weight}
    files = {"head.safetensors": save_tensors(head), "config.json": b'{"model_type":"llama"}\n'}
    store = create_store(folder, capture, HEAD, recipe, files)
    rows = final_row_positions(mask, capture.final)
    record = Record(sample, tensors.aux, tensors.final[torch.from_numpy(rows).long()], rows)
    write_unit(store, "unit-000000", "ab" * 32, [record], (), builders.ENGINE)
    return Store.open(folder)


def words(case: Case, vocab_file: Path, prefetch_mb: int, train: dict[str, Any]) -> list[str]:
    """Every setting in which a case differs from what the trainer derives."""
    settings = {
        "data.batch_tokens": case.tokens,
        "data.pack_tokens": case.tokens,
        "data.prefetch_mb": prefetch_mb,
        "optim.kind": "adamw",
        "optim.lr": LR,
        "optim.beta1": BETAS[0],
        "optim.beta2": BETAS[1],
        "optim.clip": CLIP,
        "optim.schedule": "constant",
        "optim.warmup_ratio": 0,
        "train.max_steps": 1_000_000,
        "train.device": "cpu",
        "train.precision": case.precision,
        "train.spike_factor": "none",
        **{f"train.{name}": value for name, value in train.items()},
        **{f"drafter.{name}": value for name, value in case.drafter_settings.items() if name != "hidden_size"},
        **{f"loss.{name}": value for name, value in case.loss_settings.items()},
    }
    if case.draft < case.vocab:
        settings["drafter.vocab_file"] = vocab_file
    return [f"{key}={value}" for key, value in settings.items()]


class Ours:
    """``hiddenstore train`` up to its log and checkpoints: batches of the store, plan, backward, clip, AdamW. ``root``:
    a new folder for the store and the run; ``train``: settings of that section, the device above all."""

    recipe = "raw"
    in_memory = False

    def __init__(self, case: Case, tensors: Tensors, root: Path, prefetch_mb: int = 512, **train: Any) -> None:
        self.case, self.tensors = case, tensors
        root.mkdir(parents=True)
        vocab = root / "vocab.safetensors"
        vocab.write_bytes(DraftVocab.of_ids(tensors.target_ids, case.vocab).save_bytes())
        make_store(case, tensors, root / "store", self.recipe)
        options = TrainOptions(root / "store", root / "run", case.drafter, None, words(case, vocab, prefetch_mb, train))
        self.state: TrainState = build_state(options, ProcessGroup(Rank()), FolderLock(root / "run"))
        if tensors.weights:
            self.state.model.load_state_dict(tensors.weights)
        if self.in_memory:
            batch = next(iter(self.state.batches))
            self.state.batches = itertools.repeat(batch)  # type: ignore[assignment]
        self._steps: Iterator[Any] = steps(self.state)

    def step(self) -> float:
        """One update; the loss."""
        return float(next(self._steps)[1].loss)

    def loss(self, settings: dict[str, Any], anchors: list[int]) -> float:
        """Under these settings, before any update; of DFlash with blocks at these anchors."""
        kind = drafter_kind(self.case.drafter)
        config = kind.loss.model_validate(settings)
        objective: Any = kind.objective(self.state.model, self.state.target, config)
        pack = next(iter(self.state.batches)).packs[0]
        # What is compared may read other final rows than what is trained.
        pack = replace(pack, final=self.tensors.final, final_rows=torch.arange(self.case.tokens))
        work = objective.prepare_at(pack, torch.tensor(anchors)) if anchors else objective.prepare(pack)
        with torch.no_grad():
            return float(objective.losses(work, objective.denominators(work)).value)

    def save_weights(self, folder: Path) -> None:
        """What every engine starts from: a fresh drafter, moved a little so that its head is not the target's."""
        generator = torch.Generator().manual_seed(SEED)
        weights = dict(self.state.model.state_dict())
        for name, tensor in weights.items():
            if tensor.ndim == 2:
                weights[name] = tensor + torch.randn(tensor.shape, generator=generator) * 0.02
        save_file(weights, folder / "weights.safetensors")


class OursInMemory(Ours):
    """The same without reading: the batch stays in memory, as the peers' tensors do."""

    in_memory = True


class OursQ8(Ours):
    """The same from a q8 store, the default recipe: other states by its rounding."""

    recipe = "safe"
