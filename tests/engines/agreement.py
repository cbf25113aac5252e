"""What a real engine, our live loop and our simulation say of one drafter over one text, and how far they agree."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_world import EngineWorld
from safetensors.torch import load_file, save_file
from vllm_engine import Served, Settings, serve

from trainer.serve.vllm import speculative_config

VLLM = "0.32.0"
OF_DECODE, OF_EVAL = 0.03, 0.06
"""How far the engine's accepted length may lie from ours, as a share of ours."""

OF_COUNTS = 0.01
"""The same where our loop counts as the engine does. Ours reads states rounded to bf16, as a store holds them."""

Row = dict[str, Any]


def served_answers(world: EngineWorld, prompts: list[list[int]], speculative: Settings | None) -> Served:
    """The engine's greedy answers to prompts, none longer than those ``decode`` gave."""
    return serve(world.target, prompts, world.new_tokens, speculative)


def agreement(world: EngineWorld, run: str, method: str, lengths: tuple[int, ...], folder: str = "") -> list[Row]:
    """A row a draft length: accepted length in the engine, in ``decode`` and in ``eval``.

    ``method`` as ``hiddenstore serve`` spells it; ``folder``: what the engine loads instead of the run's own export.
    """
    model = folder or world.exported(run)
    decoded, evaluated = world.decoded(run, lengths), world.evaluated(run, lengths)
    rows = []
    for length in lengths:
        served = served_answers(world, decoded.prompts, speculative_config(method, model, length, VLLM))
        ours = decoded.by_length[length]
        rows.append(
            {
                "drafter": Path(model).name,
                "draft_len": length,
                "identical": sum(a == b for a, b in zip(served.answers, decoded.answers, strict=True)),
                "answers": len(decoded.answers),
                "drafts": served.drafts,
                "engine": served.accepted_length,
                "decode": ours["accepted_length"],
                "decode_as_counted": ours["engine_accepted_length"],
                "eval": evaluated[length],
                "engine_per_position": [count / served.drafts for count in served.accepted_at],
                "decode_per_position": ours["per_position"],
            }
        )
    return rows


def assert_agrees(row: Row) -> None:
    """The engine is lossless and accepts what our own loop accepts and our simulation foretells."""
    assert row["identical"] == row["answers"]
    assert within(row["engine"], row["decode_as_counted"], OF_COUNTS), row
    assert within(row["engine"], row["decode"], OF_DECODE), row
    assert within(row["engine"], row["eval"], OF_EVAL), row


def assert_caught(row: Row) -> None:
    """The engine is lossless as ever, and its accepted length gives the mistake away on both scales."""
    assert row["identical"] == row["answers"]
    assert not within(row["engine"], row["decode"], OF_DECODE), row
    assert not within(row["engine"], row["eval"], OF_EVAL), row


def within(found: float, expected: float, share: float) -> bool:
    """Whether ``found`` lies no further than ``share`` of ``expected`` from it."""
    return abs(found - expected) <= share * expected


def layers_one_off(config: dict[str, Any]) -> None:
    """The mistake of a block drafter that reads the layer after each of its own."""
    chosen = config["dflash_config"]
    chosen["target_layer_ids"] = [layer + 1 for layer in chosen["target_layer_ids"]]
    config.pop("eagle_aux_hidden_state_layer_ids", None)


def spoiled(
    export: str,
    name: str,
    config: Callable[[dict[str, Any]], Any] = lambda config: None,
    tensors: Callable[[dict[str, Any]], Any] = lambda tensors: None,
) -> str:
    """A copy of an exported drafter with a mistake made in its config or its tensors, both changed in place."""
    folder = Path(f"{export}-{name}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(export, folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config(settings)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    tensors(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def table(rows: list[Row], caught: list[Row]) -> list[str]:
    """Markdown: accepted length by drafter in the engine, in ``decode`` and in ``eval``, mistakes last."""
    if not rows:
        return []
    head = ["drafter", "draft of", "vLLM 0.32", "decode", "decode, counted as vLLM does", "eval", "same answers"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in [*sorted(rows, key=lambda row: (row["drafter"], row["draft_len"])), *caught]:
        lengths = [row.get(name) for name in ("engine", "decode", "decode_as_counted", "eval")]
        cells = ["–" if length is None else f"{length:.3f}" for length in lengths]
        same = f"{row['identical']} of {row['answers']}" if "answers" in row else "all"
        lines.append(f"| {' | '.join([row['drafter'], str(row['draft_len']), *cells, same])} |")
    return lines
