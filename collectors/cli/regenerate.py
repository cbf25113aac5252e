"""``hiddenstore regenerate``."""

from typing import Any

import click

from hiddenstore.cli.output import common_options, examples, output


@click.command(
    epilog=examples(
        "hiddenstore regenerate chats.jsonl -o answers.jsonl --target ./target",
        "hiddenstore regenerate chats.jsonl -o greedy.jsonl --target ./target --temperature 0 --max-samples 100",
    )
)
@click.argument("inputs", nargs=-1, required=True)
@click.option("-o", "--out", required=True, type=click.Path(), help="The JSONL file to write.")
@click.option("--target", required=True, help="A local folder or a hub id.")
@click.option("--revision", help="Commit, tag or branch of a hub id.")
@click.option("--template", type=click.Path(), help="A chat template file instead of the target's own.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0 is greedy.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Per answer.")
@click.option("--max-samples", type=click.IntRange(min=1), help="Only the first N conversations.")
@click.option("--batch-size", type=click.IntRange(min=1), default=128, show_default=True, help="Answers at a time.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes (tiny targets).")
@click.option("--seed", default=0, show_default=True, help="Equal seeds give equal answers.")
@click.option("--dtype", help="bf16, fp16 or fp32; default: the checkpoint's own.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1 …")
@common_options
def regenerate(**asked: Any) -> None:
    """Let the target write the answers of conversations itself, turn by turn.

    A drafter has to predict the target, not the people or models who wrote the data. Answers with more than 30 %
    repeated 4-grams are dropped with their conversation, and the share is shown.
    """
    from collectors.regenerate import RegenerateOptions
    from collectors.regenerate import regenerate as run
    from hiddenstore.cli.terminal import percent

    out = output()
    report = run(RegenerateOptions(**asked), out.note)
    document = {
        "out": report.out,
        "read": report.read,
        "written": report.written,
        "answers": report.answers,
        "tokens": report.tokens,
        "cut": report.cut,
        "dropped": dict(report.dropped),
        "looping_share": report.looping_share,
        "seconds": round(report.seconds, 3),
        "tokens_per_s": round(report.tokens_per_s, 1),
    }
    lines = [
        ("written", f"{report.written:,} of {report.read:,} conversations to {report.out}"),
        ("tokens", f"{report.tokens:,} at {report.tokens_per_s:,.0f} tokens/s"),
        ("looping", f"{report.dropped['looping']:,} answers dropped ({percent(report.looping_share)})"),
        ("cut", f"{report.cut:,} answers reached --max-new-tokens"),
    ]
    out.data(document, human=lambda: out.pairs(lines))
    out.hint("hiddenstore", "prepare", report.out, "-o", "DATA", "--target", asked["target"])
