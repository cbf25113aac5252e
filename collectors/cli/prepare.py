"""``hiddenstore prepare``: conversations → tokens, loss mask and turn spans, or prompts to have answered."""

import re
from typing import Any

import click

from collectors.cli.options import own_code_option, revision_option
from hiddenstore.cli.output import common_options, examples, output


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


TRAIN_ONLY = (
    *("target", "revision", "trust_remote_code", "template"),
    *("loss_on", "think_loss", "max_tokens", "overlong", "validation", "workers"),
)


@click.command(
    epilog=examples(
        "hiddenstore prepare chats.jsonl -o data --target Qwen/Qwen3-8B --max-tokens 4096",
        "hiddenstore prepare preset:ultrachat preset:gsm8k -o data --target ./llama --overlong drop --val 2%",
        "hiddenstore prepare 'HuggingFaceH4/ultrachat_200k:train_sft[:1000]' -o data --target T --loss-on last-turn",
        "hiddenstore prepare --mix mix.yaml --mode generate --augment default -o prompts.jsonl",
    )
)
@click.argument("inputs", metavar="[INPUT…]", nargs=-1)
@click.option("-o", "--out", type=click.Path(), metavar="DATA", help="Folder (generate: JSONL file) to write; new.")
@click.option("--target", metavar="T", help="Target folder or hub id: its tokenizer and chat template.")
@revision_option
@own_code_option
@click.option("--mix", type=click.Path(), metavar="FILE", help="YAML of sources with caps or weights, for INPUT.")
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
    "--val", "validation", type=Share(), default="1%", show_default=True, help="Share held out, by sample id."
)
@click.option("--workers", type=click.IntRange(min=1), metavar="W", help="Processes; default: all cores when worth it.")
@click.option("--preset-root", type=click.Path(), metavar="DIR", help="Local copies of presets: DIR/OWNER/NAME.")
@click.option("--list-presets", is_flag=True, help="Show the presets and stop.")
@common_options
@click.pass_context
def prepare(ctx: click.Context, inputs: tuple[str, ...], list_presets: bool, mode: str, **asked: Any) -> None:
    """Turn conversations into tokens with a loss mask (DATA) that collect takes.

    INPUT is a JSONL, JSON or parquet file of OpenAI messages or ShareGPT conversations, a folder of them, a preset by
    name (preset:ultrachat, preset:NAME:SPLIT[slice]) or a datasets id written name[config]:split[slice]. The mask comes
    from the {% generation %} tags of the chat template; where it has none, from comparing rendered prefixes.
    """
    if list_presets:
        _show_presets()
        return
    chosen = _mixed_inputs(inputs, asked.pop("mix"))
    out = asked.pop("out")
    if out is None:
        raise click.UsageError("Missing option '-o' / '--out'.")
    if mode == "generate":
        given = [
            name for name in TRAIN_ONLY if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        ]
        if given:
            raise click.UsageError(f"--mode generate writes no tokens: it takes no {_flag(given[0])}")
        _generate(chosen, out, asked["augment"], asked["preset_root"])
        return
    if asked.pop("augment") is not None:
        raise click.UsageError("--augment needs --mode generate: changed prompts have no answers to learn from")
    if asked["target"] is None:
        raise click.UsageError("Missing option '--target'.")
    _train(chosen, out, asked.pop("target"), asked)


def _mixed_inputs(inputs: tuple[str, ...], mix: str | None) -> Any:
    if mix is None:
        if not inputs:
            raise click.UsageError("Missing argument 'INPUT…' (or --mix FILE).")
        return list(inputs)
    if inputs:
        raise click.UsageError("--mix names its own sources; leave INPUT out, or name it in the mix")
    from collectors.mix import read_mix

    return read_mix(mix)


def _flag(name: str) -> str:
    return {"validation": "--val"}.get(name, f"--{name.replace('_', '-')}")


def _train(chosen: Any, out: str, target: str, asked: dict[str, Any]) -> None:
    import time

    from collectors.prepare import PrepareOptions
    from collectors.prepare import prepare as run
    from hiddenstore.cli.terminal import plural
    from hiddenstore.rank import drain_on_signal

    started_s = time.monotonic()
    with drain_on_signal() as drain:
        document = run(chosen, out, target, PrepareOptions(**asked), stopping=lambda: drain.requested)
    elapsed_s = time.monotonic() - started_s
    answer = {**document.model_dump(mode="json"), "path": out, "elapsed_s": round(elapsed_s, 3)}
    output().data(answer, human=lambda: _show(answer))
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
    pinned = ("--revision", asked["revision"]) if asked["revision"] else ()
    own_code = ("--trust-remote-code",) if asked["trust_remote_code"] else ()
    where = f"{out.rstrip('/')}-store"
    output().hint("hiddenstore", "collect", out, "-o", where, "--target", target, *pinned, *own_code)


def _show(answer: dict[str, Any]) -> None:
    from hiddenstore.cli.terminal import percent, size

    rows, samples, tokens = answer["rows_read"], answer["samples"], answer["tokens"]
    held_out, longest, supervised = answer["validation_samples"], answer["longest"], answer["supervised_tokens"]
    limit = f"{answer['max_tokens']:,}" if answer["max_tokens"] is not None else "none"
    masks = {"generation-tags": "generation tags", "prefixes": "rendered prefixes", "all": "every token"}
    thoughts = "" if answer["think_loss"] else ", without thoughts"
    stored = sum(file["size"] for file in answer["files"])
    output().pairs(
        [
            ("rows read", f"{rows:,}  ({rows / max(answer['elapsed_s'], 1e-3):,.0f} rows/s)"),
            ("samples", f"{samples:,}  (train {samples - held_out:,}, validation {held_out:,})"),
            ("tokens", f"{tokens:,}  (mean {tokens / samples:,.0f}, longest {longest:,}, limit {limit})"),
            (
                "supervised",
                f"{percent(supervised / tokens)}  ({answer['loss_on']}{thoughts}, mask from "
                f"{masks[answer['mask_from']]})",
            ),
            ("cut", f"{answer['cut']:,}"),
            ("duplicates", f"{answer['duplicates']:,} dropped"),
            ("rejected", f"{sum(reject['rows'] for reject in answer['rejects']):,}"),
            ("written", f"{answer['path']}  ({size(stored)})"),
        ]
    )
    if len(answer["sources"]) > 1 or answer["mix_seed"] is not None:
        _show_sources(answer["sources"], "samples", "tokens")
    if answer["rejects"]:
        from collectors.rows import NO_ANSWER
        from hiddenstore.cli.table import Column

        found = [(reject["reason"], f"{reject['rows']:,}", reject["examples"][0]) for reject in answer["rejects"]]
        output().table(["rejected because", ">rows", Column("first", wide=True)], found)
        output().note(f"all rejected rows: {answer['path'].rstrip('/')}/rejects.jsonl")
        if any(reject["reason"] == NO_ANSWER for reject in answer["rejects"]):
            output().note("rows without an answer: hiddenstore regenerate has the target write them")


def _show_sources(sources: list[dict[str, Any]], *counts: str) -> None:
    from hiddenstore.cli.table import Column

    names = ("rows", *counts)
    rows = [
        (
            source["source"],
            f"{source['available']:,}" if source["available"] is not None else "",
            *(f"{source[name]:,}" for name in names),
        )
        for source in sources
    ]
    output().table([Column("source", wide=True), ">of", *(f">{name}" for name in names)], rows)


def _generate(chosen: Any, out: str, augment: str | None, preset_root: str | None) -> None:
    from collectors.augment import read_augmentation
    from collectors.skeletons import write_skeletons
    from hiddenstore.rank import drain_on_signal

    augmentation = None if augment is None else read_augmentation(augment)
    with drain_on_signal() as drain:
        report = write_skeletons(chosen, out, augmentation, preset_root, lambda: drain.requested)
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
    output().hint("hiddenstore", "regenerate", out, "-o", "answers.jsonl", "--server", "URL")


def _show_prompts(answer: dict[str, Any]) -> None:
    from hiddenstore.cli.table import Column

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
    if answer["rejects"]:
        found = [(reject["reason"], f"{reject['rows']:,}", reject["first"]) for reject in answer["rejects"]]
        output().table(["rejected because", ">rows", Column("first", wide=True)], found)


def _show_presets() -> None:
    from collectors.presets.table import preset_rows
    from hiddenstore.cli.table import Column

    presets = preset_rows()

    def human() -> None:
        rows = [
            (
                row["name"],
                row["about"] + ("" if row["answers"] else " (questions only)"),
                row["parts"][0] + (f" and {len(row['parts']) - 1} more" if len(row["parts"]) > 1 else ""),
            )
            for row in presets
        ]
        output().table(["preset", "what", Column("from", wide=True)], rows)

    output().data({"presets": presets}, human=human)
    output().hint("hiddenstore", "prepare", f"preset:{presets[0]['name']}", "-o", "data", "--target", "T")
