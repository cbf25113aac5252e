"""``hiddenstore prepare``: conversations → tokens, loss mask and turn spans, or prompts to have answered."""

import os
import re
from collections.abc import Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.words import OUT, opening_words, remote_code_option, revision_option
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.text import Column, percent, plural, size
from hiddenstore.process import drain_on_signal

if TYPE_CHECKING:
    from collectors.conversations.mix import Mix
    from schemas.prepared import PreparedData


class Share(click.ParamType):
    """``1%`` or ``0.01``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", str(value))
        share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
        if not 0 <= share <= 1:
            self.fail(f"{value!r} is not a share such as 1% or 0.01, at most 100%", param, ctx)
        return share


# Each is the member of ``PrepareOptions`` of its name.
TOKEN_OPTIONS = (
    *("loss_on", "think_loss", "max_tokens", "overlong", "validation", "template", "workers"),
    *("revision", "trust_remote_code"),
)


@click.command(
    epilog=examples(
        "hiddenstore prepare chats.jsonl -o data --target Qwen/Qwen3-8B --max-tokens 4096",
        "hiddenstore prepare dataset:ultrachat dataset:gsm8k -o data --target ./llama --overlong drop --val 2%",
        "hiddenstore prepare 'HuggingFaceH4/ultrachat_200k:train_sft[:1000]' -o data --target T --loss-on last-turn",
        "hiddenstore prepare --mix mix.yaml --mode generate --augment default -o prompts.jsonl",
    )
)
@click.argument("inputs", metavar="[INPUT…]", nargs=-1)
@click.option("-o", "--out", type=OUT, metavar="DATA", help="Folder (generate: JSONL file) to write; new.")
@click.option("--target", metavar="T", help="Target folder, GGUF file or hub id: its tokenizer and chat template.")
@revision_option
@remote_code_option
@click.option(
    "--mix",
    type=click.Path(),
    metavar="FILE",
    help="YAML of sources with caps or weights, for INPUT; or nemotron-v2, nemotron-v3, which are shipped.",
)
@click.option(
    "--mode",
    type=click.Choice(["train", "generate"]),
    default="train",
    show_default=True,
    help="train: tokens to learn from. generate: prompts without their answers, for regenerate.",
)
@click.option("--augment", metavar="FILE", help="Variants of prompts from YAML, or 'default' (with --mode generate).")
@click.option("--template", type=click.Path(), metavar="FILE", help="Chat template in place of the target's own.")
@click.option(
    "--loss-on",
    type=click.Choice(["assistant", "last-turn", "all"]),
    default="assistant",
    show_default=True,
    help="Tokens to learn from: every answer, the last one, or all tokens.",
)
@click.option(
    "--think-loss/--no-think-loss", default=True, show_default=True, help="Learn the thoughts of answers too."
)
@click.option(
    "--max-tokens", type=click.IntRange(min=2), metavar="N", help="Longest sample; default: target's context."
)
@click.option(
    "--overlong",
    type=click.Choice(["cut", "drop"]),
    default="cut",
    show_default=True,
    help="What becomes of longer conversations; both are counted.",
)
@click.option(
    "--val",
    "validation",
    type=Share(),
    show_default="1%, or 10% of a few",
    help="Share held out, by sample id.",
)
@click.option("--workers", type=click.IntRange(min=1), metavar="W", help="Processes; default: all cores when worth it.")
@click.option(
    "--dataset-root", "dataset_root", type=click.Path(), metavar="DIR", help="Local copies of datasets: DIR/OWNER/NAME."
)
@click.option("--list-datasets", is_flag=True, help="Show the datasets by name and stop.")
@common_options
@click.pass_context
def prepare(
    ctx: click.Context,
    inputs: tuple[str, ...],
    out: str | None,
    target: str | None,
    mix: str | None,
    mode: str,
    augment: str | None,
    dataset_root: str | None,
    list_datasets: bool,
    **options: Any,
) -> None:
    """Turn conversations into tokens with a loss mask (DATA) that collect takes.

    INPUT is a JSONL, JSON or parquet file of OpenAI messages, ShareGPT conversations, prompts and completions or
    Alpaca's instructions, some of its rows (FILE:train[:1000]), a folder of them, a dataset by name (dataset:ultrachat,
    dataset:NAME:SPLIT[slice]) or a datasets id written name[config]:split[slice]. The mask comes
    from the {% generation %} tags of the chat template; where it has none, from comparing rendered prefixes.
    """
    if list_datasets:
        _show_datasets()
        return
    sources = _sources(inputs, mix)
    if out is None:
        raise click.UsageError("Missing option '-o' / '--out'.")
    if mode == "generate":
        for name in ("target", *TOKEN_OPTIONS):
            if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
                flag = "--val" if name == "validation" else f"--{name.replace('_', '-')}"
                raise click.UsageError(f"--mode generate writes no tokens: it takes no {flag}")
        _generate(sources, out, augment, dataset_root)
        return
    if augment is not None:
        raise click.UsageError("--augment needs --mode generate: changed prompts have no answers to learn from")
    if target is None:
        raise click.UsageError("Missing option '--target'.")
    _train(sources, out, target, dataset_root, options)


def _sources(inputs: tuple[str, ...], mix: str | None) -> "Sequence[str] | Mix":
    if mix is None:
        if not inputs:
            raise click.UsageError("Missing argument 'INPUT…' (or --mix FILE).")
        return inputs
    if inputs:
        raise click.UsageError("--mix names its own sources; leave INPUT out, or name it in the mix")
    from collectors.conversations.mix import read_mix

    return read_mix(mix)


def _train(
    sources: "Sequence[str] | Mix", out: str, target: str, dataset_root: str | None, options: dict[str, Any]
) -> None:
    import time

    from collectors.tokenize.prepare import PrepareOptions
    from collectors.tokenize.prepare import prepare as run

    started_s = time.monotonic()
    with drain_on_signal() as drain:
        settings = PrepareOptions(dataset_root=dataset_root, **options)
        document = run(sources, out, target, settings, stopping=lambda: drain.requested)
    elapsed_s = time.monotonic() - started_s
    answer = {**document.model_dump(mode="json"), "path": out, "elapsed_s": round(elapsed_s, 3)}
    output().data(answer, human=lambda: _show_data(answer))
    _say_losses(document)
    opened = opening_words(target, options["template"], settings.revision, settings.trust_remote_code)
    output().hint("hiddenstore", "collect", out, "-o", f"{out.rstrip('/')}-store", *opened)


def _say_losses(document: "PreparedData") -> None:
    """What the chat template or the split did to the rows that a person may not expect."""
    from collectors.tokenize.template import NOT_STABLE, TOOL_CALLS_LOST

    if document.template_date is not None:
        output().note(
            f"this chat template asks for the date: every sample says {document.template_date}, or the same rows would "
            "be other samples tomorrow"
        )
    if document.validation_share > 0 and not document.validation_samples:
        output().warn(
            f"none of the {plural(document.samples, 'sample')} fell into the validation split of "
            f"{document.validation_share:.3g}; a larger --val gives it some"
        )
    if document.reasoning_lost:
        output().warn(
            f"{plural(document.reasoning_lost, 'sample')} lost the reasoning of the last answer: this chat template "
            "writes none; --template FILE names one that does"
        )
    if document.words_lost:
        output().warn(
            f"{plural(document.words_lost, 'sample')} lost words of an answer: this chat template leaves them out, "
            "beside a tool call perhaps; --template FILE names one that writes them"
        )
    if document.ends_unlearned:
        output().warn(
            f"the last answer of {plural(document.ends_unlearned, 'sample')} has no end to learn: this chat template "
            "writes none, or leaves it out of its {% generation %} tags; --template FILE names one that does"
        )
    refused = {reject.reason: reject.rows for reject in document.rejects}
    if unstable := refused.get(NOT_STABLE, 0):
        last = "--loss-on last-turn asks that of the last answer alone; " if document.loss_on == "assistant" else ""
        output().warn(
            f"{plural(unstable, 'row')} {'was' if unstable == 1 else 'were'} left out: this chat template does not "
            f"write their answers as it prompts for them, or not once others follow; {last}--template FILE names one "
            "with {% generation %} tags"
        )
    if calls := refused.get(TOOL_CALLS_LOST, 0):
        output().warn(
            f"{plural(calls, 'row')} called tools and {'was' if calls == 1 else 'were'} left out: this chat template "
            "writes no calls; --template FILE names one that does"
        )


def _show_data(answer: dict[str, Any]) -> None:
    from hiddenstore.conversation import NO_ANSWER

    rows, samples, tokens = answer["rows_read"], answer["samples"], answer["tokens"]
    rate = rows / max(answer["elapsed_s"], 1e-3)
    validation, longest, supervised = answer["validation_samples"], answer["longest"], answer["supervised_tokens"]
    limit = f"{answer['max_tokens']:,}" if answer["max_tokens"] is not None else "none"
    masks = {"generation-tags": "generation tags", "prefixes": "rendered prefixes", "all": "every token"}
    learned = f"{answer['loss_on']}{'' if answer['think_loss'] else ', without thoughts'}"
    stored = sum(file["size"] for file in (*answer["files"], *answer.get("images", {}).get("files", ())))
    output().pairs(
        [
            ("rows read", f"{rows:,}" + (f"  ({rate:,.0f} rows/s)" if rate >= 1 else "")),
            ("samples", f"{samples:,}  (train {samples - validation:,}, validation {validation:,})"),
            ("tokens", f"{tokens:,}  (mean {tokens / samples:,.0f}, longest {longest:,}, limit {limit})"),
            ("supervised", f"{percent(supervised / tokens)}  ({learned}, mask from {masks[answer['mask_from']]})"),
            *([("images", f"in {plural(answer['images']['samples'], 'sample')}")] if answer.get("images") else []),
            ("cut", f"{answer['cut']:,}"),
            ("duplicates", f"{answer['duplicates']:,} dropped"),
            ("rejected", f"{sum(reject['rows'] for reject in answer['rejects']):,}"),
            ("written", f"{answer['path']}  ({size(stored)})"),
        ]
    )
    if len(answer["sources"]) > 1 or answer["mix_seed"] is not None:
        _show_sources(answer["sources"], "samples", "tokens")
    _show_rejects([(reject["reason"], reject["rows"], reject["examples"][0]) for reject in answer["rejects"]])
    if answer["rejects"]:
        output().note(f"all rejected rows: {answer['path'].rstrip('/')}/rejects.jsonl")
    if any(reject["reason"] == NO_ANSWER for reject in answer["rejects"]):
        output().note("rows without an answer: hiddenstore regenerate has the target write them")


def _generate(sources: "Sequence[str] | Mix", out: str, augment: str | None, dataset_root: str | None) -> None:
    from collectors.conversations.prompts import read_augmentation, write_prompts

    augmentation = None if augment is None else read_augmentation(augment)
    with drain_on_signal() as drain:
        report = write_prompts(sources, out, augmentation, dataset_root, lambda: drain.requested)
    answer = {
        "path": report.out,
        "rows_read": report.read,
        "prompts": report.written,
        "duplicates": report.duplicates,
        "variants": dict(report.variants),
        "sources": report.sources,
        "mix": report.mix,
        "rejects": [
            {"reason": reason, "rows": count, "first": first} for reason, (count, first) in report.rejects.items()
        ],
    }
    output().data(answer, human=lambda: _show_prompts(answer))
    names = chain(["answers.jsonl"], (f"answers-{number}.jsonl" for number in count(2)))
    free = next(name for name in names if not os.path.lexists(name))
    output().hint("hiddenstore", "regenerate", out, "-o", free, "--server", "URL")


def _show_prompts(answer: dict[str, Any]) -> None:
    variants = ", ".join(f"{name} {count:,}" for name, count in answer["variants"].items())
    output().pairs(
        [
            ("rows read", f"{answer['rows_read']:,}"),
            ("prompts", f"{answer['prompts']:,}  ({variants})"),
            ("duplicates", f"{answer['duplicates']:,} dropped"),
            ("rejected", f"{sum(reject['rows'] for reject in answer['rejects']):,}"),
            ("written", answer["path"]),
            *([("mix", answer["mix"])] if answer["mix"] else []),
        ]
    )
    if len(answer["sources"]) > 1 or answer["mix"]:
        _show_sources(answer["sources"], "prompts")
    _show_rejects([(reject["reason"], reject["rows"], reject["first"]) for reject in answer["rejects"]])


def _show_sources(sources: list[dict[str, Any]], *counts: str) -> None:
    names = ("available", "rows", *counts)
    rows = [
        (source["source"], *(f"{source[name]:,}" if source[name] is not None else "" for name in names))
        for source in sources
    ]
    output().table([Column("source", wide=True), ">of", *(f">{name}" for name in names[1:])], rows)


def _show_rejects(rejects: list[tuple[str, int, str]]) -> None:
    from hiddenstore.conversation import way_to_keep

    if rejects:
        rows = [(reason, f"{count:,}", first) for reason, count, first in rejects]
        output().table(["rejected because", ">rows", Column("first", wide=True)], rows)
    if way := way_to_keep(reason for reason, _, _ in rejects):
        output().note(f"to keep rows {way}")


def _show_datasets() -> None:
    from collectors.conversations.datasets import dataset_rows

    rows = dataset_rows()

    def human() -> None:
        table = [
            (
                row["name"],
                row["about"] + ("" if row["answers"] else " (questions only)"),
                row["parts"][0] + (f" and {len(row['parts']) - 1} more" if len(row["parts"]) > 1 else ""),
            )
            for row in rows
        ]
        output().table(["dataset", "what", Column("from", wide=True)], table)

    output().data({"datasets": rows}, human=human)
    output().hint("hiddenstore", "prepare", f"dataset:{rows[0]['name']}", "-o", "data", "--target", "T")
