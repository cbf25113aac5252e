"""``hiddenstore decode``: real speculative decoding beside the plain greedy baseline."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.output import common_options, examples, output
from trainer.cli.draft_len import draft_len_option

if TYPE_CHECKING:
    from trainer.drafting.decode import Decoded, Run
    from trainer.drafting.evaluate import Evaluation
    from trainer.drafting.ngram import NgramFloor
    from trainer.drafting.prompts import Prompt

# Logit gaps up to here are ties of the arithmetic; a larger one means that the output is not the target's.
TIE_GAP = {"float32": 1e-3}
TIE_GAP_HALF = 0.5


@click.command(
    epilog=examples(
        "hiddenstore decode run --target ./target --prompts store",
        "hiddenstore decode run --target ./target --prompts questions.jsonl -n 80 --draft-len 3,7,5x4 --json",
    ),
)
@click.argument("run")
@click.option("--target", required=True, help="Folder or hub id of the target the drafter was trained for.")
@click.option("--prompts", required=True, help="JSONL of messages, prepared DATA, or a store (its validation split).")
@draft_len_option
@click.option("-n", "--count", type=click.IntRange(min=1), default=40, show_default=True, help="Prompts to decode.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Longest answer.")
@click.option(
    "--untrained", is_flag=True, help="Also walk the decoded text with the drafter as it was before training."
)
@click.option("--answers", type=click.Path(dir_okay=False), help="Write the decoded conversations to this JSONL.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="Above 0: lossless rejection sampling.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Target weights.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto.")
@common_options
def decode(run: str, target: str, prompts: str, count: int, answers: str | None, **options: Any) -> None:
    """Speculative decoding with the live target: lossless, one prompt at a time.

    Prompts whose greedy answer loops (over 30 % repeated 4-grams) are left out and counted. The same answers are also
    decoded one token at a time, for comparison.
    """
    from hiddenstore.progress import Progress
    from trainer.drafting import decode as engine
    from trainer.drafting.prompts import read_prompts
    from trainer.drafting.questions import left_out
    from trainer.drafting.speculate import Sampling
    from trainer.drafting.target import bundle_of, load_live_target
    from trainer.run.loaded import load_drafter
    from trainer.run.runs import describe
    from trainer.scale.device import pick_device

    info, where, temperature = describe(run), pick_device(options["device"]), options["temperature"]
    live = load_live_target(target, info.spec.drafter.aux_layers, info.spec.target, where, options["dtype"])
    head = bundle_of(live.model, info.spec.head)
    drafter = load_drafter(run, where, head=head)
    unusable: list[str] = []
    source = read_prompts(prompts, live.tokenizer, live.identity, "validation", unusable)
    asked: list[Prompt] = []
    with Progress("decode", total=count, unit="prompts") as progress:
        decoded = engine.decode(
            live,
            drafter.use,
            _kept(source, asked),
            options["shapes"],
            engine.Limits(count, options["max_new_tokens"]),
            rule=(lambda place: Sampling(temperature, drafter.vocab.target_ids, place)) if temperature else None,
            on_prompt=lambda done: progress.update(len(done.prompts), looping=done.looping),
        )
    drafters = [drafter.use]
    if options["untrained"]:
        drafters.append(load_drafter(run, where, head=head, untrained=True).use)
    found, floor = _on_the_same_text(decoded, live, drafters, info, where)
    document = {
        "run": run,
        "step": drafter.step,
        "target": live.identity.name,
        "prompts_from": prompts,
        "prompts_unusable": len(unusable),
        "temperature": temperature,
        **_document(decoded, found, floor, temperature),
    }
    if answers:
        _write_answers(Path(answers), decoded, asked, live.tokenizer)
    output().data(document, human=lambda: _show(document))
    if unusable:
        output().warn(left_out(unusable))
    if len(decoded.prompts) < count:
        output().warn(f"{prompts} had only {len(decoded.prompts)} prompts to decode, {count} were asked for")
    _judge(document, live.identity.dtype)
    output().hint("hiddenstore", "export", run, "--engine", "vllm", "-o", "drafter")


def _kept(prompts: "Iterator[Prompt]", asked: "list[Prompt]") -> Iterator[list[int]]:
    """Token ids of prompts, read only as they are needed; each prompt given out is also put into ``asked``."""
    for prompt in prompts:
        asked.append(prompt)
        yield prompt.ids


def _on_the_same_text(
    decoded: "Decoded", live: Any, drafters: list[Any], info: Any, where: str
) -> "tuple[list[Evaluation], NgramFloor | None]":
    """Simulated acceptance of each drafter and the n-gram floor, over the answers of the longest draft."""
    from trainer.drafting.decode import recorded_packs
    from trainer.drafting.evaluate import evaluate_packs, floor
    from trainer.run.runs import training_store

    shapes = [run.tally.shape for run in decoded.runs]
    packs = recorded_packs(live, decoded.prompts, decoded.runs[-1])
    found = evaluate_packs(drafters, packs, shapes, device=where)
    store = training_store(info)
    if store is None:
        output().warn(f"{info.spec.store} is gone, so there is no n-gram floor")
        return found, None
    return found, floor(store, found[0].texts, shapes[-1].length)


def _document(
    decoded: "Decoded", found: "list[Evaluation]", floor: "NgramFloor | None", temperature: float
) -> dict[str, Any]:
    judged = decoded.tried - decoded.too_long
    # What is simulated is greedy drafting, which says nothing of drafts that were drawn.
    simulated = [None if temperature else tally.accepted_length for tally in found[0].tallies]
    sweep = [_row(run, value, temperature) for run, value in zip(decoded.runs, simulated, strict=True)]
    return {
        **sweep[-1],
        "prompts": len(decoded.prompts),
        "prompts_tried": decoded.tried,
        "prompts_too_long": decoded.too_long,
        "looping": decoded.looping,
        "looping_share": decoded.looping / judged if judged else 0.0,
        "untrained_accepted_length": found[1].tally.accepted_length if len(found) > 1 else None,
        "ngram_accepted_length": floor.accepted_length if floor else None,
        "ngram_order": floor.order if floor else None,
        "ngram_training_tokens": floor.training_tokens if floor else 0,
        "differences": [vars(one) for run in decoded.runs for one in run.differences],
        "prefills": len(decoded.prompts),
        "baseline_tokens_per_s": decoded.baseline_tokens / decoded.baseline_seconds,
        "sweep": sweep,
    }


def _row(run: "Run", simulated: float | None, temperature: float) -> dict[str, Any]:
    tally = run.tally
    return {
        "draft_len": tally.draft_len,
        "tree_width": tally.width,
        "accepted_length": tally.accepted_length,
        "engine_accepted_length": tally.engine_accepted_length,
        "per_position": tally.per_position,
        "drafts": tally.drafts,
        "tokens": tally.tokens,
        "answer_tokens": run.tokens,
        "simulated_accepted_length": simulated,
        "identical_to_greedy": None if temperature else not run.differences,
        "target_forwards": run.target_forwards,
        "tokens_per_s": run.tokens / run.seconds,
    }


def _show(document: dict[str, Any]) -> None:
    from hiddenstore.cli.terminal import percent
    from trainer.cli.evaluate import floor_text, positions_text, shape_text

    identical = document["prompts"] - len(document["differences"])
    rows = [
        (
            "accepted length",
            f"{document['accepted_length']:.3f}  drafts of {shape_text(document)}, bonus token counted",
        ),
        ("by position", positions_text(document["per_position"])),
        ("n-gram floor", floor_text(document)),
    ]
    if document["simulated_accepted_length"] is not None:
        rows.append(("eval, same text", f"{document['simulated_accepted_length']:.3f}"))
    if document["untrained_accepted_length"] is not None:
        rows.append(("untrained", f"{document['untrained_accepted_length']:.3f}"))
    rows += [
        (
            "same as greedy",
            f"{identical} of {document['prompts']} answers"
            if document["identical_to_greedy"] is not None
            else f"sampled at temperature {document['temperature']:g}",
        ),
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
            f"{document['tokens_per_s']:,.0f}  without a drafter {document['baseline_tokens_per_s']:,.0f}",
        ),
    ]
    output().pairs(rows)
    if len(document["sweep"]) > 1:
        output().table(
            ["draft of", "accepted length", "drafts", "tokens/s"],
            [
                (shape_text(row), f"{row['accepted_length']:.3f}", row["drafts"], f"{row['tokens_per_s']:,.0f}")
                for row in document["sweep"]
            ],
        )


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
    for place, prompt, answer in zip(decoded.chosen, decoded.prompts, decoded.runs[-1].answers, strict=True):
        text = tokenizer.decode(answer, skip_special_tokens=True)
        messages = asked[place].messages
        row: dict[str, Any] = {"prompt_ids": prompt, "answer_ids": answer, "answer": text}
        if messages is not None:
            row["messages"] = [*messages, {"role": "assistant", "content": text}]
        lines.append(json.dumps(row, ensure_ascii=False))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
