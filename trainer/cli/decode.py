"""``hiddenstore decode``: real speculative decoding beside the plain greedy baseline."""

import json
import shlex
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.words import RUN, FiniteRange, same_target_option, target_options
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.progress import Progress
from hiddenstore.console.text import percent, plural
from hiddenstore.errors import ConfigError, Kind
from trainer.cli.evaluate import (
    acceptance_rows,
    draft_len_option,
    floor_members,
    judge,
    length_text,
    shape_text,
    shapes_of,
)

if TYPE_CHECKING:
    from hiddenstore.store import Store
    from trainer.drafters.base import DrafterInUse
    from trainer.evaluate.acceptance import DraftShape
    from trainer.evaluate.prompts import Prompt
    from trainer.evaluate.simulate import Evaluation, NgramFloor
    from trainer.evaluate.speculate import DecodeResult, DraftSampleMethod, ShapeResult
    from trainer.evaluate.target import LiveTarget
    from trainer.train.run_folder import RunInfo

_PROMPTS = 40


@click.command(
    epilog=examples(
        "hiddenstore decode run --target ./target --prompts store",
        "hiddenstore decode run --target ./target --prompts questions.jsonl -n 80 --draft-len 3,7,5x4 --json",
    ),
)
@click.argument("run", type=RUN)
@click.option("--target", required=True, help="Folder, GGUF file or hub id of the target the drafter was trained for.")
@target_options
@click.option("--prompts", required=True, help="JSONL of messages, prepared DATA, or a store (its validation split).")
@draft_len_option
@click.option(
    "-n", "--count", type=click.IntRange(min=1), show_default=str(_PROMPTS), help="Prompts to decode, where there are."
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Longest answer.")
@click.option(
    "--untrained", is_flag=True, help="Also walk the decoded text with the drafter as it was before training."
)
@click.option("--answers", type=click.Path(dir_okay=False), help="Write the decoded conversations to this JSONL.")
@click.option("--temperature", type=FiniteRange(min=0), default=0.0, help="Above 0: lossless rejection sampling.")
@click.option(
    "--draft-sample-method",
    type=click.Choice(["greedy", "probabilistic"]),
    default="greedy",
    show_default=True,
    help="At a temperature above 0, as vLLM has it: the drafter's most probable token, or a draw.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of the target. Default: its own where this machine runs it well.",
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto.")
@same_target_option
@common_options
def decode(
    run: str,
    target: str,
    prompts: str,
    shapes: "tuple[DraftShape, ...]",
    count: int | None,
    max_new_tokens: int,
    untrained: bool,
    answers: str | None,
    temperature: float,
    draft_sample_method: "DraftSampleMethod",
    dtype: str | None,
    device: str,
    same_target: bool,
    **opening: Any,
) -> None:
    """Speculative decoding with the live target: lossless, one prompt at a time.

    Prompts whose greedy answer loops (over 30 % repeated 4-grams) are left out and counted. The same answers are also
    decoded one token at a time, for comparison.
    """
    _require_possible(answers, temperature, draft_sample_method)
    from hiddenstore.targets.folder import open_target
    from hiddenstore.targets.load import pick_device
    from trainer.evaluate import speculate
    from trainer.evaluate.prompts import read_prompts
    from trainer.evaluate.target import bundle_of, load_live_target
    from trainer.train.run_folder import describe, load_drafter

    info, device = describe(run), pick_device(device)
    folder = open_target(target, **opening)
    live = load_live_target(folder, info.spec.drafter.aux_layers, info.spec.target, device, dtype, same_target)
    store = _training_store(info, live)
    head, unusable = bundle_of(live.model, info.spec.head), list[str]()
    drafter = load_drafter(run, device, head=head)
    readable = read_prompts(prompts, live.tokenizer, live.identity, "validation", unusable)
    total, source, copy = _counted(readable, count or _PROMPTS)
    sampled = partial(speculate.RejectionSampling, temperature, drafter.vocab.target_ids, method=draft_sample_method)
    with Progress("decode", total=total, unit="prompts") as progress:
        result = speculate.decode(
            *(live, drafter, (prompt.ids for prompt in source), shapes_of(drafter, shapes)),
            speculate.DecodeLimits(count or _PROMPTS, max_new_tokens),
            rule=sampled if temperature else None,
            on_prompt=lambda done: progress.update(len(done.prompts), looping=done.looping),
        )
    rivals = [load_drafter(run, device, head=head, untrained=True)] if untrained else []
    simulated, floor = _simulate_same_text(result, live, [drafter, *rivals], store)
    document = {
        **{"run": run, "step": drafter.step, "target": live.identity.name, "prompts_from": prompts},
        **{"prompts_unusable": len(unusable), "temperature": temperature, "dtype": live.identity.dtype},
        "draft_sample_method": draft_sample_method,
        **_document(result, simulated, temperature, live.identity.dtype),
        **floor_members(floor),
    }
    output().data(document, human=lambda: _show(document))
    _write_answers(answers, result, islice(copy, result.tried), live)
    judge(document, info, store)
    _warn_of_prompts(prompts, unusable, len(result.prompts), count)
    _judge(document, live.identity.dtype)
    output().hint("hiddenstore", "export", run, "--engine", "vllm", "-o", "drafter")


def _counted(prompts: "Iterator[Prompt]", most: int) -> "tuple[int, Iterator[Prompt], Iterator[Prompt]]":
    """How many there are, up to ``most``, which are read whatever becomes of them; and all of them, twice."""
    begin = list(islice(prompts, most))
    first, second = tee(chain(begin, prompts))
    return len(begin), first, second


def _training_store(info: "RunInfo", live: "LiveTarget") -> "Store | None":
    """The store of the run, once the target was found to give its states; None where it is lost."""
    from hiddenstore.verify.profile import NO_PROFILE, is_another_checkpoint, unstated_warning
    from trainer.drafters import refuse_target
    from trainer.evaluate.target import require_stored_states
    from trainer.train.run_folder import training_store

    store, trained_for = training_store(info), info.spec.target
    if store is None:
        differences = [NO_PROFILE] if is_another_checkpoint(trained_for, live.identity) else []
        refuse_target(differences, f"{info.lost_store}, and target {live.identity.name} is another checkpoint")
        output().warn(f"{info.lost_store}: there is no n-gram floor, and the target's states were not compared")
    has_profile = store is not None and require_stored_states(live, store)
    if warning := unstated_warning(trained_for, live.identity, has_profile):
        output().warn(warning)
    return store


def _warn_of_prompts(source: str, unusable: list[str], decoded: int, count: int | None) -> None:
    from trainer.evaluate.prompts import left_out

    if unusable:
        output().warn(left_out(unusable))
    if count is not None and decoded < count:
        output().warn(f"{source} had only {plural(decoded, 'prompt')} to decode, {count} were asked for")


def _simulate_same_text(
    result: "DecodeResult", live: "LiveTarget", drafters: "list[DrafterInUse]", store: "Store | None"
) -> "tuple[list[Evaluation], NgramFloor | None]":
    """Simulated acceptance of each drafter and the n-gram floor, over the answers of the longest draft."""
    from trainer.evaluate.simulate import evaluate_packs, floor
    from trainer.evaluate.speculate import recorded_packs

    shapes = [decoded.tally.shape for decoded in result.by_shape]
    packs = recorded_packs(live, result.prompts, result.by_shape[-1])
    simulated = evaluate_packs(drafters, packs, shapes, device=str(live.device))
    return simulated, floor(store, simulated[0].texts, shapes[-1].length) if store is not None else None


def _document(result: "DecodeResult", simulated: "list[Evaluation]", temperature: float, dtype: str) -> dict[str, Any]:
    judged = result.tried - result.too_long
    # What is simulated is greedy drafting, which says nothing of drafts that were drawn.
    lengths = [None if temperature else tally.accepted_length for tally in simulated[0].tallies]
    plain = result.baseline_tokens / result.baseline_seconds
    sweep = [
        _row(decoded, length, temperature, result.token_seconds)
        for decoded, length in zip(result.by_shape, lengths, strict=True)
    ]
    ties, differences = split_ties([vars(one) for decoded in result.by_shape for one in decoded.differences], dtype)
    return {
        **sweep[-1],
        "prompts": len(result.prompts),
        "prompts_tried": result.tried,
        "prompts_too_long": result.too_long,
        "looping": result.looping,
        "looping_share": result.looping / judged if judged else 0.0,
        "untrained_accepted_length": simulated[1].tally.accepted_length if len(simulated) > 1 else None,
        "ties": ties,
        "differences": differences,
        "prefills": len(result.prompts),
        "baseline_tokens_per_s": plain,
        "sweep": sweep,
    }


def split_ties(departures: list[dict[str, Any]], dtype: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers that first leave the greedy one at a tie of the arithmetic, and those that do for another reason."""
    from trainer.evaluate.acceptance import tie_gap

    ties = [one for one in departures if one["logit_gap"] <= tie_gap(one["logit"], dtype)]
    return ties, [one for one in departures if one not in ties]


def _row(
    decoded: "ShapeResult", simulated: float | None, temperature: float, token_seconds: float | None
) -> dict[str, Any]:
    """``token_seconds``: of a step without a drafter. A draft with its check takes ``break_even_length`` of them;
    prefills, which both sides have, are in neither."""
    tally = decoded.tally
    return {
        **tally.row(),
        "engine_accepted_length": tally.engine_accepted_length,
        "tokens": tally.tokens,
        "answer_tokens": decoded.tokens,
        "simulated_accepted_length": simulated,
        "identical_to_greedy": None if temperature else not decoded.differences,
        "target_forwards": decoded.target_forwards,
        "tokens_per_s": decoded.tokens / decoded.seconds,
        "break_even_length": None if token_seconds is None else decoded.draft_seconds / token_seconds,
    }


def _show(document: dict[str, Any]) -> None:
    drafts, ties = len(document["sweep"]), len(document["ties"])
    departed = f", {ties} more first differ at a tie" if ties else ""
    identical = document["prompts"] * drafts - len(document["differences"]) - ties
    rows = acceptance_rows(document)
    rows.append(("break-even", f"{length_text(document['break_even_length'])}  above it drafting pays on this machine"))
    if document["simulated_accepted_length"] is not None:
        rows.append(("eval, same text", f"{document['simulated_accepted_length']:.3f}"))
    if document["untrained_accepted_length"] is not None:
        rows.append(("untrained", f"{document['untrained_accepted_length']:.3f}"))
    same = f"{identical} of {document['prompts'] * drafts} answers{departed}"
    if document["identical_to_greedy"] is None:
        same = f"sampled at temperature {document['temperature']:g}, drafts {document['draft_sample_method']}"
    left_out = f"{document['looping']} looping of {document['prompts_tried']} ({percent(document['looping_share'])})"
    passes = f"{plural(document['drafts'], 'draft')} + {plural(document['prefills'], 'prefill')}"
    forwards = f"{document['target_forwards']:,} = {passes}, for {plural(document['answer_tokens'], 'token')}"
    speed = f"{document['tokens_per_s']:,.1f}  without a drafter {document['baseline_tokens_per_s']:,.1f}"
    rows += [("same as greedy", same), ("left out", left_out)]
    rows += [("target forwards", forwards), ("tokens/s", speed)]
    output().pairs(rows)
    if len(document["sweep"]) > 1:
        output().table(
            ["draft of", ">accepted length", ">break-even", ">drafts", ">tokens/s"],
            [
                (
                    shape_text(row),
                    f"{row['accepted_length']:.3f}",
                    length_text(row["break_even_length"]),
                    f"{row['drafts']:,}",
                    f"{row['tokens_per_s']:,.1f}",
                )
                for row in document["sweep"]
            ],
        )


def _judge(document: dict[str, Any], dtype: str) -> None:
    """Warn of ties; exit 3 when an answer differs by more than rounding can explain."""
    if gaps := [tie["logit_gap"] for tie in document["ties"]]:
        output().warn(f"{len(gaps)} answers first differ from greedy at a tie: a logit gap of at most {max(gaps):.2g}")
    if document["differences"]:
        from trainer.evaluate.acceptance import tie_gap

        widest = max(document["differences"], key=lambda one: one["logit_gap"])
        output().warn(
            f"{len(document['differences'])} answers differ from greedy by a logit gap of up to "
            f"{widest['logit_gap']:.2g}: above {tie_gap(widest['logit'], dtype):g} it is no tie of {dtype} logits of "
            f"that size, and the decoded text is not the target's"
        )
        raise click.exceptions.Exit(3)


def _require_possible(answers: str | None, temperature: float, draft_sample_method: "DraftSampleMethod") -> None:
    if draft_sample_method == "probabilistic" and not temperature:
        problem = "--draft-sample-method probabilistic: at temperature 0 nothing is drawn"
        raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint="--temperature 0.8")
    if answers is not None and not (folder := Path(answers).parent).is_dir():
        problem = f"--answers {answers}: there is no folder {folder}"
        raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint=shlex.join(["mkdir", "-p", str(folder)]))


def _write_answers(path: str | None, result: "DecodeResult", source: "Iterable[Prompt]", live: "LiveTarget") -> None:
    """Where a ``path`` is given: a line per decoded prompt. Of an answer that was cut it says so, which keeps
    ``prepare`` from teaching its end."""
    if path is None:
        return
    from hiddenstore.fs.publish import replace_file

    prompts, stops, lines = list(source), live.stop_ids, []
    for index, prompt, answer in zip(result.indices, result.prompts, result.by_shape[-1].answers, strict=True):
        text = live.tokenizer.decode(answer, skip_special_tokens=True)
        messages = prompts[index].messages
        row: dict[str, Any] = {"prompt_ids": prompt, "answer_ids": answer, "answer": text}
        if messages is not None:
            end = {} if answer[-1] in stops else {"finish_reason": "length"}
            row["messages"] = [*messages, {"role": "assistant", "content": text, **end}]
            row |= prompts[index].beside.columns()
        lines.append(json.dumps(row, ensure_ascii=False))
    replace_file(Path(path), ("\n".join(lines) + "\n").encode())
