"""``hiddenstore eval``: simulated acceptance over recorded text, or what a running server gets accepted."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.output import common_options, examples, output
from trainer.cli.draft_len import draft_len_option
from trainer.cli.served import measure_servers, served_options

if TYPE_CHECKING:
    from trainer.drafting.acceptance import DraftShape
    from trainer.drafting.evaluate import Evaluation
    from trainer.drafting.ngram import NgramFloor


@click.command(
    "eval",
    epilog=examples(
        "hiddenstore eval run store",
        "hiddenstore eval run store --draft-len 1,3,7,5x4 --untrained --json",
        "hiddenstore eval --engine vllm --server http://127.0.0.1:8000 --prompts mt_bench.jsonl --markdown table.md",
    ),
)
@click.argument("run", required=False)
@click.argument("store", required=False)
@click.option(
    "--split",
    type=click.Choice(["train", "validation"]),
    default="validation",
    help="Samples to walk.",
    show_default=True,
)
@draft_len_option
@click.option("--best", is_flag=True, help="The checkpoint of RUN that validated best, not its newest.")
@click.option("--untrained", is_flag=True, help="Also walk with the drafter as it was before training.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto.")
@served_options
@common_options
def evaluate(run: str | None, store: str | None, engine: str | None, **options: Any) -> None:
    """How many tokens a target forward yields, simulated over recorded text or measured on a running server.

    RUN is a training run or one of its checkpoints. The text is walked as a server drafts it: each draft starts where
    the last one ended. Beside it stand the average over all slots and the n-gram floor.

    With --engine, a server that is already up answers --prompts: MT-Bench, GSM8K or HumanEval files as published, or
    JSONL with `prompt` or `messages` and a `task`. Accepted length comes from the server's own counters.
    """
    if engine is not None:
        if run is not None:
            raise click.UsageError("--engine measures a server: leave RUN and STORE out")
        measure_servers({"engine": engine, **options})
        return
    if run is None or store is None or options["servers"]:
        raise click.UsageError("expected RUN and STORE, or --engine with --server and --prompts")
    _evaluate(run, store, **{name: options[name] for name in ("split", "shapes", "best", "untrained", "device")})


def _evaluate(
    run: str, store: str, split: str, shapes: "tuple[DraftShape, ...]", best: bool, untrained: bool, device: str
) -> None:
    from hiddenstore.head import HeadBundle
    from hiddenstore.identity import target_word
    from hiddenstore.progress import Progress
    from hiddenstore.store import Store
    from trainer.drafting import evaluate as engine
    from trainer.run.checkpoint import best as best_checkpoint
    from trainer.run.loaded import load_drafter
    from trainer.run.runs import describe, training_store
    from trainer.scale.device import pick_device

    if best:
        run = str(best_checkpoint(Path(run)))
    info, text = describe(run), Store.open(store)
    engine.require_same_capture(info.spec.target, text, f"hiddenstore eval {run} {info.spec.store}")
    where = pick_device(device)
    head = HeadBundle.load(text)
    final_norm = text.capture.final_norm
    loaded = [load_drafter(run, where, head=head, final_norm=final_norm)]
    if untrained:
        loaded.append(load_drafter(run, where, head=head, final_norm=final_norm, untrained=True))
    total = sum(entry.tokens for _, entry in text.entries if entry.split == split)
    with Progress("eval", total=total, unit="tokens") as progress:
        found = engine.evaluate(
            [one.use for one in loaded],
            text,
            split,  # type: ignore[arg-type]
            shapes,
            device=where,
            on_pack=progress.advance,
        )
    trained_on = training_store(info)
    if trained_on is None:
        output().warn(f"{info.spec.store} is gone: the n-gram floor is made from the training split of {store}")
    floor = engine.floor(trained_on or text, found[0].texts, shapes[-1].length)
    document = {
        "run": run,
        "step": loaded[0].step,
        "store": store,
        "split": split,
        **_document(found[0], floor),
        "untrained_accepted_length": found[1].tally.accepted_length if untrained else None,
    }
    output().data(document, human=lambda: _show(document))
    output().hint("hiddenstore", "decode", run, "--target", target_word(text.capture.target), "--prompts", store)


def _document(found: "Evaluation", floor: "NgramFloor") -> dict[str, Any]:
    tally = found.tally
    return {
        "draft_len": tally.draft_len,
        "tree_width": tally.width,
        "samples": len(found.texts),
        "accepted_length": tally.accepted_length,
        "slot_accepted_length": tally.slot_accepted_length,
        "per_position": tally.per_position,
        "drafts": tally.drafts,
        "tokens": tally.tokens,
        "ngram_accepted_length": floor.accepted_length,
        "ngram_order": floor.order,
        "ngram_per_order": list(floor.per_order),
        "ngram_training_tokens": floor.training_tokens,
        "sweep": [
            {
                "draft_len": one.draft_len,
                "tree_width": one.width,
                "accepted_length": one.accepted_length,
                "slot_accepted_length": one.slot_accepted_length,
                "per_position": one.per_position,
                "drafts": one.drafts,
            }
            for one in found.tallies
        ],
    }


def _show(document: dict[str, Any]) -> None:
    from hiddenstore.cli.terminal import plural

    rows = [
        (
            "accepted length",
            f"{document['accepted_length']:.3f}  drafts of {shape_text(document)}, bonus token counted",
        ),
        ("slot average", _number(document["slot_accepted_length"])),
        ("by position", positions_text(document["per_position"])),
        ("n-gram floor", floor_text(document)),
    ]
    if document["untrained_accepted_length"] is not None:
        rows.append(("untrained", f"{document['untrained_accepted_length']:.3f}"))
    rows.append(
        (
            "walked",
            f"{plural(document['samples'], document['split'] + ' sample')}: {document['drafts']:,} drafts, "
            f"{document['tokens']:,} tokens",
        )
    )
    output().pairs(rows)
    if len(document["sweep"]) > 1:
        output().table(
            ["draft of", "accepted length", "slot average", "drafts"],
            [
                (shape_text(row), f"{row['accepted_length']:.3f}", _number(row["slot_accepted_length"]), row["drafts"])
                for row in document["sweep"]
            ],
        )


def shape_text(row: dict[str, Any]) -> str:
    """``3``, or ``5x4`` for a tree."""
    width = row["tree_width"]
    return f"{row['draft_len']}x{width}" if width > 1 else str(row["draft_len"])


def positions_text(shares: Sequence[float]) -> str:
    """``0.282  0.105  0.004``; a long draft's last positions, which were never accepted, are counted only."""
    reached = max((at for at, share in enumerate(shares, 1) if share > 0), default=0)
    shown = max(reached, 8)
    never = f"  0 at {len(shares) - shown} more" if len(shares) > shown else ""
    return "  ".join(f"{share:.3f}" for share in shares[:shown]) + never


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def floor_text(document: dict[str, Any]) -> str:
    """The n-gram floor on one line."""
    if document["ngram_accepted_length"] is None:
        return "unknown: no training text"
    return (
        f"{document['ngram_accepted_length']:.3f}  order {document['ngram_order']} of 1–4, from "
        f"{document['ngram_training_tokens']:,} training tokens"
    )
