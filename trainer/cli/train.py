"""``hiddenstore vocab`` and ``hiddenstore train``."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import BaseModel
from rich.padding import Padding
from rich.text import Text

from hiddenstore.cli.peers import translated
from hiddenstore.cli.words import OUT, STORE, Name, cache_options, open_store
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.text import Column, bar, percent
from hiddenstore.errors import ConfigError, ConflictError, HiddenstoreError, Kind
from hiddenstore.files.layout import DATA_JSON, STORE_JSON, kind_of, missing, split_snapshot
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.publish import make_folder, replace_file
from hiddenstore.fs.seam import storage_error
from hiddenstore.process import from_environment
from hiddenstore.settings import assignments, check, key_paths
from trainer.drafters import ALIASES, DRAFTERS
from trainer.presets import preset_names, settings_file

if TYPE_CHECKING:
    import numpy as np

    from trainer.train.loop import TrainReport

_REFUSED_BY_DISK = {Kind.DISK_FULL, Kind.IO_ERROR, Kind.PERMISSION_DENIED}
_REPORTED_BY_RANK_0 = {Kind.ANOTHER_RANK, Kind.INTERRUPTED, Kind.LOSS_NOT_FINITE, Kind.LOSS_STAYS_HIGH}


class _Drafter(Name):
    """A kind of drafter, by its name or one it is trained under."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(ALIASES.get(value, value), param, ctx)


class _Train(click.Command):
    """Its settings can be checked before the store exists: a `hiddenstore.cli.inner.Checked`."""

    def check(self, **params: Any) -> None:
        _refuse_settings(*_in_our_words(params["drafter"], params["file"], params["words"]))


@click.command(
    cls=_Train,
    epilog=examples(
        "hiddenstore train STORE -o runs/first",
        "hiddenstore train STORE -o runs/first loss.steps=3 optim.lr=5e-3 train.max_steps=600",
        "hiddenstore train STORE -o runs/second -c eagle3.1 train.init_from=runs/first",
        "hiddenstore train STORE -o runs/mtp --drafter mtp --target TARGET",
        "hiddenstore train STORE -o runs/long --follow train.max_steps=20000",
        "hiddenstore train STORE --settings",
        "hiddenstore train STORE -o runs/first --resume",
        "hiddenstore train STORE -o runs/again --resume-from runs/first/checkpoints/step-3000",
        "torchrun --nproc-per-node 8 --no-python hiddenstore train STORE -o runs/first",
    ),
)
@click.argument("store", type=STORE)
@click.argument("words", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option("-o", "--out", "run", type=OUT, metavar="RUN", help="Folder of the run; required but for --settings.")
@click.option("--settings", is_flag=True, help="List every setting with its value and where it comes from, and stop.")
@click.option(
    "--drafter",
    type=_Drafter(DRAFTERS.require, [*DRAFTERS, *ALIASES]),
    metavar="NAME",
    help=f"{', '.join(DRAFTERS)} (eagle2 is eagle1); eagle3 where nothing else names one.",
)
@click.option(
    "-c",
    "--config",
    "file",
    metavar="FILE",
    help=f"YAML settings, Model Optimizer's or AutoModel's too, or a preset: {', '.join(preset_names())}.",
)
@click.option("--resume", is_flag=True, help="Continue RUN exactly where its newest checkpoint stands.")
@click.option(
    "--follow", is_flag=True, help="Each epoch reads what is collected by then; needs train.max_steps (train.follow)."
)
@click.option("--resume-from", "earlier", metavar="CHECKPOINT", help="Go on in a new RUN from RUN/checkpoints/step-N.")
@click.option("--target", metavar="TARGET", help="Start from the MTP layer of this checkpoint; no more of it is read.")
@click.option("--mirror", metavar="URL", help="Copy each checkpoint there; --resume begins from it where RUN is gone.")
@cache_options
@common_options
def train(store: str, words: tuple[str, ...], run: str | None, settings: bool, **options: Any) -> None:
    """Train a drafter from a store; the target is not needed.

    --target is for --drafter mtp: the layer as it was before training is RUN/start, a run for eval, decode and export.

    --resume-from leaves the run of CHECKPOINT as it is: RUN becomes a copy that stands where CHECKPOINT stood, weights,
    optimizer and place in the data, and goes on exactly; train.* words may change.
    """
    words = (*words, "train.follow=true") if options.pop("follow") else words
    if settings:
        others = [name for name in ("resume", "earlier", "mirror", "cache", "target") if options[name]]
        if run is not None or others:
            raise click.UsageError(
                "--settings shows what a new run would take: without -o, --resume, --mirror, --cache, --target"
            )
        drafter, file, words = _in_our_words(options["drafter"], options["file"], words)
        _refuse_settings(drafter, file, words)
        show_settings(store, drafter, None if file is None else settings_file(file), words)
        return
    if run is None:
        raise click.MissingParameter(param_hint="'-o' / '--out'", param_type="option")
    _train(store, words, run, **options)


def _train(
    store: str,
    words: tuple[str, ...],
    run: str,
    drafter: str | None,
    file: str | None,
    resume: bool,
    earlier: str | None,
    target: str | None,
    **storage: Any,
) -> None:
    rank = from_environment()
    if not rank.is_first:
        output().mode = "silent"
    drafter, file, words = _in_our_words(drafter, file, words, rank.world_size)
    if earlier is not None and resume:
        raise click.UsageError("--resume continues RUN where it stands; --resume-from makes a new one")
    resume = resume or earlier is not None
    if target is not None and resume:
        raise click.UsageError("--target is where a new run starts; --resume and --resume-from go on from a checkpoint")
    drafter = drafter or (None if target is None else "mtp")
    if not resume:
        _refuse_settings(drafter, file, words)
    from hiddenstore.threads import use_all_cores
    from trainer.train.loop import train as train_run
    from trainer.train.run_folder import TrainOptions

    use_all_cores()
    try:
        path, snapshot = split_snapshot(store)
        prepare = partial(_prepare, earlier, target, run, path, drafter)
        named: dict[str, Any] = {"drafter": drafter, "file": file, "words": words, "snapshot": snapshot}
        report = train_run(path, run, resume=resume, prepare=prepare, **named, **storage)
    except OSError as error:
        refusal = storage_error(error, error.filename or run)
        if refusal.kind in _REFUSED_BY_DISK and Path(run, "run.json").is_file():
            refusal.hint = TrainOptions(store, Path(run), **storage).resume_command
        raise refusal from (None if refusal is error else error)
    except HiddenstoreError as error:
        if rank.is_first or error.kind not in _REPORTED_BY_RANK_0:
            raise
        raise click.exceptions.Exit(error.exit_code) from error
    _show_report(report, run, store)


def _show_report(report: "TrainReport", run: str, store: str) -> None:
    output().data(_document(report), human=lambda: output().pairs(_rows(report)), quiet=str(report.checkpoint))
    if report.stopped_early:
        output().note("stopped early: no better validation within train.patience; train.patience=N --resume goes on")
    elif report.was_finished:
        output().note(f"nothing to do: {run} finished at step {report.steps:,}; more steps: train.max_steps=N --resume")
    is_best = report.best_checkpoint in (None, report.checkpoint)
    split = [] if report.validation_samples else ["--split", "train"]
    output().hint("hiddenstore", "eval", run, store, *split, *([] if is_best else ["--best"]))


def _prepare(earlier: str | None, target: str | None, run: str, store: str, drafter: str | None) -> tuple[str, ...]:
    """Make the run that goes on from another's checkpoint; where one starts that trains a part of its target, as words
    of ours."""
    if earlier is not None:
        from trainer.train.run_folder import branch

        branch(Path(earlier), Path(run))
    if target is None or drafter is None:
        return ()
    from trainer.export.published import begin_at_target

    return (f"train.init_from={begin_at_target(target, run, store, drafter)}",)


def _in_our_words(
    drafter: str | None, file: str | None, words: tuple[str, ...], ranks: int = 1
) -> tuple[str | None, str | None, tuple[str, ...]]:
    """Drafter, file and words; a file of another project as words of ours, its map printed."""
    theirs = None if file is None else translated(settings_file(file), words, ranks)
    if theirs is None:
        return drafter, file, words
    theirs.show()
    return drafter or theirs.drafter, None, theirs.words()


def _refuse_settings(drafter: str | None, file: str | None, words: tuple[str, ...]) -> None:
    """Wrong settings cost what it takes to see them: those that no drafter has a part in do not wait for torch."""
    from trainer.config import TrainConfig

    path = None if file is None else settings_file(file)
    if not any(assignments(section, path, words) for section in ("drafter", "loss")):
        check(TrainConfig, path, words)
    from trainer.settings import check_settings

    check_settings(drafter, path, words)


def _document(report: "TrainReport") -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(report).items()}


def _rows(report: "TrainReport") -> list[tuple[str, str]]:
    rows = [
        ("drafter", f"{report.trainable_parameters:,} trainable parameters"),
        ("draft vocabulary", f"covers {percent(report.vocab_coverage)} of the supervised tokens"),
        ("steps", f"{report.steps:,}" + ("" if report.was_finished else f" in {report.seconds:,.0f} s")),
        ("loss", f"{report.loss:.4f}  of the last step, depths weighted"),
        ("accuracy by depth", " ".join(f"{a:.3f}" for a in report.acc)),
    ]
    if report.validation:
        rows.append(("on validation", " ".join(f"{a:.3f}" for a in report.validation["acc"])))
    if (length := report.validation.get("accepted_length")) is not None:
        chain = len(report.validation["per_position"])
        rows.append(("accepted length", f"{length:.3f} on validation, chains of {chain}"))
    if report.skipped_steps:
        rows.append(("skipped", f"{report.skipped_steps:,} steps whose loss was a spike: see metrics.jsonl"))
    rows.append(("checkpoint", str(report.checkpoint)))
    if report.best_checkpoint not in (None, report.checkpoint):
        rows.append(("best checkpoint", str(report.best_checkpoint)))
    return rows


CURVE_WIDTH = 40


@click.command(
    epilog=examples(
        "hiddenstore vocab STORE --curve",
        "hiddenstore vocab DATA --size 32000",
        "hiddenstore vocab STORE --size 32000 -o vocab.safetensors",
        "hiddenstore train STORE -o RUN drafter.vocab_file=vocab.safetensors",
    )
)
@click.argument("store", metavar="STORE|DATA")
@click.option("--size", type=click.IntRange(min=1), default=32000, show_default=True, help="Tokens the drafter knows.")
@click.option("-o", "--out", type=OUT, metavar="FILE", help="Write t2d and d2t as safetensors; else only say coverage.")
@click.option("--file", "existing", metavar="FILE", help="Measure an existing d2t.pt or vocab.safetensors instead.")
@click.option("--curve", is_flag=True, help="Show what every size would cover.")
@click.option("--plot", metavar="FILE", type=click.Path(), help="Draw the curve as PNG or SVG.")
@common_options
def vocab(store: str, size: int, out: str | None, existing: str | None, curve: bool, plot: str | None) -> None:
    """Choose the draft vocabulary: the most frequent supervised tokens of the training split.

    DATA is what ``hiddenstore prepare`` wrote: the vocabulary can be chosen before anything is captured. A drafter
    never proposes a token outside it: 99 % coverage means that one token in a hundred ends a draft. The curve says how
    much each larger vocabulary, and so each larger LM head of the drafter, would add.
    """
    fs = open_filesystem(split_snapshot(store)[0])
    if fs.size(STORE_JSON) is None and fs.size(DATA_JSON) is None:
        raise missing("store", fs.root)
    from trainer.vocab import DraftVocab, coverage, coverage_curve, curve_sizes

    counts, is_data = _token_counts(store)
    target_size = len(counts)
    if existing is not None:
        draft = DraftVocab.load(existing, target_size)
    else:
        draft = DraftVocab.of_counts(counts, min(size, target_size))
    distinct = int((counts > 0).sum())
    points = coverage_curve(counts, [*curve_sizes(target_size, distinct), draft.size])
    if out is not None:
        _write(Path(out), draft.save_bytes())
    if plot is not None:
        _draw(Path(plot), coverage_curve(counts, range(1, target_size + 1)), draft.size)
    document: dict[str, Any] = {
        "size": draft.size,
        "target_size": target_size,
        "coverage": coverage(draft, counts),
        "supervised_tokens": int(counts.sum()),
        "distinct_tokens": distinct,
        "path": out,
    }
    if curve or plot is not None:
        document["curve"] = [{"size": at, "coverage": share} for at, share in points]
        document["plot"] = plot
    output().data(document, human=lambda: _show(document, curve))
    if out is not None:
        output().hint("hiddenstore", "train", "STORE" if is_data else store, "-o", "RUN", f"drafter.vocab_file={out}")
    elif curve:
        output().hint("hiddenstore", "vocab", store, "--size", "N", "-o", "vocab.safetensors")


def _token_counts(location: str) -> "tuple[np.ndarray, bool]":
    """How often each token of the target is supervised in the training split of a store, or of prepared data."""
    from hiddenstore.inputs import PreparedInput
    from trainer.vocab import count_store, count_tokens

    if kind_of(location) == "data":
        prepared = PreparedInput.open(location)
        samples = ((one.input_ids, one.loss_mask) for one in prepared.samples() if one.split == "train")
        return count_tokens(samples, prepared.info.vocab_size), True
    opened = open_store(location)
    return count_store(opened, opened.capture.target.vocab_size), False


def _write(path: Path, data: bytes) -> None:
    if path.exists() and path.read_bytes() != data:
        raise ConflictError(f"{path} exists and holds something else", kind=Kind.FILE_EXISTS)
    make_folder(path.parent)
    replace_file(path, data)


def _show(document: dict[str, Any], with_curve: bool) -> None:
    output().pairs(
        [
            ("draft vocabulary", f"{document['size']:,} of {document['target_size']:,} tokens"),
            ("coverage", f"{percent(document['coverage'])} of {document['supervised_tokens']:,} supervised tokens"),
            ("distinct tokens", f"{document['distinct_tokens']:,}"),
            *([("written", document["path"])] if document["path"] else []),
            *([("plot", document["plot"])] if document.get("plot") else []),
        ]
    )
    if with_curve:
        rows = [
            (f"{point['size']:,}", f"{point['coverage']:.2%}", bar(point["coverage"], CURVE_WIDTH))
            for point in document["curve"]
        ]
        output().print()
        output().table([">size", ">coverage", ""], rows)


def _draw(path: Path, points: list[tuple[int, float]], size: int) -> None:
    from io import BytesIO

    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"{path} is neither .png nor .svg", kind=Kind.OPTION_INVALID, hint="--plot coverage.png")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        from hiddenstore.doctor import install_command

        fix = install_command("matplotlib", "plot")
        raise ConfigError(
            "--plot needs matplotlib, which is not installed", kind=Kind.NOT_INSTALLED, hint=fix
        ) from error

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True))
    axes.axvline(size, color="grey", linestyle=":", label=f"{size:,} chosen")
    axes.set(xscale="log", xlabel="draft vocabulary (tokens)", ylabel="share of supervised tokens", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    data = BytesIO()
    figure.savefig(data, format=path.suffix[1:], dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    _write(path, data.getvalue())


DEFAULT, DERIVED = "default", "store"


def show_settings(store: str, drafter: str | None, file: str | Path | None, words: Sequence[str]) -> None:
    """Print what a run with these arguments would take; nothing is written. Raises ConfigError: a wrong setting."""
    from trainer.settings import load_config, reasons, value_text
    from trainer.train.run_folder import configured_start

    opened = open_store(store)
    start = configured_start(file, words)
    config = load_config(opened, drafter, file, words, start.spec.drafter if start else None)
    name = config.drafter.name
    rows = _setting_rows(config, reasons(opened, config), file, words)
    document = {"drafter": name, "settings": rows}

    def human() -> None:
        cells = [[row["key"], value_text(row["value"]), row["origin"], row["why"]] for row in rows]
        output().table(["setting", "value", "origin", Column("what it is", wide=True)], cells)
        # Under the table, whose last column a narrow terminal cuts.
        for row in rows:
            if row["because"] is not None:
                output().print(Padding(Text(f"{row['key']}: {row['because']}"), (0, 0, 0, 2)))

    output().data(document, human=human, quiet="\n".join(f"{row['key']}={value_text(row['value'])}" for row in rows))


def _setting_rows(
    config: BaseModel, reasons: Mapping[str, str], file: str | Path | None, words: Sequence[str]
) -> list[dict[str, Any]]:
    values, rows = config.model_dump(mode="json"), []
    # The parts of a scaling are one setting, as a person gives it.
    keys = dict.fromkeys(".".join(path.split(".")[:2]) for path in key_paths(type(config)))
    for key in keys:
        section, name = key.split(".")
        set_by = [origin for origin, _ in assignments(key, file, words)]
        origin = set_by[-1] if set_by else DERIVED if key in reasons else DEFAULT
        field = type(getattr(config, section)).model_fields[name]
        why = " ".join((field.description or "").split())
        because = reasons[key] if origin == DERIVED else None
        rows.append({"key": key, "value": values[section][name], "origin": origin, "why": why, "because": because})
    return rows
