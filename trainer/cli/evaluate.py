"""``hiddenstore eval``: simulated acceptance over recorded text, or what a running server gets accepted."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click
from click.core import ParameterSource

from hiddenstore.cli.words import RUN, STORE, cache_options, same_target_option, target_options
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.errors import ConfigError, CorruptionError, Kind

if TYPE_CHECKING:
    from hiddenstore.store import Store
    from hiddenstore.targets.folder import TargetFolder
    from schemas.manifest import Split
    from trainer.evaluate.acceptance import DraftShape
    from trainer.evaluate.prompts import Question
    from trainer.evaluate.server import Render, Server
    from trainer.evaluate.simulate import Evaluation, NgramFloor
    from trainer.evaluate.target import LiveTarget
    from trainer.train.run_folder import LoadedDrafter, RunInfo


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


def judge(document: dict[str, Any], info: "RunInfo") -> None:
    """Warn where a table of what usually comes next is accepted as much as the drafter, and where the run overfits."""
    from trainer.train.log import read_curves

    try:
        overfit = read_curves(info.run).overfit(document["step"])
    except CorruptionError as error:
        overfit = error.message
    if overfit is not None:
        output().warn(overfit)
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
_OF_TEXT = ("split", "shapes", "best", "untrained", "device", "costs", "adapter", "same_target", "cache", "cache_bytes")
_OF_TARGET = ("target", "revision", "trust_remote_code", "adapter")
_OF_SERVERS = (
    *("servers", "baseline_server", "rounds", "engine_python", "engine_args", "prompts", "api_key_env", "model"),
    *("count", "max_new_tokens", "temperature", "concurrency", "markdown"),
)


class _ServerOptions(TypedDict):
    """The options that measure servers."""

    servers: tuple[str, ...]
    baseline_server: str | None
    prompts: tuple[str, ...]
    api_key_env: str | None
    model: str | None
    target: str | None
    revision: str | None
    trust_remote_code: bool
    adapter: str | None
    count: int | None
    max_new_tokens: int
    temperature: float
    concurrency: int
    markdown: str | None
    rounds: int
    drafter: str | None
    engine_python: str | None
    engine_args: tuple[str, ...]


@click.command(
    "eval",
    epilog=examples(
        "hiddenstore eval run store",
        "hiddenstore eval run store --draft-len 1,3,7,5x4 --untrained --json",
        "hiddenstore eval run store --draft-len 1,2,3,5 --costs --target ./target    # which length pays here",
        "hiddenstore eval --engine vllm --server http://127.0.0.1:8000 --prompts mt_bench.jsonl --markdown table.md",
        "hiddenstore eval --serve drafter --target ./target --prompts mt_bench.jsonl --rounds 5",
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
@click.option("--costs", is_flag=True, help="Also measure on --target which draft length pays; export takes it.")
@click.option("--engine", type=click.Choice(ENGINES), help="Measure a running server instead of walking text.")
@click.option("--server", "servers", multiple=True, metavar="URL", help="Of the server; several make a table.")
@click.option("--baseline-server", metavar="URL", help="The same target without speculation, for the speed-up.")
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="With and without, in turn.")
@click.option("--serve", "drafter", metavar="DIR", help="Start both servers here, of --target with and without DIR.")
@click.option("--engine-python", metavar="PY", help="With --serve: the Python that has the engine. Default: this one.")
@click.option(
    "--engine-arg", "engine_args", multiple=True, metavar="KEY=VALUE", help="With --serve: a flag of the engine's."
)
@click.option("--prompts", "prompts", multiple=True, metavar="FILE", help="JSONL of questions; repeatable.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the servers' key.")
@click.option("--model", help="The served model, where a server has several.")
@click.option("--target", help="Render prompts by its tokenizer here, and send token ids; what --serve serves.")
@target_options
@click.option("-n", "--count", type=click.IntRange(min=1), help="Questions of each task. Default: all.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Per answer.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--concurrency", type=click.IntRange(min=1), default=1, show_default=True, help="At a time.")
@same_target_option
@cache_options
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
    costs: bool,
    engine: str | None,
    same_target: bool,
    cache: str | None,
    cache_bytes: int,
    **options: Unpack[_ServerOptions],
) -> None:
    """How many tokens a target forward yields, simulated over recorded text or measured on a running server.

    RUN is a training run or one of its checkpoints. The text is walked as a server drafts it: each draft starts where
    the last one ended. Beside it stand the average over all slots and the n-gram floor.

    With --engine, a server that is already up answers --prompts: MT-Bench, GSM8K or HumanEval files as published, or
    JSONL with `prompt` or `messages` and a `task`. Accepted length comes from the server's own counters. --rounds asks
    the server and its --baseline-server in turn; answers that differ are listed with the gap of the logits there.
    """
    if engine is not None or options["drafter"] is not None:
        if run is not None or cache is not None:
            raise click.UsageError("--engine and --serve measure servers: leave RUN, STORE and --cache out")
        _refuse(_OF_TEXT, "--engine and --serve measure servers, this is for RUN and STORE")
        _measure_servers(engine or "vllm", options)
    elif run is None or store is None or options["servers"]:
        raise click.UsageError("expected RUN and STORE, or --engine with --server and --prompts")
    elif costs and options["target"] is None:
        raise click.UsageError("--costs are measured on the target: give --target T")
    else:
        _refuse(_OF_SERVERS, "RUN and STORE are walked, this is for servers: --engine or --serve")
        if not costs:
            _refuse(_OF_TARGET, "no target is loaded to walk text, only for --costs")
        target = _opened(options) if costs else None
        _simulate(run, store, (cache, cache_bytes), split, shapes, best, untrained, device, same_target, target)


def _refuse(names: Sequence[str], reason: str) -> None:
    """Refuse options of the command line that would be left unread."""
    context = click.get_current_context()
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)}: {reason}")


def _opened(options: _ServerOptions) -> "TargetFolder":
    from hiddenstore.targets.folder import open_target

    opening = options["revision"], None, options["trust_remote_code"], options["adapter"]
    return open_target(str(options["target"]), *opening)


def _simulate(
    run: str,
    store: str,
    cache: tuple[str | None, int],
    split: "Split",
    shapes: "tuple[DraftShape, ...]",
    best: bool,
    untrained: bool,
    device: str,
    same_target: bool,
    target: "TargetFolder | None",
) -> None:
    from hiddenstore.console.progress import Progress
    from hiddenstore.store import Store
    from hiddenstore.targets.identity import target_words
    from trainer.evaluate import simulate
    from trainer.evaluate.target import load_live_target
    from trainer.parallel.group import pick_device
    from trainer.train.checkpoint import best as best_checkpoint
    from trainer.train.run_folder import describe, load_drafter, training_store
    from trainer.train.storage import through_cache

    if best:
        run = str(best_checkpoint(Path(run)))
    info, text = describe(run), Store.open(through_cache(store, *cache))
    trained_on = training_store(info)
    _require_its_target(run, info, text, trained_on, same_target)
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
    if target is not None:
        live = load_live_target(target, info.spec.drafter.aux_layers, info.spec.target, device, None, same_target)
        document |= _with_costs(document["sweep"], drafters[0], live, results[0].texts[0][0].tolist())
    output().data(document, human=lambda: _show_simulated(document))
    if target is not None:
        _keep_what_pays(document, info.run, live.identity.dtype)
    judge(document, info)
    output().hint("hiddenstore", "decode", run, *target_words(text.capture.target), "--prompts", store)


def _require_its_target(
    run: str, info: "RunInfo", text: "Store", trained_on: "Store | None", same_target: bool
) -> None:
    """Refuse a store of another target than the drafter's."""
    from hiddenstore.targets.identity import cast_hint
    from hiddenstore.verify.profile import share_profile, target_differences, unstated_warning
    from trainer.drafters import refuse_target

    trained_for = info.spec.target
    problem = f"{text.path} was captured from {text.capture.target.name}, the drafter was trained on {trained_for.name}"
    differences = target_differences(trained_for, text, trained_on, same_target)
    refuse_target(differences, problem, cast_hint(differences, f"hiddenstore eval {run} {info.spec.store}"))
    if warning := unstated_warning(trained_for, text.capture.target, share_profile(trained_on, text)):
        output().warn(warning)


def _with_costs(
    sweep: list[dict[str, Any]], drafter: "LoadedDrafter", live: "LiveTarget", text: list[int]
) -> dict[str, Any]:
    """What drafts of each length cost on this machine, put into the rows of the sweep, and the length that pays."""
    from trainer.evaluate.cost import measure_costs, paying

    chains = [row for row in sweep if row["tree_width"] == 1]
    costs = measure_costs(live, drafter, text, [row["draft_len"] for row in chains])
    for row in chains:
        row |= {"draft_s": costs.draft_s[row["draft_len"]], "speedup": costs.speedup(row)}
    best = paying(chains)
    return {"token_s": costs.token_s, "best_draft_len": best["draft_len"], "speedup": best["speedup"]}


def _keep_what_pays(document: dict[str, Any], run: Path, dtype: str) -> None:
    """Leave the best length for export; where none pays in this process it says nothing of an engine, which drafts for
    less."""
    from trainer.evaluate.cost import keep

    if document["speedup"] > 1:
        keep(run, document["step"], document, dtype)
        return
    output().warn(
        f"no draft length pays on this machine: the best, {document['best_draft_len']}, gives "
        f"{document['speedup']:.2f}x of plain decoding in this process; export keeps its own length, and "
        "hiddenstore eval --serve DRAFTER measures an engine"
    )


def _simulated(result: "Evaluation") -> dict[str, Any]:
    sweep = [tally.row() | {"slot_accepted_length": tally.slot_accepted_length} for tally in result.tallies]
    return {**sweep[-1], "samples": len(result.texts), "tokens": result.tally.tokens, "sweep": sweep}


def _show_simulated(document: dict[str, Any]) -> None:
    from hiddenstore.console.text import plural

    rows = acceptance_rows(document)
    rows.insert(1, ("slot average", _number(document["slot_accepted_length"])))
    if document["untrained_accepted_length"] is not None:
        rows.append(("untrained", f"{document['untrained_accepted_length']:.3f}"))
    if "best_draft_len" in document:
        best = f"drafts of {document['best_draft_len']}: {document['speedup']:.2f}x of plain decoding on this machine"
        rows.append(("pays", f"{best}; export takes it") if document["speedup"] > 1 else ("best", best))
    samples = plural(document["samples"], document["split"] + " sample")
    rows.append(("walked", f"{samples}: {document['drafts']:,} drafts, {document['tokens']:,} tokens"))
    output().pairs(rows)
    if len(document["sweep"]) > 1:
        head = ["draft of", ">accepted length", ">slot average", ">drafts"]
        cells = [
            [shape_text(row), f"{row['accepted_length']:.3f}", _number(row["slot_accepted_length"]), row["drafts"]]
            for row in document["sweep"]
        ]
        if "best_draft_len" in document:
            head += [">ms a draft", ">speed"]
            for line, row in zip(cells, document["sweep"], strict=True):
                line += [f"{1000 * row['draft_s']:.0f}", f"{row['speedup']:.2f}x"] if "draft_s" in row else ["–", "–"]
        output().table(head, cells)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _measure_servers(engine: str, options: _ServerOptions) -> None:
    """Ask every question of every server and print what was measured. Raises ConfigError: no server or prompts named; a
    server that does not draft, or serves another model; StorageError, CaptureError: what HttpClient raises."""
    if not options["prompts"]:
        raise ConfigError(f"eval --engine {engine} needs --prompts FILE", kind=Kind.USAGE, hint="--prompts FILE")
    if options["drafter"] is not None:
        if options["servers"] or options["baseline_server"] or options["target"] is None:
            raise click.UsageError("--serve starts both servers itself: give --target T, and no server")
    elif not options["servers"]:
        raise ConfigError(f"eval --engine {engine} needs --server URL", kind=Kind.USAGE, hint="--server URL")
    elif options["rounds"] > 1 and options["baseline_server"] is None:
        raise click.UsageError("--rounds ask two servers in turn: give --baseline-server URL")
    from trainer.evaluate.prompts import left_out, read_questions

    # Before servers start, which takes minutes.
    unusable: list[str] = []
    questions = read_questions(options["prompts"], unusable, options["count"])
    if unusable:
        output().warn(left_out(unusable))
    if options["drafter"] is None:
        _measure_running(engine, options, questions, len(unusable))
        return
    with _started(engine, options) as (plain, drafted):
        options = {**options, "baseline_server": plain, "servers": (drafted,), "target": None}
        _measure_running(engine, options, questions, len(unusable))


@contextmanager
def _started(engine: str, options: _ServerOptions) -> Iterator[tuple[str, str]]:
    """URLs of a server without the drafter and one with it, both started here."""
    from hiddenstore.servers import VllmPython, engine_flags, running
    from hiddenstore.targets.gguf import target_folder
    from trainer.serve import ENGINES as SERVING
    from trainer.serve.launch import server_of
    from trainer.serve.plan import ServeOptions

    python, drafter, serving = VllmPython(options["engine_python"]), str(options["drafter"]), SERVING[engine]
    flags = engine_flags(options["engine_args"])
    flags += ("--revision", options["revision"]) if options["revision"] else ()
    flags += ("--trust-remote-code",) if options["trust_remote_code"] else ()
    target = target_folder(str(options["target"]))
    plain = ServeOptions(target=target, method="none", flags=flags)
    drafted = ServeOptions(target=target, drafter=drafter, flags=flags)
    # What is no path here has no folder to write beside.
    place = drafter.rstrip("/") if Path(drafter).exists() else Path(drafter).name
    logs = [Path(f"{place}.{name}.log") for name in ("plain", "drafted")]
    servers = [server_of(serving, python, each, log) for each, log in zip((plain, drafted), logs, strict=True)]
    output().note(f"starting {serving.title} without and with {drafter}; they write {logs[0]} and {logs[1]}")
    with running(servers) as (first, second):
        yield first, second


def _measure_running(engine: str, options: _ServerOptions, questions: "list[Question]", unusable: int) -> None:
    from trainer.evaluate.server import require_one_model

    render = _renderer(options["target"], options) if options["target"] else None
    servers = [_open(engine, options, url, render) for url in options["servers"]]
    baseline = _open(engine, options, options["baseline_server"], render) if options["baseline_server"] else None
    for server in servers:
        if baseline:
            require_one_model(server, baseline)
        if engine in ("vllm", "llamacpp") and server.counts() is None:
            raise server.no_counts()
    names = ("baseline_server", "temperature", "max_new_tokens", "concurrency", "rounds")
    document = {
        "engine": engine,
        "model": servers[0].model,
        "server": options["servers"][0],
        "prompts_from": list(options["prompts"]),
        "prompts_unusable": unusable,
        **{name: options[name] for name in names},  # type: ignore[literal-required]
        **_measured(engine, servers, baseline, questions, options),
    }
    if options["markdown"]:
        _write_markdown(Path(options["markdown"]), document)
    output().data(document, human=lambda: _show_measured(document))
    for row in document["differences"]:
        output().warn(
            f"an answer differs that is no tie: “{row['question']}”, turn {row['turn'] + 1}, {row['plain']!r} without "
            f"and {row['drafted']!r} with the drafter, at a logit gap of {_text_of(row['logit_gap'])}"
        )
    if baseline is None:
        output().hint("--baseline-server URL gives the speed-up, --markdown FILE the table for a report")


def _text_of(gap: float | None) -> str:
    return "unknown size: the server did not say, or did not repeat itself" if gap is None else f"{gap:.3g}"


def _measured(
    engine: str,
    servers: "list[Server]",
    baseline: "Server | None",
    questions: "list[Question]",
    options: _ServerOptions,
) -> dict[str, Any]:
    """The rows of all servers, and the total of the first as members of its own, as ``eval`` of a store has them."""
    from hiddenstore.console.progress import Progress
    from trainer.evaluate.rounds import departures, measure_rounds, rows_of
    from trainer.evaluate.server import ALL, SamplingOptions

    sampling = SamplingOptions(options["max_new_tokens"], options["temperature"])
    everyone, rounds = [*([baseline] if baseline else []), *servers], options["rounds"]
    with Progress("eval", total=len(questions) * len(everyone) * rounds, unit="questions") as progress:
        measured = measure_rounds(everyone, questions, sampling, options["concurrency"], rounds, progress.advance)
    plain, drafted = (measured[0], measured[1:]) if baseline else (None, measured)
    for server, results in zip(servers, drafted, strict=True):
        total = results[0][-1].counts
        # llama.cpp has its counters, at zero, where nothing drafts.
        if server.lost:
            output().warn(server.lost)
        elif engine in ("sglang", "trtllm", "llamacpp") and (total is None or not total.drafts):
            raise server.no_counts()
    rows = [row for one, all_of in zip(servers, drafted, strict=True) for row in rows_of(one.client.url, all_of, plain)]
    parted = []
    if baseline is not None and plain is not None and not sampling.temperature:
        parted = [one for all_of in drafted for one in departures(baseline, questions, plain, all_of, sampling)]
    for row in rows:
        if row["others_were_served"] and row["task"] != ALL:
            output().warn(f"{row['server']} drafted for others while {row['task']} ran: its accepted length is mixed")
    if all(row["accepted_length"] is None for row in rows):
        output().warn("the server counts no drafts where we can read it: speed only")
    overall = next(row for row in rows if row["task"] == ALL)
    names = ("draft_len", "accepted_length", "per_position", "drafts", "tokens_per_s", "baseline_tokens_per_s")
    return {
        **{name: overall[name] for name in (*names, "speedup", "speedup_rounds")},
        "answers": rounds * sum(1 + len(question.more) for question in questions),
        "ties": [one.document() for one in parted if one.is_tie],
        "differences": [one.document() for one in parted if not one.is_tie],
        "rows": rows,
    }


def _open(engine: str, options: _ServerOptions, url: str, render: "Render | None") -> "Server":
    from hiddenstore.http import HttpClient, ServerAccess
    from trainer.evaluate.server import SERVERS

    hint = f"start it, or look whether it is up: curl {url}/v1/models"
    # One try: the time of a failed one would be in the figures.
    client = HttpClient(ServerAccess(url, tries=1, api_key_env=options["api_key_env"], hint=hint))
    return SERVERS[engine](client, options["model"], render)


def _renderer(target: str, options: _ServerOptions) -> "Render":
    from trainer.evaluate.prompts import prompt_ids

    tokenizer = _opened(options).tokenizer
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
    pairs = [("model", document["model"]), ("asked", f"{answers}, {how}")]
    if document["speedup"] is not None and not document["temperature"]:
        gaps = ", ".join(f"{tie['logit_gap']:.3g}" for tie in document["ties"])
        parted = f"{len(document['ties'])} questions first differ at a tie" + (f" (logit gaps {gaps})" if gaps else "")
        pairs.append(("answers", f"{parted}, {len(document['differences'])} otherwise"))
    output().pairs(pairs)
