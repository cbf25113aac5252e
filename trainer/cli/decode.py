"""``hiddenstore decode``: real speculative decoding beside the plain greedy baseline."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.output import common_options, examples, output

if TYPE_CHECKING:
    from trainer.acceptance import Tally
    from trainer.decode import Decoded
    from trainer.ngram import NgramFloor
    from trainer.prompts import Prompt

# Logit gaps up to here are ties of the arithmetic; a larger one means that the output is not the target's.
TIE_GAP = {"float32": 1e-3}
TIE_GAP_HALF = 0.5


@click.command(
    epilog=examples(
        "hiddenstore decode run --target ./target --prompts store",
        "hiddenstore decode run --target ./target --prompts questions.jsonl -n 80 --draft-len 7 --json",
    ),
)
@click.argument("run")
@click.option("--target", required=True, help="Folder or hub id of the target the drafter was trained for.")
@click.option("--prompts", required=True, help="JSONL of messages, prepared DATA, or a store (its validation split).")
@click.option("--draft-len", type=click.IntRange(min=1), default=3, show_default=True, help="Tokens drafted at a time.")
@click.option("-n", "--count", type=click.IntRange(min=1), default=40, show_default=True, help="Prompts to decode.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Longest answer.")
@click.option(
    "--untrained", is_flag=True, help="Also walk the decoded text with the drafter as it was before training."
)
@click.option("--answers", type=click.Path(dir_okay=False), help="Write the decoded conversations to this JSONL.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Target weights.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto.")
@common_options
def decode(run: str, target: str, prompts: str, count: int, answers: str | None, **options: Any) -> None:
    """Speculative decoding with the live target: greedy, lossless, one prompt at a time.

    Prompts whose greedy answer loops (over 30 % repeated 4-grams) are left out and counted. The same answers are also
    decoded one token at a time, for comparison.
    """
    from hiddenstore.progress import Progress
    from trainer import decode as engine
    from trainer.checkpoint import load_drafter
    from trainer.device import pick_device
    from trainer.prompts import read_prompts
    from trainer.runs import describe
    from trainer.target import bundle_of, load_live_target

    info, where, draft_len = describe(run), pick_device(options["device"]), options["draft_len"]
    live = load_live_target(target, info.spec.drafter.aux_layers, info.spec.target, where, options["dtype"])
    head = bundle_of(live.model, info.spec.head)
    drafter = load_drafter(run, where, head=head)
    asked: list[Prompt] = []
    with Progress("decode", total=count, unit="prompts") as progress:
        decoded = engine.decode(
            live,
            drafter.use.live(),
            _kept(read_prompts(prompts, live.tokenizer, live.identity, "validation"), asked),
            count=count,
            draft_len=draft_len,
            max_new_tokens=options["max_new_tokens"],
            on_prompt=lambda done: progress.update(len(done.answers), looping=done.looping),
        )
    drafters = [drafter.use]
    if options["untrained"]:
        drafters.append(load_drafter(run, where, head=head, untrained=True).use)
    tallies, floor = _on_the_same_text(decoded, live, drafters, info, where)
    document = {
        "run": run,
        "step": drafter.step,
        "target": live.identity.name,
        "prompts_from": prompts,
        **_document(decoded, tallies, floor),
    }
    if answers:
        _write_answers(Path(answers), decoded, asked, live.tokenizer)
    output().data(document, human=lambda: _show(document))
    if len(decoded.answers) < count:
        output().warn(f"{prompts} had only {len(decoded.answers)} prompts to decode, {count} were asked for")
    _judge(document, live.identity.dtype)
    output().hint("hiddenstore", "export", run, "--engine", "vllm", "-o", "drafter")


def _kept(prompts: "Iterator[Prompt]", asked: "list[Prompt]") -> Iterator[list[int]]:
    """Token ids of prompts, read only as they are needed; each prompt given out is also put into ``asked``."""
    for prompt in prompts:
        asked.append(prompt)
        yield prompt.ids


def _on_the_same_text(
    decoded: "Decoded", live: Any, drafters: list[Any], info: Any, where: str
) -> "tuple[list[Tally], NgramFloor | None]":
    """Simulated acceptance of each drafter and the n-gram floor, over the very answers that were decoded."""
    from trainer.decode import recorded_packs
    from trainer.evaluate import evaluate_packs, floor
    from trainer.runs import training_store

    found = evaluate_packs(drafters, recorded_packs(live, decoded), decoded.tally.draft_len, device=where)
    store = training_store(info)
    if store is None:
        output().warn(f"{info.spec.store} is gone, so there is no n-gram floor")
        return [one.tally for one in found], None
    return [one.tally for one in found], floor(store, found[0].texts, decoded.tally.draft_len)


def _document(decoded: "Decoded", tallies: "list[Tally]", floor: "NgramFloor | None") -> dict[str, Any]:
    tally = decoded.tally
    judged = decoded.tried - decoded.too_long
    return {
        "draft_len": tally.draft_len,
        "prompts": len(decoded.answers),
        "prompts_tried": decoded.tried,
        "prompts_too_long": decoded.too_long,
        "looping": decoded.looping,
        "looping_share": decoded.looping / judged if judged else 0.0,
        "accepted_length": tally.accepted_length,
        "per_position": tally.per_position,
        "drafts": tally.drafts,
        "tokens": tally.tokens,
        "answer_tokens": decoded.tokens,
        "simulated_accepted_length": tallies[0].accepted_length,
        "untrained_accepted_length": tallies[1].accepted_length if len(tallies) > 1 else None,
        "ngram_accepted_length": floor.accepted_length if floor else None,
        "ngram_order": floor.order if floor else None,
        "ngram_training_tokens": floor.training_tokens if floor else 0,
        "identical_to_greedy": not decoded.differences,
        "differences": [vars(difference) for difference in decoded.differences],
        "prefills": len(decoded.answers),
        "target_forwards": decoded.target_forwards,
        "tokens_per_s": decoded.tokens / decoded.seconds,
        "baseline_tokens_per_s": decoded.baseline_tokens / decoded.baseline_seconds,
    }


def _show(document: dict[str, Any]) -> None:
    from hiddenstore.cli.terminal import percent
    from trainer.cli.evaluate import floor_text

    identical = document["prompts"] - len(document["differences"])
    rows = [
        (
            "accepted length",
            f"{document['accepted_length']:.3f}  chain of {document['draft_len']}, bonus token counted",
        ),
        ("by position", "  ".join(f"{share:.3f}" for share in document["per_position"])),
        ("eval, same text", f"{document['simulated_accepted_length']:.3f}"),
        ("n-gram floor", floor_text(document)),
    ]
    if document["untrained_accepted_length"] is not None:
        rows.append(("untrained", f"{document['untrained_accepted_length']:.3f}"))
    rows += [
        ("same as greedy", f"{identical} of {document['prompts']} answers"),
        (
            "left out",
            f"{document['looping']} looping of {document['prompts_tried']} ({percent(document['looping_share'])})",
        ),
        (
            "target forwards",
            f"{document['target_forwards']:,} = {document['drafts']:,} drafts + {document['prefills']:,} prefills, "
            f"for {document['answer_tokens']:,} tokens",
        ),
        (
            "tokens/s",
            f"{document['tokens_per_s']:,.0f}  greedy without a drafter {document['baseline_tokens_per_s']:,.0f}",
        ),
    ]
    output().pairs(rows)


def _judge(document: dict[str, Any], dtype: str) -> None:
    """Warn of ties; exit 3 when an answer differs by more than rounding can explain."""
    gaps = [difference["logit_gap"] for difference in document["differences"]]
    if not gaps:
        return
    limit = TIE_GAP.get(dtype, TIE_GAP_HALF)
    output().warn(f"{len(gaps)} answers differ from greedy, first at a logit gap of at most {max(gaps):.2g}")
    if max(gaps) > limit:
        output().warn(f"a gap above {limit:g} is no tie in {dtype}: the decoded text is not the target's")
        raise click.exceptions.Exit(3)


def _write_answers(path: Path, decoded: "Decoded", asked: "list[Prompt]", tokenizer: Any) -> None:
    lines = []
    for place, prompt, answer in zip(decoded.chosen, decoded.prompts, decoded.answers, strict=True):
        text = tokenizer.decode(answer, skip_special_tokens=True)
        messages = asked[place].messages
        row: dict[str, Any] = {"prompt_ids": prompt, "answer_ids": answer, "answer": text}
        if messages is not None:
            row["messages"] = [*messages, {"role": "assistant", "content": text}]
        lines.append(json.dumps(row, ensure_ascii=False))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
