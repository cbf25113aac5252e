"""``hiddenstore regenerate``."""

import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.words import OUT, FiniteRange, opening_words
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.text import Column, percent, plural
from hiddenstore.fs import require_local
from hiddenstore.fs.publish import make_folder
from hiddenstore.process import drain_on_signal
from hiddenstore.servers import ServerProcess, VllmPython, engine_flags, running
from hiddenstore.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from collectors.regenerate.options import RegenerateOptions


class Shard(click.ParamType):
    """``2/4``: the second of four."""

    name = "i/n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", str(value))
        if not match or int(match[1]) > int(match[2]):
            self.fail(f"{value!r} is not a shard such as 1/4 … 4/4", param, ctx)
        return int(match[1]), int(match[2])


@click.command(
    epilog=examples(
        "hiddenstore regenerate chats.jsonl -o answers.jsonl --server http://localhost:8000 --temperature 0.8",
        "hiddenstore regenerate prompts.jsonl -o answers.jsonl --server https://host/v1 --model M --api-key-env KEY",
        "hiddenstore regenerate dataset:ultrachat -o answers.jsonl --server http://node2:8000 --shard 2/4",
        "hiddenstore regenerate chats.jsonl -o parts --server URL --set turns=last --set rows_per_file=1000",
        "hiddenstore regenerate self:2000 -o answers.jsonl --target ./target    # questions of its own",
        "hiddenstore regenerate chats.jsonl -o answers.jsonl --target ./target --engine-python ENV/bin/python",
        "hiddenstore regenerate chats.jsonl -o greedy.jsonl --target ./target --temperature 0 --max-samples 100",
    )
)
@click.argument("inputs", nargs=-1, required=True)
@click.option("-o", "--out", required=True, type=OUT, help="The JSONL or .parquet file to write.")
@click.option("--target", help="A local folder, a GGUF file or a hub id: it answers in this process.")
@click.option("--server", metavar="URL", help="An OpenAI-compatible server that answers, such as vLLM.")
@click.option("--engine-python", metavar="PY", help="A Python with vLLM: it serves --target here while this runs.")
@click.option("--engine-arg", "engine_args", multiple=True, metavar="KEY=VALUE", help="A flag of that server's.")
@click.option("--model", metavar="M", help="The model to ask the server for; default: the only one it serves.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the server's key.")
@click.option("--concurrency", type=click.IntRange(min=1), default=32, show_default=True, help="Requests at a time.")
@click.option("--shard", type=Shard(), default="1/1", help="Only every n-th conversation, for a server per node.")
@click.option("--system", metavar="TEXT", help="System message for conversations without one.")
@click.option("--template", type=click.Path(), help="A chat template file instead of the target's own.")
@click.option("--temperature", type=FiniteRange(min=0), default=0.8, show_default=True, help="0 is greedy.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Per answer; default: 256, and 2048 of a server.")
@click.option("--max-samples", type=click.IntRange(min=1), help="Only the first N conversations.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes (tiny targets).")
@click.option("--seed", type=int, help="Equal seeds give equal answers; default: 0, and none sent to a server.")
@click.option("--take", metavar="FILE", type=click.Path(), help="Only write what was answered so far to FILE.")
@click.option(
    "--set",
    "more",
    multiple=True,
    metavar="KEY=VALUE",
    help="turns=last, raw, rows_per_file; top_p, batch_size, dtype, device, revision, adapter, trust_remote_code; "
    "retries, timeout_s, max_failures, max_failure_share, extra.NAME.",
)
@common_options
@click.pass_context
def regenerate(
    ctx: click.Context,
    more: tuple[str, ...],
    take: str | None,
    engine_python: str | None,
    engine_args: tuple[str, ...],
    **options: Any,
) -> None:
    """Let the target write the answers of conversations itself, turn by turn.

    A drafter has to predict the target, not the people or models who wrote the data. Conversations without answers get
    one after every user turn; the input self:N is N questions that the target asks itself. Answers with more than 30 %
    repeated 4-grams are dropped with their conversation, and the share is shown. Answers are kept as they come: after a
    kill the same command goes on, and with --take it makes a file of what there is, while it runs or after a stop.
    """
    from collectors.regenerate.job import regenerate as run
    from collectors.regenerate.job import take_answered
    from collectors.regenerate.options import MoreSettings, RegenerateOptions

    own_questions = _own_questions(options)
    _refuse_misfits(ctx, options, engine_python is not None)
    if engine_args and engine_python is None:
        raise click.UsageError("--engine-arg is a flag of the server that '--engine-python PY' starts.")
    settings = load(MoreSettings, dotlist=more).model_dump()
    out = output()
    request = RegenerateOptions(**options, **settings, engine_args=engine_args)
    if engine_python is not None:
        _refuse_before_start(request)
    with drain_on_signal() as drain:
        if own_questions is not None:
            request = _with_questions(request, own_questions, take is not None, lambda: drain.requested)
        if take is not None:
            if engine_python is not None:
                request = replace(request, target=None, server="", serves=request.target)
            report = take_answered(request, Path(take))
        else:
            with _served(request, engine_python, lambda: drain.requested) as served:
                report = run(served, lambda: drain.requested)
    names = ("out", "read", "written", "answers", "tokens", "cut", "short", "resumed")
    document = {name: getattr(report, name) for name in names} | {
        "dropped": dict(report.dropped),
        "examples": report.examples,
        "waiting_for_shards": report.waiting,
        "written_by_another_shard": report.written_by_another,
        "looping_share": report.looping_share,
        "seconds": round(report.seconds, 3),
        "tokens_per_s": round(report.tokens_per_s, 1),
    }
    out.data(document, human=lambda: _show(document, options["shard"]))
    if report.waiting:
        shard = f"{report.waiting[0]}/{options['shard'][1]}"
        out.hint("hiddenstore", "regenerate", *options["inputs"], "-o", report.out, "--shard", shard, "…")
    else:
        target = options["target"] or "T"
        opened = opening_words(target, request.template, request.revision, request.trust_remote_code)
        out.hint("hiddenstore", "prepare", report.out, "-o", "DATA", *opened)


def _own_questions(options: dict[str, Any]) -> int | None:
    """N where the input is ``self:N``."""
    counts = [text.removeprefix("self:") for text in options["inputs"] if text.startswith("self:")]
    if not counts:
        return None
    if not re.fullmatch(r"[1-9]\d*", counts[0]):
        raise click.UsageError(f"self:{counts[0]}: how many questions? A number from 1 on, as in self:2000.")
    if len(options["inputs"]) > 1 or options["target"] is None:
        raise click.UsageError("self:N is the only input, and asks the target in this process: give '--target T'.")
    return int(counts[0])


def _with_questions(
    request: "RegenerateOptions", count: int, is_there: bool, stopping: "Callable[[], bool]"
) -> "RegenerateOptions":
    """The request with the target's own questions as its input; ``is_there``: nothing is asked any more."""
    from collectors.regenerate.invent import invent, questions_file

    path = questions_file(request.out)
    # Of more questions than these, asked for by an earlier call, the first ones count.
    most = count if request.max_samples is None else min(count, request.max_samples)
    named = replace(request, inputs=(str(path),), max_samples=most)
    if is_there:
        return named
    dropped = invent(request, count, stopping)
    left_out = ", ".join(f"{number} {reason}" for reason, number in sorted(dropped.items()))
    output().note(f"{count:,} questions of the target's own in {path}" + (f"; left out: {left_out}" if dropped else ""))
    return named


@contextmanager
def _served(
    request: "RegenerateOptions", engine_python: str | None, stopping: "Callable[[], bool]"
) -> "Iterator[RegenerateOptions]":
    """The request to a server of its target, up until the block ends; as it is where no Python is named."""
    if engine_python is None:
        yield request
        return
    from collectors.regenerate.job import refuse_existing
    from hiddenstore.targets.folder import trusts_pinned_code
    from hiddenstore.targets.gguf import target_folder

    # A server takes half a minute to start: what can be refused before is.
    out = require_local(request.out, "a file of answers")
    refuse_existing(out, request.rows_per_file)
    python, log = VllmPython(engine_python), Path(f"{out}.server.log")
    revision = ("--revision", request.revision) if request.revision else ()
    trust = ("--trust-remote-code",) if request.trust_remote_code else ()
    flags = (*engine_flags(request.engine_args), *revision, *trust)
    trusts_pinned_code(str(request.target), flags)
    python.require()
    command = python.command(target_folder(str(request.target)), flags)
    make_folder(out.parent)
    output().note(f"starting vLLM; it writes {log}")
    with running([ServerProcess(command, python.environment(), log)], stopping) as (url,):
        yield replace(request, target=None, server=url, serves=request.target)


def _refuse_misfits(ctx: click.Context, options: dict[str, Any], is_served: bool) -> None:
    """Options of the other way to answer would be ignored in silence."""
    if (options["target"] is None) == (options["server"] is None):
        raise click.UsageError("Give either '--target T' (answers in this process) or '--server URL'.")
    server_only, target_only = ["model", "api_key_env", "concurrency"], ["template", "workers"]
    if is_served and options["target"] is None:
        raise click.UsageError("--engine-python serves a target here: give '--target T'.")
    flag, others = ("--server", target_only) if options["server"] is not None else ("--target", server_only)
    flag, others = ("--engine-python", ["model", "api_key_env", *target_only]) if is_served else (flag, others)
    for name in others:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} has no meaning with {flag}")


def _refuse_before_start(request: "RegenerateOptions") -> None:
    """What the server that is started here could not be asked for."""
    from collectors.regenerate.options import require_possible

    if request.dtype is not None:
        raise click.UsageError(
            f"--set dtype has no meaning with --engine-python: give '--engine-arg dtype={request.dtype}'."
        )
    if request.adapter is not None:
        raise click.UsageError(
            "--set adapter has no meaning with --engine-python: merge it, or leave --engine-python out."
        )
    require_possible(replace(request, target=None, server="http://127.0.0.1"))


def _show(document: dict[str, Any], shard: tuple[int, int]) -> None:
    from hiddenstore.conversation import way_to_keep

    out = output()
    looping = document["dropped"].get("looping", 0)
    waiting = document["waiting_for_shards"]
    written = f"{document['written']:,} of {document['read']:,} conversations to {document['out']}"
    if waiting:
        others = ", ".join(f"{number}/{shard[1]}" for number in waiting)
        written = f"shard {shard[0]}/{shard[1]} is done; {document['out']} waits for {others}"
    elif document["written_by_another_shard"]:
        written = f"shard {shard[0]}/{shard[1]} is done; another one, done too, writes {document['out']}"
    # Of a run that generated nothing, such as --take, there is no speed to tell.
    speed = f" at {rate:,.0f} tokens/s" if (rate := document["tokens_per_s"]) else ""
    lines = [
        ("written", written),
        ("tokens", f"{document['tokens']:,}{speed}"),
        ("looping", f"{plural(looping, 'answer')} dropped ({percent(document['looping_share'])})"),
        ("cut", f"{document['cut']:,} answers reached --max-new-tokens"),
        *([("resumed", f"{document['resumed']:,} answers were there already")] if document["resumed"] else []),
        *([("short", f"{document['short']:,} end where other tools were called")] if document["short"] else []),
    ]
    out.pairs(lines)
    if document["dropped"]:
        rows = [(reason, f"{count:,}", document["examples"][reason]) for reason, count in document["dropped"].items()]
        out.table(["dropped because", ">conversations", Column("first", wide=True)], rows)
    if way := way_to_keep(document["dropped"]):
        out.note(f"to keep rows {way}")
