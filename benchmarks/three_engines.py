"""The same conversations through Hugging Face, a real vLLM and the TensorRT-LLM double, and how far the stores differ.

    LD_PRELOAD=.venv-engines/lib/libiomp5.so OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \\
        VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \\
        .venv-engines/bin/python benchmarks/three_engines.py [--conversations 500]

The bundled target in fp32, three aux layers and the final hidden, once at ``lossless`` and once at ``safe`` (q8); each
store collected by the command in a process of its own. The double stands for what TensorRT-LLM documents: it says
nothing of TensorRT-LLM's own numbers.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm

from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations

RESULTS = Path(__file__).parent / "results"
DOUBLE = Path(__file__).parents[1] / "tests" / "collectors" / "double_trtllm"
ENGINES = {"hf": "Hugging Face", "vllm": "vLLM", "trtllm": "TensorRT-LLM double"}
TOLERANCES = {"lossless": 2.0**-7, "safe": 0.02}
"""One step of bf16; at q8 the same state may land on either side of a step of its block's scale as well."""


def hiddenstore(*words: str) -> dict[str, Any]:
    """What a command answers; ``diff`` exits 3 where stores differ."""
    path = os.pathsep.join([str(DOUBLE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "hiddenstore.cli", *words, "--json"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}, check=False
    )
    if done.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}")
    return dict(json.loads(done.stdout))


def collected(folder: Path, data: str, recipe: str) -> dict[str, str]:
    """A store per engine."""
    stores = {engine: str(folder / f"{engine}-{recipe}") for engine in ENGINES}
    for engine, store in stores.items():
        how = ("--target", str(TARGET_DIR), "--engine", engine, "--dtype", "fp32", "--recipe", recipe)
        hiddenstore("collect", data, "-o", store, *how)
    return stores


def pair(stores: dict[str, str], one: str, other: str, recipe: str) -> dict[str, Any]:
    """One row of the table."""
    tolerance = TOLERANCES[recipe]
    found = hiddenstore("diff", stores[one], stores[other], "--samples", "0", "--tolerance", str(tolerance))
    return {
        "engines": [one, other],
        "recipe": recipe,
        "samples": found["compared_samples"],
        "worst_relative": max(field["worst_relative"] for field in found["fields"]),
        "mean_relative": max(field["relative"] for field in found["fields"]),
        "different_rows": sum(field["different_rows"] for field in found["fields"]),
        "rows": sum(field["rows"] for field in found["fields"]),
        "same_next_token": found["top1_agreement"],
        "tolerance": tolerance,
        "beyond_tolerance": found["beyond_tolerance"],
        "fields": found["fields"],
    }


def table(result: dict[str, Any]) -> list[str]:
    """Markdown."""
    head = ["pair", "recipe", "samples", "tokens", "rows not bit-identical", "mean", "worst row", "same next token", ""]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in result["pairs"]:
        cells = [
            " – ".join(ENGINES[engine] for engine in row["engines"]),
            row["recipe"],
            str(row["samples"]),
            f"{result['tokens']:,}",
            f"{row['different_rows'] / row['rows']:.1%}",
            f"{row['mean_relative']:.2%}",
            f"{row['worst_relative']:.2%}",
            f"{row['same_next_token']:.2%}",
            "differs" if row["beyond_tolerance"] else f"equal within {row['tolerance']:.2%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--no-result", action="store_true", help="print only")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, data = folder / "rows.jsonl", str(folder / "data")
        lines = [json.dumps(row) for row in islice(conversations(), asked.conversations)]
        rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
        prepared = hiddenstore("prepare", str(rows), "-o", data, "--target", str(TARGET_DIR))
        pairs, meaning = [], {}
        for recipe in TOLERANCES:
            stores = collected(folder, data, recipe)
            pairs += [pair(stores, one, other, recipe) for one, other in combinations(ENGINES, 2)]
            for engine, store in stores.items():
                meaning[f"{engine}-{recipe}"] = hiddenstore("verify", store, "--meaning")["ok"]
    result = {
        "benchmark": "three_engines",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "vllm": vllm.__version__},
        "tokens": prepared["tokens"],
        "meaning_ok": meaning,
        "pairs": pairs,
    }
    head = [
        f"# One target, three engines, {result['date']}",
        "",
        f"vLLM {vllm.__version__} on CPU, transformers {transformers.__version__}, and a double of TensorRT-LLM's "
        "documentation (there was no TensorRT-LLM); the bundled target in fp32, layers 1, 3, 4 and the final hidden. "
        "Figures are |b - a| / |a| of a row: the mean of the field that differs most, and the worst row of all. "
        f"`verify --meaning` passes on {sum(meaning.values())} of {len(meaning)} stores.",
        "",
        *table(result),
    ]
    print("\n".join(head))
    if not asked.no_result:
        file = RESULTS / f"three_engines-{result['date']}.json"
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        file.with_suffix(".md").write_text("\n".join(head) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
