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

from benchmarks.train.case import BETAS, CLIP, HEAD_DIM, LR, NORM_EPS, SEED, Case, Tensors
from hiddenstore.rank import Rank
from hiddenstore.records import Record, Sample, final_row_positions, sample_id
from hiddenstore.store import Store
from hiddenstore.testing import builders
from hiddenstore.writer import create_store, write_unit
from schemas.capture import HeadSpec
from trainer.drafters import drafter_kind
from trainer.run.run_folder import Asked
from trainer.run.session import Session, start
from trainer.run.step import steps
from trainer.scale.group import Group
from trainer.vocab import DraftVocab

HEAD = HeadSpec(norm_flavour="rms", norm_eps=NORM_EPS, tied=False)


def make_store(case: Case, tensors: Tensors, folder: Path, recipe: str) -> Store:
    """A store of the one sample, its final hidden at the rows a capture keeps by default."""
    ids = tensors.input_ids.numpy().astype(np.int32)
    mask = tensors.loss_mask.numpy().astype(np.uint8)
    spans = np.array([[2, case.first_supervised, case.tokens]], np.int32)
    sample = Sample(sample_id(ids, mask), ids, mask, spans, "train", "synthetic:0")
    capture = builders.capture_spec(case.aux_layers, case.width, recipe)
    capture = capture.model_copy(update={"target": capture.target.model_copy(update={"vocab_size": case.vocab})})
    head = {"embed_tokens": tensors.embed_tokens, "lm_head": tensors.lm_head, "norm_weight": tensors.norm_weight}
    files = {"head.safetensors": save_tensors(head), "config.json": b'{"model_type":"llama"}\n'}
    store = create_store(folder, capture, HEAD, recipe, files)
    rows = final_row_positions(mask, capture.final)
    record = Record(sample, tensors.aux, tensors.final[torch.from_numpy(rows).long()], rows)
    write_unit(store, "unit-000000", "i" * 64, [record], (), builders.ENGINE)
    return Store.open(folder)


def words(case: Case, vocab_file: Path, prefetch_mb: int) -> list[str]:
    """Every setting in which a case differs from what the trainer derives."""
    said = {
        "data.batch_tokens": case.tokens,
        "data.pack_tokens": case.tokens,
        "data.prefetch_mb": prefetch_mb,
        "drafter.num_heads": case.heads,
        "drafter.num_kv_heads": case.kv_heads,
        "drafter.head_dim": HEAD_DIM,
        "drafter.intermediate_size": case.wider,
        "drafter.max_position": 65536,
        "drafter.vocab_size": case.draft,
        "optim.kind": "adamw",
        "optim.lr": LR,
        "optim.beta1": BETAS[0],
        "optim.beta2": BETAS[1],
        "optim.clip": CLIP,
        "optim.schedule": "constant",
        "optim.warmup_ratio": 0,
        "train.max_steps": 1_000_000,
        "train.device": "cpu",
        "train.spike_factor": "none",
    }
    if case.draft < case.vocab:
        said["drafter.vocab_file"] = vocab_file
    if case.drafter == "eagle3":
        said["loss.steps"] = case.steps
    else:
        said |= {
            "drafter.num_layers": case.layers,
            "drafter.block_size": case.block,
            "drafter.mask_token_id": 0,
            "loss.num_anchors": case.anchors,
        }
    return [f"{key}={value}" for key, value in said.items()]


class Ours:
    """``hiddenstore train`` up to its log and checkpoints: batches of the store, plan, backward, clip, AdamW.

    ``root``: a new folder for the store and the run.
    """

    recipe = "raw"
    held = False

    def __init__(self, case: Case, tensors: Tensors, root: Path, prefetch_mb: int = 512) -> None:
        self.case, self.tensors = case, tensors
        root.mkdir(parents=True)
        vocab = root / "vocab.safetensors"
        vocab.write_bytes(DraftVocab.of_ids(tensors.target_ids, case.vocab).save_bytes())
        make_store(case, tensors, root / "store", self.recipe)
        asked = Asked(root / "store", root / "run", case.drafter, None, words(case, vocab, prefetch_mb))
        self.session: Session = start(asked, Group(Rank()))
        if tensors.weights:
            self.session.model.load_state_dict(tensors.weights)
        if self.held:
            batch = next(iter(self.session.batches))
            self.session.batches = itertools.repeat(batch)  # type: ignore[assignment]
        self._steps: Iterator[Any] = steps(self.session)

    def step(self) -> float:
        """One update; the loss."""
        return float(next(self._steps)[1].loss)

    def losses(self, settings: dict[str, Any], anchors: list[int] | None = None) -> list[float]:
        """Loss of every depth under these settings, before any update; DFlash's as one number."""
        kind = drafter_kind(self.case.drafter)
        loss = kind.loss.model_validate(settings)
        objective: Any = kind.objective(self.session.model, self.session.side, loss)
        pack = next(iter(self.session.batches)).packs[0]
        # What is compared may read other final rows than what is trained.
        pack = replace(pack, final=self.tensors.final, final_rows=torch.arange(self.case.tokens))
        work = objective.plan(pack) if anchors is None else objective.plan_at(pack, torch.tensor(anchors))
        divisors = objective.divisors(work)
        with torch.no_grad():
            found = objective.losses(work, divisors)
        return [float(found.value)] if anchors is not None else (found.sums / divisors).tolist()

    def save_weights(self, folder: Path) -> None:
        """What every engine starts from: a fresh drafter, moved a little so that its head is not the target's."""
        generator = torch.Generator().manual_seed(SEED)
        weights = dict(self.session.model.state_dict())
        for name, tensor in weights.items():
            if tensor.ndim == 2:
                weights[name] = tensor + torch.randn(tensor.shape, generator=generator) * 0.02
        save_file(weights, folder / "weights.safetensors")

    def products_share(self, count: int) -> dict[str, float]:
        """Share of the CPU time of ``count`` steps that torch's profiler sees in matrix products, and the largest of
        the rest."""
        from torch.profiler import ProfilerActivity, profile

        self.step()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(count):
                self.step()
        times = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
        total = sum(times.values())
        found = {"products": sum(times.get(name, 0) for name in PRODUCTS) / total}
        for name in sorted(set(times) - set(PRODUCTS), key=lambda name: -times[name])[:8]:
            found[name] = times[name] / total
        return found


PRODUCTS = (
    "mkldnn::_linear_pointwise",
    "aten::mm",
    "aten::addmm",
    "aten::addmm_",
    "aten::bmm",
    "aten::baddbmm",
    "aten::baddbmm_",
    "aten::matmul",
)


class OursHeld(Ours):
    """The same without reading: the batch stays in memory, as the peers' tensors do."""

    held = True


class OursQ8(Ours):
    """The same from a q8 store, the default recipe: other states by its rounding."""

    recipe = "safe"
