"""Whether prompts may be stored in three bits: drafters trained in pairs on the states of a raw store.

``narrow`` is the recipe ``rebuilt`` with q3 (the formula of q4, codes -4 … 3) at unsupervised positions, but for the
first 4 of a sample and the 16 before each supervised span. ``rebuilt`` and ``compact`` stand beside it.
Usage: python -m benchmarks.narrow_prompts RAW --target T [--seeds 2] [key.path=value ...]
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from hiddenstore.care.copy_blocks import rebuilder_for
from hiddenstore.codecs import get_codec
from hiddenstore.codecs.affine import GROUP, channel_statistics, round_up
from hiddenstore.inspect.choice import paired_lines
from hiddenstore.records import Record
from hiddenstore.store import Store
from hiddenstore.writer import create_store, write_unit
from trainer.settings import load_config
from trainer.train.paired import DEFAULTS, DRAFTER, PairPlan, held_out_overlaps, train_pairs

FIRST, BEFORE = 4, 16

Coded = Callable[[Tensor, np.ndarray], Tensor]
"""A unit's layer bf16 [T, D] as it comes back, and which of its rows may be narrow, bool [T]."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = report.parser(__doc__)
    options.add_argument("raw", type=Path)
    options.add_argument("settings", nargs="*")
    options.add_argument("--target", required=True)
    options.add_argument("--seeds", type=int, default=2)
    args = options.parse_args(arguments)
    store = Store.open(args.raw)
    words = (*(f"{name}={value}" for name, value in DEFAULTS.items()), *args.settings)
    count = load_config(store, DRAFTER, None, words).train.max_steps or 0
    plan = PairPlan(DRAFTER, tuple(range(args.seeds)), words, count)
    forms: dict[str, Coded] = {"rebuilt": lambda layer, _: q4(layer), "narrow": narrow}
    with TemporaryDirectory(prefix="narrow-prompts-") as folder:
        copies = {name: _rebuilt(store, Path(folder) / name, args.target, form) for name, form in forms.items()}
        rows = train_pairs(store, copies, plan, held_out_overlaps, lambda *_, doing: report.progress(doing))
    masks = [may_be_narrow(store.sample(name).loss_mask) for name in store.sample_ids]
    share = float(np.concatenate(masks).mean())
    result: dict[str, Any] = {
        "store": store.path,
        "tokens": sum(map(len, masks)),
        "narrow_share": share,
        "settings": words,
        "paired": [row.model_dump(mode="json") for row in rows],
    }
    page = [
        f"# Prompts in three bits, {report.today()}",
        "",
        f"{result['tokens']:,} tokens of {store.capture.target.name}, {share:.1%} of them narrow: "
        f"{4.26 - share:.2f} bits a value instead of 4.26. {report.machine_line()}",
        "",
        *(f"    {line}" for line in paired_lines(rows)),
    ]
    report.publish("narrow-prompts", result, args.results, page)


def may_be_narrow(loss_mask: np.ndarray) -> np.ndarray:
    """Positions that can do with fewer bits: bool [T] of a mask [T]."""
    wanted = loss_mask != 0
    near = wanted.copy()
    for step in range(1, BEFORE + 1):
        near[:-step] |= wanted[step:]
    near[:FIRST] = True
    return ~near


def q4(layer: Tensor) -> Tensor:
    """What the codec gives back of a unit's layer bf16 [T, D]."""
    codec = get_codec("q4")
    return codec.decode(codec.encode([layer]))[0]


def narrow(layer: Tensor, rows: np.ndarray) -> Tensor:
    """The same with ``rows`` bool [T] in q3, but for those that q4 keeps raw."""
    wide, where = q4(layer), torch.from_numpy(rows)
    is_raw = (wide == layer).all(1)
    return torch.where((where & ~is_raw)[:, None], q3(layer), wide)


def q3(layer: Tensor) -> Tensor:
    """bf16 [T, D] through codes -4 … 3 of groups of 32 strided channels, a bf16 scale each instead of E4M3's."""
    scale, offset = channel_statistics(layer)
    y = (layer.float() - offset) / scale
    groups = torch.nn.functional.pad(y, (0, -y.shape[1] % GROUP)).view(len(y), GROUP, -1)
    above, below = groups.amax(1), -groups.amin(1)
    step = round_up(torch.maximum(torch.maximum(above, below) / 4.5, torch.minimum(above, below) / 3.5))
    signed = torch.where(below >= above, step, -step).clamp_min(-1e30)[:, None]
    codes = torch.where(signed == 0, 0.0, groups / signed).round().clamp(-4, 3)
    return ((codes * signed).reshape(len(y), -1)[:, : y.shape[1]] * scale + offset).bfloat16()


def _rebuilt(store: Store, location: Path, target: str, form: Coded) -> Store:
    """A raw store of what the recipe ``rebuilt`` gives back with another form of its stored layers."""
    capture, manifest = store.capture, store.manifest
    files = {file.path: store.target_file(file.path) for file in manifest.target_files}
    made = create_store(location, capture, manifest.head, manifest.recipe, files, "zarr")
    rebuilder = rebuilder_for(store, target)
    assert rebuilder is not None
    kept = [index for index, layer in enumerate(capture.aux_layers) if layer in rebuilder.capture.stored_layers]
    for commit in store.commits():
        records = [store.read(entry.id) for entry in commit.samples]
        lengths = [record.sample.tokens for record in records]
        rows = np.concatenate([may_be_narrow(record.sample.loss_mask) for record in records])
        aux = torch.cat([record.aux for record in records], 1)
        for index in kept:
            aux[index] = form(aux[index], rows)
        again: list[Record] = []
        for record, states in zip(records, aux.split(lengths, 1), strict=True):
            final = rebuilder.final(states[-1], [states.shape[1]])[torch.from_numpy(record.final_rows).long()]
            again.append(replace(record, aux=states, final=final))
        write_unit(made, commit.unit, commit.input, again, (), commit.engine)
        report.progress(f"{location.name}: {len(again)} samples")
    return Store.open(location)


if __name__ == "__main__":
    main()
