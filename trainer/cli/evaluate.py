"""``hiddenstore eval``: simulated acceptance over recorded text, or what a running server gets accepted."""

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hiddenstore.cli.words import (
    RUN,
    STORE,
    FiniteRange,
    cache_options,
    same_target_option,
    split_snapshot,
    target_options,
)
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.errors import CorruptionError, HiddenstoreError

if TYPE_CHECKING:
    from hiddenstore.store import Store
    from hiddenstore.targets.folder import TargetFolder
    from schemas.manifest import Split
    from trainer.evaluate.acceptance import DraftShape
    from trainer.evaluate.simulate import NgramFloor
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
    show_default="3, or as many as RUN can",
    help="Tokens drafted at a time; several make a table, 5x4 drafts a tree.",
)


def shapes_of(drafter: "LoadedDrafter", shapes: "tuple[DraftShape, ...]") -> "tuple[DraftShape, ...]":
    """Those that the command line names; the default's only as long as ``drafter`` drafts."""
    if _is_given("shapes"):
        return shapes
    return tuple(replace(shape, length=drafter.within(shape.length)) for shape in shapes)


def floor_members(floor: "NgramFloor | None") -> dict[str, Any]:
    """The n-gram floor as members of a document."""
    return {
        "ngram_accepted_length": floor.accepted_length if floor else None,
        "ngram_order": floor.order if floor else None,
        "ngram_training_tokens": floor.training_tokens if floor else 0,
    }


def judge(document: dict[str, Any], info: "RunInfo", trained_on: "Store | None") -> None:
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
        output().warn(
            f"the drafter's {length:.3f} does not beat the n-gram floor of {floor:.3f}: so far a lookup table does as "
            "well as what it read in the hidden states; more steps usually help"
            f"{'' if trained_on is None else _more_steps(info)}"
        )


def _more_steps(info: "RunInfo") -> str:
    """The command that has a run go on for twice its steps, also where it ran out of patience, or why none would."""
    from hiddenstore import settings
    from trainer.settings import config_class
    from trainer.train.checkpoint import latest, read_state
    from trainer.train.guard import BestCheckpoints
    from trainer.train.run_folder import CONFIG, drafter_name

    try:
        newest = read_state(latest(info.run) or info.checkpoint)
        loop = settings.load(config_class(drafter_name(info.run)), info.run / CONFIG).train
    except HiddenstoreError as error:
        return f", but {error.message}"
    words = ["--resume", f"train.max_steps={max(2 * newest.step, 100)}"]
    words += ["train.patience=none"] if BestCheckpoints(loop, newest.standing).is_out_of_patience else []
    return f": {shlex.join(['hiddenstore', 'train', info.spec.store, '-o', str(info.run), *words])}"


def acceptance_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Accepted length, by position, beside the n-gram floor."""
    length = document["ngram_accepted_length"]
    floor = "unknown: no training text"
    if length is not None:
        floor = (
            f"{length:.3f}  order {document['ngram_order']} of 1–4, from "
            f"{document['ngram_training_tokens']:,} training tokens"
        )
    accepted = f"{document['accepted_length']:.3f}  drafts of {shape_text(document)}, bonus token counted"
    by_position = positions_text(document["per_position"])
    return [("accepted length", accepted), ("by position", by_position), ("n-gram floor", floor)]


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
_OF_TEXT = ("split", "best", "untrained", "device", "same_target", "cache", "cache_bytes")
_OF_TARGET = ("target", "revision", "trust_remote_code", "adapter")


@click.command(
    "eval",
    epilog=examples(
        "hiddenstore eval run store",
        "hiddenstore eval run store --draft-len 1,3,7,5x4 --untrained --json",
        "hiddenstore eval run store --draft-len 1,2,3,5 --costs --target ./target    # which length pays here",
        "hiddenstore eval --engine vllm --server http://127.0.0.1:8000 --prompts mt_bench.jsonl --markdown table.md",
        "hiddenstore eval --serve drafter --target ./target --prompts mt_bench.jsonl --rounds 5",
        "hiddenstore eval --serve drafter --target ./target --prompts mt_bench.jsonl --draft-len 1,3    # which pays",
        "hiddenstore eval --method ngram --engine llamacpp --target target.gguf --prompts mt_bench.jsonl",
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
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="With and without, in turn. Default: 1; of 2 draft lengths 4, one more for twice as many.",
)
@click.option("--serve", "drafter", metavar="DIR", help="Start both servers here, of --target with and without DIR.")
@click.option("--method", metavar="M", help="Start both so: with ngram, suffix or mtp and no DIR, or as what DIR is.")
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
@click.option("--temperature", type=FiniteRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--concurrency", type=click.IntRange(min=1), default=1, show_default=True, help="At a time.")
@same_target_option
@cache_options
@click.option("--markdown", type=click.Path(dir_okay=False), metavar="FILE", help="Also write the table there.")
@common_options
def evaluate(
    run: str | None,
    store: str | None,
    shapes: "tuple[DraftShape, ...]",
    costs: bool,
    engine: str | None,
    adapter: str | None,
    **options: Any,
) -> None:
    """How many tokens a target forward yields, simulated over recorded text or measured on a running server.

    RUN is a training run or one of its checkpoints. The text is walked as a server drafts it: each draft starts where
    the last one ended. Beside it stand the average over all slots and the n-gram floor.

    With --engine, a server that is already up answers --prompts: MT-Bench, GSM8K or HumanEval files as published, or
    JSONL with `prompt` or `messages` and a `task`. Accepted length comes from the server's own counters. --rounds asks
    the server and its --baseline-server in turn; answers that differ are listed with the gap of the logits there.
    --serve with several --draft-len measures a server of each in turn, and DIR drafts the fastest from then on, if it
    was faster than no drafter in every one of at least three rounds.
    """
    of_text = {name: options.pop(name) for name in _OF_TEXT}
    if engine is not None or options["drafter"] is not None or options["method"] is not None:
        if run is not None or of_text["cache"] is not None:
            raise click.UsageError("--engine and --serve measure servers: leave RUN, STORE and --cache out")
        _refuse((*_OF_TEXT, "costs", "adapter"), "--engine and --serve measure servers, this is for RUN and STORE")
        from trainer.cli.servers import ServerOptions, measure_servers
        from trainer.evaluate.rounds import rounds_for

        draft_lens = _chains(shapes)
        options["rounds"] = options["rounds"] or rounds_for(len(draft_lens))
        measure_servers(ServerOptions(engine or "vllm", draft_lens=draft_lens, **options))
    elif run is None or store is None or options["servers"]:
        raise click.UsageError("expected RUN and STORE, or --engine with --server and --prompts")
    elif costs and options["target"] is None:
        raise click.UsageError("--costs are measured on the target: give --target T")
    elif costs and all(shape.width > 1 for shape in shapes):
        raise click.UsageError("--costs are measured of chains: give --draft-len 1,2,3,5")
    else:
        of_servers = options.keys() - set(_OF_TARGET)
        _refuse(of_servers, "RUN and STORE are walked, this is for servers: --engine or --serve")
        target = None
        if costs:
            from hiddenstore.targets.folder import open_target

            location, revision, trusts = (options[name] for name in ("target", "revision", "trust_remote_code"))
            target = open_target(location, revision, None, trusts, adapter)
        else:
            _refuse(_OF_TARGET, "no target is loaded to walk text, only for --costs")
        _simulate(run, store, shapes, target, **of_text)


def _chains(shapes: "tuple[DraftShape, ...]") -> tuple[int, ...]:
    """The lengths that the command line names for servers, none where it names none."""
    if not _is_given("shapes"):
        return ()
    if tree := next((shape for shape in shapes if shape.width > 1), None):
        raise click.UsageError(f"--draft-len {tree.length}x{tree.width}: a server that is started here drafts chains")
    return tuple(shape.length for shape in shapes)


def _is_given(name: str | None) -> bool:
    source = None if name is None else click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def _refuse(names: Collection[str], reason: str) -> None:
    """Refuse options of the command line that would be left unread."""
    parameters = click.get_current_context().command.params
    given = [one.opts[0] for one in parameters if one.name in names and _is_given(one.name)]
    if given:
        raise click.UsageError(f"{', '.join(given)}: {reason}")


def _simulate(
    run: str,
    store: str,
    shapes: "tuple[DraftShape, ...]",
    target: "TargetFolder | None",
    *,
    split: "Split",
    best: bool,
    untrained: bool,
    device: str,
    same_target: bool,
    cache: str | None,
    cache_bytes: int,
) -> None:
    from hiddenstore.console.progress import Progress
    from hiddenstore.store import Store
    from hiddenstore.targets.load import pick_device
    from trainer.evaluate import simulate
    from trainer.evaluate.target import load_live_target
    from trainer.train.checkpoint import best as best_checkpoint
    from trainer.train.run_folder import describe, load_drafter, training_store
    from trainer.train.storage import through_cache

    if best:
        run = str(best_checkpoint(Path(run)))
    path, snapshot = split_snapshot(store)
    info, text = describe(run), Store.open(through_cache(path, cache, cache_bytes), snapshot)
    trained_on = training_store(info)
    _require_its_target(run, info, text, trained_on, same_target)
    device = pick_device(device)
    head, final_norm = text.head(), text.capture.final_norm
    drafters = [
        load_drafter(run, device, head=head, final_norm=final_norm, untrained=fresh)
        for fresh in ([False, True] if untrained else [False])
    ]
    shapes, live = shapes_of(drafters[0], shapes), None
    if target is not None:
        live = load_live_target(target, info.spec.drafter.aux_layers, info.spec.target, device, None, same_target)
    total = sum(entry.tokens for _, entry in text.entries if entry.split == split)
    with Progress("eval", total=total, unit="tokens") as progress:
        results = simulate.evaluate(drafters, text, split, shapes, device=device, on_pack=progress.advance)
    if trained_on is None:
        output().warn(f"{info.lost_store}: the n-gram floor is made from the training split of {store}")
    floor = simulate.floor(trained_on or text, results[0].texts, shapes[-1].length, split)
    sweep = [tally.row() | {"slot_accepted_length": tally.slot_accepted_length} for tally in results[0].tallies]
    document: dict[str, Any] = {"run": run, "step": drafters[0].step, "store": store, "split": split, **sweep[-1]}
    document |= {"samples": len(results[0].texts), "tokens": results[0].tally.tokens, "sweep": sweep}
    document |= {**floor_members(floor), "ngram_per_order": list(floor.per_order)}
    document["untrained_accepted_length"] = results[1].tally.accepted_length if untrained else None
    if live is not None:
        document |= _with_costs(document["sweep"], drafters[0], live, results[0].texts[0][0].tolist())
        document |= {"dtype": live.identity.dtype, "export_dtype": info.spec.target.dtype}
    output().data(document, human=lambda: _show_simulated(document))
    if live is not None:
        _keep_what_pays(document, info.run)
    judge(document, info, trained_on)
    _say_what_is_next(run, text, path)


def _say_what_is_next(run: str, text: "Store", path: str) -> None:
    """`decode` reads the prompts of a validation split, which a small store lacks."""
    from hiddenstore.targets.identity import target_words

    if any(entry.split == "validation" for _, entry in text.entries):
        output().hint("hiddenstore", "decode", run, *target_words(text.capture.target), "--prompts", path)
    else:
        output().hint("hiddenstore", "export", run, "--engine", "vllm", "-o", "drafter")


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
    refuse_target(
        differences, problem, cast_hint(differences, shlex.join(["hiddenstore", "eval", str(run), info.spec.store]))
    )
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


def _keep_what_pays(document: dict[str, Any], run: Path) -> None:
    """Leave the best length for export; where none pays in this process it says nothing of an engine, which drafts for
    less, and an earlier choice goes."""
    from trainer.evaluate.cost import forget, keep

    if document["speedup"] > 1:
        keep(run, document["step"], document, document["dtype"])
        return
    forget(run)
    output().warn(
        f"no draft length pays on this machine: the best, {document['best_draft_len']}, gives "
        f"{document['speedup']:.2f}x of plain decoding in this process; export keeps its own length, and "
        "hiddenstore eval --serve DRAFTER measures an engine"
    )


def _show_simulated(document: dict[str, Any]) -> None:
    from hiddenstore.console.text import plural

    rows = acceptance_rows(document)
    rows.insert(1, ("slot average", length_text(document["slot_accepted_length"])))
    if document["untrained_accepted_length"] is not None:
        rows.append(("untrained", f"{document['untrained_accepted_length']:.3f}"))
    if "best_draft_len" in document:
        best = f"drafts of {document['best_draft_len']}: {document['speedup']:.2f}x of plain decoding on this machine"
        dtype = document["dtype"]
        takes = "export takes it" if dtype == document["export_dtype"] else f"export --dtype {dtype} takes it"
        rows.append(("pays", f"{best}; {takes}") if document["speedup"] > 1 else ("best", best))
    samples = plural(document["samples"], document["split"] + " sample")
    rows.append(("walked", f"{samples}: {document['drafts']:,} drafts, {document['tokens']:,} tokens"))
    output().pairs(rows)
    if len(document["sweep"]) > 1:
        head = ["draft of", ">accepted length", ">slot average", ">drafts"]
        cells = [
            [shape_text(row), f"{row['accepted_length']:.3f}", length_text(row["slot_accepted_length"]), row["drafts"]]
            for row in document["sweep"]
        ]
        if "best_draft_len" in document:
            head += [">ms a draft", ">speed"]
            for line, row in zip(cells, document["sweep"], strict=True):
                line += [f"{1000 * row['draft_s']:.0f}", f"{row['speedup']:.2f}x"] if "draft_s" in row else ["–", "–"]
        output().table(head, cells)


def length_text(value: float | None) -> str:
    """``1.234``; a dash where nothing was measured."""
    return "–" if value is None else f"{value:.3f}"
