"""``hiddenstore prepare``: conversations → tokens, loss mask and turn spans."""

import re
from typing import Any

import click

from hiddenstore.cli.output import common_options, examples, output


class Share(click.ParamType):
    """``1%`` or ``0.01``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", str(value))
        share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
        if not 0 <= share < 1:
            self.fail(f"{value!r} is not a share such as 1% or 0.01, below 100%", param, ctx)
        return share


@click.command(
    epilog=examples(
        "hiddenstore prepare chats.jsonl -o data --target Qwen/Qwen3-8B --max-tokens 4096",
        "hiddenstore prepare sharegpt/ more.parquet -o data --target ./llama --overlong drop --val 2%",
        "hiddenstore prepare 'HuggingFaceH4/ultrachat_200k:train_sft[:1000]' -o data --target T --loss-on last-turn",
    )
)
@click.argument("inputs", metavar="INPUT…", nargs=-1, required=True)
@click.option("-o", "--out", required=True, type=click.Path(), metavar="DATA", help="Folder to write; must be new.")
@click.option("--target", required=True, metavar="T", help="Target folder or hub id: its tokenizer and chat template.")
@click.option("--template", type=click.Path(), metavar="FILE", help="Chat template in place of the target's own.")
@click.option(
    "--loss-on",
    type=click.Choice(["assistant", "last-turn", "all"]),
    default="assistant",
    show_default=True,
    help="Tokens to learn from: every answer, the last one, or all tokens.",
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
@common_options
def prepare(
    inputs: tuple[str, ...],
    out: str,
    target: str,
    **chosen: Any,
) -> None:
    """Turn conversations into tokens, loss mask and turn spans.

    INPUT is a file (.jsonl, .json or .parquet; .gz too), a folder of them, or a `datasets` id written
    name[config]:split[slice]. Rows hold OpenAI `messages` or ShareGPT `conversations`. Every row that cannot be used is
    listed with its reason in DATA/rejects.jsonl; exact duplicates are dropped and counted.

    The loss mask comes from the {% generation %} tags of the chat template; where it has none, from comparing rendered
    prefixes.
    """
    import time

    from collectors.prepare import PrepareOptions
    from collectors.prepare import prepare as run
    from hiddenstore.cli.terminal import plural
    from hiddenstore.rank import drain_on_signal

    started_s = time.monotonic()
    with drain_on_signal() as drain:
        document = run(list(inputs), out, target, PrepareOptions(**chosen), stopping=lambda: drain.requested)
    elapsed_s = time.monotonic() - started_s
    answer = {**document.model_dump(mode="json"), "path": out, "elapsed_s": round(elapsed_s, 3)}
    output().data(answer, human=lambda: _show(answer))
    if document.validation_share > 0 and not document.validation_samples:
        output().warn(
            f"none of the {plural(document.samples, 'sample')} fell into the validation split of "
            f"{document.validation_share:.3g}; a larger --val gives it some"
        )
    output().hint("hiddenstore", "collect", out, "-o", f"{out.rstrip('/')}-store", "--target", target)


def _show(answer: dict[str, Any]) -> None:
    from hiddenstore.cli.terminal import percent, size

    rows, samples, tokens = answer["rows_read"], answer["samples"], answer["tokens"]
    held_out, longest, supervised = answer["validation_samples"], answer["longest"], answer["supervised_tokens"]
    limit = f"{answer['max_tokens']:,}" if answer["max_tokens"] is not None else "none"
    masks = {"generation-tags": "generation tags", "prefixes": "rendered prefixes", "all": "every token"}
    stored = sum(file["size"] for file in answer["files"])
    output().pairs(
        [
            ("rows read", f"{rows:,}  ({rows / max(answer['elapsed_s'], 1e-3):,.0f} rows/s)"),
            ("samples", f"{samples:,}  (train {samples - held_out:,}, validation {held_out:,})"),
            ("tokens", f"{tokens:,}  (mean {tokens / samples:,.0f}, longest {longest:,}, limit {limit})"),
            (
                "supervised",
                f"{percent(supervised / tokens)}  ({answer['loss_on']}, mask from {masks[answer['mask_from']]})",
            ),
            ("cut", f"{answer['cut']:,}"),
            ("duplicates", f"{answer['duplicates']:,} dropped"),
            ("rejected", f"{sum(reject['rows'] for reject in answer['rejects']):,}"),
            ("written", f"{answer['path']}  ({size(stored)})"),
        ]
    )
    if answer["rejects"]:
        from hiddenstore.cli.table import Column

        found = [(reject["reason"], f"{reject['rows']:,}", reject["examples"][0]) for reject in answer["rejects"]]
        output().table(["rejected because", ">rows", Column("first", wide=True)], found)
        output().note(f"all rejected rows: {answer['path'].rstrip('/')}/rejects.jsonl")
