"""``hiddenstore eval``: simulated acceptance over recorded text, or what a running server gets accepted."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from hiddenstore.cli.words import RUN, STORE, same_target_option
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.errors import ConfigError, Kind

if TYPE_CHECKING:
    from schemas.manifest import Split
    from trainer.evaluate.acceptance import DraftShape
    from trainer.evaluate.prompts import Question
    from trainer.evaluate.server import Render, Server, TaskResult
    from trainer.evaluate.simulate import Evaluation, NgramFloor
    from trainer.train.run_folder import RunInfo


LONGEST, WIDEST = 256, 64
"""Far beyond what any engine drafts; a tree costs the square of its nodes."""


class DraftShapes(click.ParamType):
    """``3``, ``1,2,4,8`` or ``5,5x4``: draft lengths, given back in ascending order; ``5x4`` is a tree of 5 levels, 4
    nodes of each growing."""

    name = "n[xw][,…]"

    def convert(
        self, value: "str | tuple[DraftShape, ...]", param: click.Parameter | None, ctx: click.Context | None
    ) -> "tuple[DraftShape, ...]":
        """The shapes."""
        from trainer.evaluate.acceptance import DraftShape

        if isinstance(value, tuple):
            return value
        matches = [re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", item.strip()) for item in value.split(",")]
        shapes = [DraftShape(int(match[1]), int(match[2] or 1)) for match in matches if match]
        if len(shapes) < len(matches):
            self.fail(f"{value!r} should be draft lengths such as 3, 1,2,4,8 or, for a tree, 5x4", param, ctx)
        if len(set(shapes)) < len(shapes):
            self.fail(f"{value!r} names a draft length twice", param, ctx)
        if any(shape.length > LONGEST or shape.width > WIDEST for shape in shapes):
            self.fail(f"{value!r}: a draft has at most {LONGEST} levels, each at most {WIDEST} wide", param, ctx)
        return tuple(sorted(shapes))


draft_len_option = click.option(
    "--draft-len",
    "shapes",
    type=DraftShapes(),
    default="3",
    show_default=True,
    help="Tokens drafted at a time; several make a table, 5x4 drafts a tree.",
)


def floor_members(floor: "NgramFloor | None") -> dict[str, Any]:
    """The n-gram floor as members of a document."""
    return {
        "ngram_accepted_length": floor.accepted_length if floor else None,
        "ngram_order": floor.order if floor else None,
        "ngram_training_tokens": floor.training_tokens if floor else 0,
    }


def judge_floor(document: dict[str, Any], info: "RunInfo") -> None:
    """Warn where a table of what usually comes next is accepted as much as the drafter."""
    length, floor = document["accepted_length"], document["ngram_accepted_length"]
    # Drafts that were drawn are accepted by another rule than the floor's.
    if floor is not None and length <= floor and not document.get("temperature"):
        steps = max(2 * document["step"], 100)
        output().warn(
            f"the drafter's {length:.3f} does not beat the n-gram floor of {floor:.3f}: so far a lookup table does as "
            "well as what it read in the hidden states; more steps usually help: hiddenstore train "
            f"{info.spec.store} -o {info.run} --resume train.max_steps={steps}"
        )


def acceptance_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Accepted length, by position, beside the n-gram floor."""
    length = document["ngram_accepted_length"]
    floor = "unknown: no training text"
    if length is not None:
        floor = (
            f"{length:.3f}  order {document['ngram_order']} of 1–4, from "
            f"{document['ngram_training_tokens']:,} training tokens"
        )
    return [
        (
            "accepted length",
            f"{document['accepted_length']:.3f}  drafts of {shape_text(document)}, bonus token counted",
        ),
        ("by position", positions_text(document["per_position"])),
        ("n-gram floor", floor),
    ]


def shape_text(row: dict[str, Any]) -> str:
    """``3``, or ``5x4`` for a tree."""
    width = row["tree_width"]
    return f"{row['draft_len']}x{width}" if width > 1 else str(row["draft_len"])


def positions_text(shares: Sequence[float]) -> str:
    """``0.282  0.105  0.004``; a long draft's last positions, which were never accepted, are counted only."""
    reached = max((position for position, share in enumerate(shares, 1) if share > 0), default=0)
    shown = max(reached, 8)
    never = f"  0 at {len(shares) - shown} more" if len(shares) > shown else ""
    return "  ".join(f"{share:.3f}" for share in shares[:shown]) + never


ENGINES = ("vllm", "sglang", "trtllm", "llamacpp", "http")


class _ServerOptions(TypedDict):
    """The options that measure servers."""

    servers: tuple[str, ...]
    baseline_server: str | None
    prompts: tuple[str, ...]
    api_key_env: str | None
    model: str | None
    target: str | None
    count: int | None
    max_new_tokens: int
    temperature: float
    concurrency: int
    markdown: str | None


@click.command(
    "eval",
    epilog=examples(
        "hiddenstore eval run store",
        "hiddenstore eval run store --draft-len 1,3,7,5x4 --untrained --json",
        "hiddenstore eval --engine vllm --server http://127.0.0.1:8000 --prompts mt_bench.jsonl --markdown table.md",
    ),
)
@click.argument("run", type=RUN, required=False)
@click.argument("store", type=STORE, required=False)
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
@click.option("--engine", type=click.Choice(ENGINES), help="Measure a running server instead of walking text.")
@click.option("--server", "servers", multiple=True, metavar="URL", help="Of the server; several make a table.")
@click.option("--baseline-server", metavar="URL", help="The same target without speculation, for the speed-up.")
@click.option("--prompts", "prompts", multiple=True, metavar="FILE", help="JSONL of questions; repeatable.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the servers' key.")
@click.option("--model", help="The served model, where a server has several.")
@click.option("--target", help="Render prompts with this tokenizer here, and send token ids.")
@click.option("-n", "--count", type=click.IntRange(min=1), help="Questions of each task. Default: all.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Per answer.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--concurrency", type=click.IntRange(min=1), default=1, show_default=True, help="At a time.")
@same_target_option
@click.option("--markdown", type=click.Path(dir_okay=False), metavar="FILE", help="Also write the table there.")
@common_options
def evaluate(
    run: str | None,
    store: str | None,
    split: "Split",
    shapes: "tuple[DraftShape, ...]",
    best: bool,
    untrained: bool,
    device: str,
    engine: str | None,
    same_target: bool,
    **options: Unpack[_ServerOptions],
) -> None:
    """How many tokens a target forward yields, simulated over recorded text or measured on a running server.

    RUN is a training run or one of its checkpoints. The text is walked as a server drafts it: each draft starts where
    the last one ended. Beside it stand the average over all slots and the n-gram floor.

    With --engine, a server that is already up answers --prompts: MT-Bench, GSM8K or HumanEval files as published, or
    JSONL with `prompt` or `messages` and a `task`. Accepted length comes from the server's own counters.
    """
    if engine is not None:
        if run is not None:
            raise click.UsageError("--engine measures a server: leave RUN and STORE out")
        _measure_servers(engine, options)
    elif run is None or store is None or options["servers"]:
        raise click.UsageError("expected RUN and STORE, or --engine with --server and --prompts")
    else:
        _simulate(run, store, split, shapes, best, untrained, device, same_target)


def _simulate(
    run: str,
    store: str,
    split: "Split",
    shapes: "tuple[DraftShape, ...]",
    best: bool,
    untrained: bool,
    device: str,
    same_target: bool,
) -> None:
    from hiddenstore.console.progress import Progress
    from hiddenstore.store import Store
    from hiddenstore.targets.identity import cast_hint, target_argument
    from hiddenstore.verify.same_target import share_profile, target_differences, unstated_warning
    from trainer.drafters import refuse_target
    from trainer.evaluate import simulate
    from trainer.parallel.group import pick_device
    from trainer.train.checkpoint import best as best_checkpoint
    from trainer.train.run_folder import describe, load_drafter, training_store

    if best:
        run = str(best_checkpoint(Path(run)))
    info, text = describe(run), Store.open(store)
    trained_for, trained_on = info.spec.target, training_store(info)
    problem = f"{text.path} was captured from {text.capture.target.name}, the drafter was trained on {trained_for.name}"
    differences = target_differences(trained_for, text, trained_on, same_target)
    refuse_target(differences, problem, cast_hint(differences, f"hiddenstore eval {run} {info.spec.store}"))
    if warning := unstated_warning(trained_for, text.capture.target, share_profile(trained_on, text)):
        output().warn(warning)
    device = pick_device(device)
    head, final_norm = text.head(), text.capture.final_norm
    drafters = [
        load_drafter(run, device, head=head, final_norm=final_norm, untrained=fresh)
        for fresh in ([False, True] if untrained else [False])
    ]
    total = sum(entry.tokens for _, entry in text.entries if entry.split == split)
    with Progress("eval", total=total, unit="tokens") as progress:
        results = simulate.evaluate(drafters, text, split, shapes, device=device, on_pack=progress.advance)
    if trained_on is None:
        output().warn(f"{info.spec.store} is gone: the n-gram floor is made from the training split of {store}")
    floor = simulate.floor(trained_on or text, results[0].texts, shapes[-1].length)
    document = {
        "run": run,
        "step": drafters[0].step,
        "store": store,
        "split": split,
        **_simulated(results[0]),
        **floor_members(floor),
        "ngram_per_order": list(floor.per_order),
        "untrained_accepted_length": results[1].tally.accepted_length if untrained else None,
    }
    output().data(document, human=lambda: _show_simulated(document))
    judge_floor(document, info)
    output().hint("hiddenstore", "decode", run, "--target", target_argument(text.capture.target), "--prompts", store)


def _simulated(result: "Evaluation") -> dict[str, Any]:
    sweep = [tally.row() | {"slot_accepted_length": tally.slot_accepted_length} for tally in result.tallies]
    return {**sweep[-1], "samples": len(result.texts), "tokens": result.tally.tokens, "sweep": sweep}


def _show_simulated(document: dict[str, Any]) -> None:
    from hiddenstore.console.text import plural

    rows = acceptance_rows(document)
    rows.insert(1, ("slot average", _number(document["slot_accepted_length"])))
    if document["untrained_accepted_length"] is not None:
        rows.append(("untrained", f"{document['untrained_accepted_length']:.3f}"))
    samples = plural(document["samples"], document["split"] + " sample")
    rows.append(("walked", f"{samples}: {document['drafts']:,} drafts, {document['tokens']:,} tokens"))
    output().pairs(rows)
    if len(document["sweep"]) > 1:
        output().table(
            ["draft of", "accepted length", "slot average", "drafts"],
            [
                (shape_text(row), f"{row['accepted_length']:.3f}", _number(row["slot_accepted_length"]), row["drafts"])
                for row in document["sweep"]
            ],
        )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _measure_servers(engine: str, options: _ServerOptions) -> None:
    """Ask every question of every server and print what was measured. Raises ConfigError: no server or prompts named; a
    server that does not draft, or serves another model; StorageError, CaptureError: what HttpClient raises."""
    from hiddenstore.errors import ConfigError
    from trainer.evaluate.prompts import left_out, read_questions
    from trainer.evaluate.server import require_one_model

    for name, values in (("--server URL", options["servers"]), ("--prompts FILE", options["prompts"])):
        if not values:
            raise ConfigError(f"eval --engine {engine} needs {name}", kind=Kind.USAGE, hint=name)
    unusable: list[str] = []
    questions = read_questions(options["prompts"], unusable, options["count"])
    if unusable:
        output().warn(left_out(unusable))
    render = _renderer(options["target"]) if options["target"] else None
    servers = [_open(engine, options, url, render) for url in options["servers"]]
    baseline = _open(engine, options, options["baseline_server"], render) if options["baseline_server"] else None
    for server in servers:
        if baseline:
            require_one_model(server, baseline)
        if engine in ("vllm", "llamacpp") and server.counts() is None:
            raise server.no_counts()
    document = {
        "engine": engine,
        "model": servers[0].model,
        "server": options["servers"][0],
        "baseline_server": options["baseline_server"],
        "prompts_from": list(options["prompts"]),
        "prompts_unusable": len(unusable),
        "temperature": options["temperature"],
        "max_new_tokens": options["max_new_tokens"],
        "concurrency": options["concurrency"],
        **_measured(engine, servers, baseline, questions, options),
    }
    if options["markdown"]:
        _write_markdown(Path(options["markdown"]), document)
    output().data(document, human=lambda: _show_measured(document))
    if not options["markdown"] or baseline is None:
        output().hint("--baseline-server URL gives the speed-up, --markdown FILE the table for a report")


def _measured(
    engine: str,
    servers: "list[Server]",
    baseline: "Server | None",
    questions: "list[Question]",
    options: _ServerOptions,
) -> dict[str, Any]:
    """The rows of all servers, and the total of the first as members of its own, as ``eval`` of a store has them."""
    from hiddenstore.console.progress import Progress
    from trainer.evaluate.server import ALL, SamplingOptions, measure, row_of

    sampling = SamplingOptions(options["max_new_tokens"], options["temperature"])
    turns = sum(1 + len(question.more) for question in questions)
    rows: list[dict[str, Any]] = []
    with Progress("eval", total=len(questions) * (len(servers) + bool(baseline)), unit="questions") as progress:

        def results_of(server: "Server") -> "list[TaskResult]":
            return measure(server, questions, sampling, options["concurrency"], lambda: progress.advance(1))

        plain = {result.task: result for result in results_of(baseline)} if baseline else {}
        for server in servers:
            results = results_of(server)
            total = results[-1].counts
            # llama.cpp has its counters, at zero, where nothing drafts.
            if engine in ("sglang", "trtllm", "llamacpp") and (total is None or not total.drafts):
                raise server.no_counts()
            rows += [row_of(server.client.url, result, plain.get(result.task)) for result in results]
    for row in rows:
        if row["others_were_served"] and row["task"] != ALL:
            output().warn(f"{row['server']} drafted for others while {row['task']} ran: its accepted length is mixed")
    if all(row["accepted_length"] is None for row in rows):
        output().warn("the server counts no drafts where we can read it: speed only")
    overall = next(row for row in rows if row["task"] == ALL)
    names = ("draft_len", "accepted_length", "per_position", "drafts", "tokens_per_s", "speedup")
    return {**{name: overall[name] for name in names}, "answers": turns, "rows": rows}


def _open(engine: str, options: _ServerOptions, url: str, render: "Render | None") -> "Server":
    from hiddenstore.http import HttpClient, ServerAccess
    from trainer.evaluate.server import SERVERS

    hint = f"start it, or look whether it is up: curl {url}/v1/models"
    # One try: the time of a failed one would be in the figures.
    client = HttpClient(ServerAccess(url, tries=1, api_key_env=options["api_key_env"], hint=hint))
    return SERVERS[engine](client, options["model"], render)


def _renderer(target: str) -> "Render":
    from transformers import AutoTokenizer

    from hiddenstore.targets.gguf import target_folder
    from trainer.evaluate.prompts import prompt_ids

    try:
        tokenizer = AutoTokenizer.from_pretrained(target_folder(target))
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"no tokenizer at {target}: {reason}", kind=Kind.TARGET_UNREADABLE) from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"the tokenizer of {target} has no chat template", kind=Kind.TEMPLATE_MISSING)

    def render(messages: Any) -> list[int]:
        return prompt_ids(tokenizer, messages, "a prompt", "leave --target out: the server renders by its own")

    return render


def _write_markdown(path: Path, document: dict[str, Any]) -> None:
    from hiddenstore.fs.seam import storage_error
    from trainer.evaluate.server import markdown

    try:
        path.write_text(markdown(document), encoding="utf-8")
    except OSError as error:
        raise storage_error(error, str(path)) from error


def _show_measured(document: dict[str, Any]) -> None:
    from trainer.evaluate.server import table

    urls = list(dict.fromkeys(row["server"] for row in document["rows"]))
    for url in urls:
        if len(urls) > 1:
            output().print(url)
        head, cells = table([row for row in document["rows"] if row["server"] == url])
        output().table([head[0], *(f">{name}" for name in head[1:])], cells)
    answers = f"{document['answers']:,} answers of at most {document['max_new_tokens']:,} tokens"
    how = f"{document['concurrency']} at a time, temperature {document['temperature']:g}"
    output().pairs([("model", document["model"]), ("asked", f"{answers}, {how}")])
