"""What rebuilding costs in error: the lowest aux layer from the tokens, the final hidden from the decoded top layer.

DATA is what ``hiddenstore prepare`` makes for a target that transformers runs; its first samples are captured with the
default layers of EAGLE-3 (the top one n-4) and with n-3. KL, flips and overlap are means over supervised final rows.
Usage: python -m benchmarks.rebuilt DATA --target T [--tokens 5000]
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from collectors.capture.job import capture_samples, records_of
from collectors.engines import EngineOptions, open_engine
from collectors.targets.load import EngineTarget
from hiddenstore.codecs import get_codec
from hiddenstore.inputs import PreparedInput
from hiddenstore.records import Record
from hiddenstore.targets.blocks import BLOCKS_FILE, TargetBlocks, block_files
from hiddenstore.targets.folder import CONFIG_FILE, open_target
from hiddenstore.targets.head import HeadBundle
from schemas import default_aux_layers

CODECS = ("bf16", "q8", "q4")


def main(arguments: Sequence[str] | None = None) -> None:
    options = report.parser(__doc__)
    options.add_argument("data")
    options.add_argument("--target", required=True)
    options.add_argument("--tokens", type=int, default=5000, help="of the first samples")
    args = options.parse_args(arguments)
    folder = open_target(args.target)
    n, aux = folder.num_layers, default_aux_layers("eagle3", folder.num_layers)
    layers = (aux[0], aux[-1], n - 3)
    engine = open_engine("hf", EngineTarget(folder, None), EngineOptions(layers, 2048))
    samples = list(_first(PreparedInput.open(Path(args.data)), args.tokens))
    records = list(records_of(capture_samples(engine, samples, "supervised", lambda: False), "supervised"))
    head, dtype = engine.target.head, engine.target.identity.dtype
    data = block_files(folder, [*range(aux[0] + 1), *range(n - 3, n)], dtype)[BLOCKS_FILE]
    path = folder.file(CONFIG_FILE)
    assert path is not None
    blocks = TargetBlocks.from_bytes(path.read_bytes(), data)
    result: dict[str, Any] = {
        "target": folder.label,
        "dtype": dtype,
        "samples": len(samples),
        "tokens": sum(sample.tokens for sample in samples),
        "blocks_bytes": len(data),
        "lowest": _lowest(records, aux[0], blocks, head),
        "final": [_final(records, slot, layers[slot], name, blocks, head, n) for slot in (1, 2) for name in CODECS],
    }
    page = [
        f"# Rebuilt states of {folder.label}, {report.today()}",
        "",
        f"{result['tokens']:,} tokens, {len(samples)} samples, {dtype}. {report.machine_line()}",
        "",
        f"Layer {aux[0]} from the tokens: error {result['lowest']['error']:.2%}, "
        f"{result['lowest']['cpu_s_per_1000_tokens']:.3f} CPU s per 1,000 tokens.",
        "",
        "| top layer | stored as | KL | flips | overlap | CPU s per 1,000 tokens |",
        "|---|---|---|---|---|---|",
        *(
            "| {top_layer} | {codec} | {kl:.5f} | {flips:.2%} | {overlap:.4f} | {cpu_s_per_1000_tokens:.3f} |".format(
                **row
            )
            for row in result["final"]
        ),
    ]
    report.publish(f"rebuilt-{folder.label}".lower(), result, args.results, page)


def _first(prepared: PreparedInput, tokens: int) -> Iterator[Any]:
    # Every third sample, so that all sources of a mix are among them.
    for number, sample in enumerate(prepared.samples()):
        if tokens <= 0:
            return
        if number % 3 == 0:
            tokens -= sample.tokens
            yield sample


def _lowest(records: Sequence[Record], layer: int, blocks: TargetBlocks, head: HeadBundle) -> dict[str, Any]:
    began, errors, tokens = time.process_time(), [], sum(record.sample.tokens for record in records)
    for record in records:
        ids = torch.from_numpy(record.sample.input_ids).long()
        rebuilt, captured = blocks.run(head.embed(ids).bfloat16(), 0, layer + 1).float(), record.aux[0].float()
        errors.append((rebuilt - captured).norm(dim=1) / captured.norm(dim=1))
    seconds = time.process_time() - began
    return {"layer": layer, "error": float(torch.cat(errors).mean()), "cpu_s_per_1000_tokens": 1000 * seconds / tokens}


def _final(
    records: Sequence[Record], slot: int, top: int, name: str, blocks: TargetBlocks, head: HeadBundle, n: int
) -> dict[str, Any]:
    codec, lengths = get_codec(name), [record.sample.tokens for record in records]
    decoded = codec.decode(codec.encode_layers([[record.aux[slot] for record in records]]).joined())[0].split(lengths)
    began = time.process_time()
    rebuilt = [blocks.run(states, top + 1, n) for states in decoded]
    seconds = time.process_time() - began
    sums = torch.zeros(4, dtype=torch.float64)
    for states, record in zip(rebuilt, records, strict=True):
        rows = torch.from_numpy(record.final_rows).long()
        sums += _compared(head.logits(record.final), head.logits(states[rows]))
    kl, flips, overlap = (sums[:3] / sums[3]).tolist()
    return {
        "top_layer": top,
        "codec": name,
        "kl": kl,
        "flips": flips,
        "overlap": overlap,
        "cpu_s_per_1000_tokens": 1000 * seconds / sum(lengths),
    }


def _compared(original: Tensor, rebuilt: Tensor) -> Tensor:
    p, q = original.log_softmax(-1), rebuilt.log_softmax(-1)
    sums = [(p.exp() * (p - q)).sum(), (p.argmax(-1) != q.argmax(-1)).sum(), torch.minimum(p.exp(), q.exp()).sum()]
    return torch.tensor([*map(float, sums), len(p)], dtype=torch.float64)


if __name__ == "__main__":
    main()
