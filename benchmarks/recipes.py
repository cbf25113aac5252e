"""What each recipe costs: a million samples of an 8B by arithmetic, and bytes a token beside acceptance lost.

RAW is a store of exact states whose ``advise --paired`` was kept, or any with ``--paired`` results beside it; without
RAW only the arithmetic is written. Peers' formats stand by their bytes: nothing was trained on them here.
Usage: python -m benchmarks.recipes [RAW] [--paired RESULT.json ...]
"""

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from benchmarks import report
from collectors.capture.estimate import Estimate, _estimate
from hiddenstore.codecs.recipes import RECIPES, get_recipe
from hiddenstore.inspect.advise import advise_store
from hiddenstore.inspect.choice import FP8, RecipeLimits
from hiddenstore.inspect.facts import raw_bytes_per_token, read_advice
from hiddenstore.report import page
from hiddenstore.segments import CONTAINERS
from hiddenstore.store import Store
from hiddenstore.testing.builders import capture_spec
from schemas import default_aux_layers
from schemas.advice import PairedRow
from schemas.capture import CaptureSpec
from schemas.prepared import PreparedData

SAMPLES, LENGTH, SUPERVISED = 1_000_000, 1_000, 0.6
# Llama-3.1-8B. The drafter: fc, one layer and a draft head of 32,000 tokens, trained over 7 steps.
EIGHT_B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128_256, dtype="bfloat16", tie_word_embeddings=False,
)  # fmt: skip
DRAFTER, STEPS = 3 * 4096**2 + (2 * 4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336) + 32_000 * 4096, 7
GZIP = 12.9 / 16
"""Of bf16 states: SpecForge's ``--compress``, 12.9 bits a value (docs/design/003 has the codecs it stands beside)."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = report.parser(__doc__)
    options.add_argument("raw", type=Path, nargs="?")
    options.add_argument("--paired", type=Path, action="append", default=[], help="a result with paired rows")
    args = options.parse_args(arguments)
    estimates = [million(name) for name in RECIPES]
    result: dict[str, Any] = {"million": [vars(one) | {"bytes_on_disk": one.bytes_on_disk} for one in estimates]}
    page = [f"# What recipes cost, {report.today()}", "", *million_lines(estimates)]
    if args.raw is not None:
        store = Store.open(args.raw)
        bars = measured(store, [row for path in args.paired for row in json.loads(path.read_text())["paired"]])
        result["measured"] = [{"name": bar.name, "bytes_per_token": bar.value, "text": bar.text} for bar in bars]
        title = f"Bytes a token and acceptance lost, {store.capture.target.name}"
        page += ["", f"## {title}", "", "| kept as | |", "|---|---|", *(f"| {bar.name} | {bar.text} |" for bar in bars)]
        if args.results is not None:
            (args.results / f"recipes-{report.today()}.svg").write_text(drawing(title, bars), encoding="utf-8")
    report.publish("recipes", result, args.results, page)


def million(recipe: str) -> Estimate:
    """A million samples of the 8B in a recipe, as ``hiddenstore plan`` counts."""
    layers = default_aux_layers("eagle3", EIGHT_B.num_hidden_layers)
    target = {"num_layers": EIGHT_B.num_hidden_layers, "vocab_size": EIGHT_B.vocab_size}
    identity = capture_spec(width=EIGHT_B.hidden_size).target.model_copy(update=target)
    capture = CaptureSpec(
        target=identity, aux_layers=layers, final="supervised", final_norm="pre_norm", codecs=get_recipe("raw")
    )
    tokens = SAMPLES * LENGTH
    info = PreparedData.model_construct(samples=SAMPLES, tokens=tokens, supervised_tokens=int(SUPERVISED * tokens))
    return _estimate(info, capture, recipe, get_recipe(recipe), CONTAINERS["zarr"], EIGHT_B)


def million_lines(estimates: Sequence[Estimate]) -> list[str]:
    """A table of them."""
    tokens, step = SAMPLES * LENGTH, 6 * DRAFTER * STEPS
    raw = tokens * 4 * EIGHT_B.hidden_size * 2
    return [
        f"## {SAMPLES:,} samples of {LENGTH:,} tokens of an 8B, {SUPERVISED:.0%} supervised",
        "",
        "Llama-3.1-8B (D=4096, 32 layers), three aux layers and the final hidden. bf16 of all four at every token "
        f"is {raw / 1e12:.1f} TB. Memory: embeddings, head and blocks that a trainer holds. FLOPs: "
        f"what rebuilding takes in one epoch, beside {step * tokens / 1e18:.0f} EFLOP of the drafter's own "
        f"({DRAFTER / 1e6:.0f} M parameters, {STEPS} steps, 6 a parameter).",
        "",
        "| recipe | on disk, TB | against bf16 | bytes a token | in memory, GB | rebuilding, EFLOP | of training |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| `{one.recipe}` | {one.bytes_on_disk / 1e12:.2f} | {raw / one.bytes_on_disk:.2f}x | "
            f"{one.bytes_per_token:,.0f} | {one.bytes_target / 1e9:.1f} | {one.rebuild_flops * tokens / 1e18:.1f} | "
            f"{one.rebuild_flops / step:.0%} |"
            for one in estimates
        ),
    ]  # fmt: skip


def measured(store: Store, rows: Sequence[dict[str, Any]]) -> list[page.Bar]:
    """A bar a recipe and a peer's format, the largest first: bytes a token, acceptance where it was trained."""
    kept = read_advice(store.fs)
    advice = kept or advise_store(store, RecipeLimits())
    paired = {row.recipe: row for row in (*map(PairedRow.model_validate, rows), *advice.paired)}
    raw = float(raw_bytes_per_token(store.capture))
    layers = len(store.capture.aux_layers) + 1
    peers = {
        "bf16 at every token (.pt, safetensors)": raw,
        "the same, gzip (SpecForge)": raw * GZIP,
        "fp8 per token (speculators)": float(layers * (store.capture.target.hidden_size + 2)),
    }
    bars = [page.Bar(name, size, f"{size:,.0f} B · {raw / size:.2f}x", series=1) for name, size in peers.items()]
    for row in advice.rows:
        if row.recipe != FP8:
            text = f"{row.bytes_per_token:,.0f} B · {raw / row.bytes_per_token:.2f}x{_points(paired.get(row.recipe))}"
            bars.append(page.Bar(row.recipe, row.bytes_per_token, text))
    return sorted(bars, key=lambda bar: -bar.value)


def _points(row: PairedRow | None) -> str:
    if row is None:
        return ""
    if row.half_width is None:
        return f" · {100 * row.difference:+.2f} points, s.e. {100 * row.standard_error:.2f}"
    return f" · {100 * row.difference:+.2f} ± {100 * row.half_width:.2f} points"


def drawing(title: str, bars: Sequence[page.Bar]) -> str:
    """The chart as an SVG file of its own, with the colours of the reports."""
    found = re.search("<svg.*</svg>", page.bars(title, bars), re.DOTALL)
    assert found is not None
    style = (files("hiddenstore.report") / "page.css").read_text(encoding="utf-8")
    text = found[0].replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return text.replace(">", f"><style>{style}</style>", 1) + "\n"


if __name__ == "__main__":
    main()
