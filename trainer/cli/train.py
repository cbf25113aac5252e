"""``hiddenstore train``."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.console.output import common_options, examples, output
from hiddenstore.errors import HiddenstoreError, Kind
from trainer.drafters import DRAFTERS
from trainer.presets import preset_names

if TYPE_CHECKING:
    from trainer.train.loop import TrainReport

_REFUSED_BY_DISK = {Kind.DISK_FULL, Kind.IO_ERROR, Kind.PERMISSION_DENIED}
_REPORTED_BY_RANK_0 = {Kind.ANOTHER_RANK, Kind.INTERRUPTED, Kind.LOSS_NOT_FINITE, Kind.LOSS_STAYS_HIGH}


class _Train(click.Command):
    """Its settings can be checked before the store exists: a `hiddenstore.cli.inner.Checked`."""

    def check(self, **params: Any) -> None:
        from trainer.presets import settings_file
        from trainer.settings import check_settings

        file = None if params["file"] is None else settings_file(params["file"])
        check_settings(params["drafter"], file, params["words"])


@click.command(
    cls=_Train,
    epilog=examples(
        "hiddenstore train STORE -o runs/first",
        "hiddenstore train STORE -o runs/first loss.steps=3 optim.lr=5e-3 train.max_steps=600",
        "hiddenstore train STORE -o runs/second -c eagle3.1 train.init_from=runs/first",
        "hiddenstore train STORE -o runs/first --resume",
        "torchrun --nproc-per-node 8 --no-python hiddenstore train STORE -o runs/first",
    ),
)
@click.argument("store")
@click.argument("words", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option("-o", "--out", "run", required=True, metavar="RUN", help="Folder of the run.")
@click.option("--drafter", metavar="NAME", help=f"{', '.join(DRAFTERS)}; eagle3 where nothing else names one.")
@click.option(
    "-c", "--config", "file", metavar="FILE", help=f"YAML settings, or a preset by name: {', '.join(preset_names())}."
)
@click.option("--resume", is_flag=True, help="Continue RUN exactly where its newest checkpoint stands.")
@common_options
def train(store: str, words: tuple[str, ...], run: str, drafter: str | None, file: str | None, resume: bool) -> None:
    """Train a drafter from a store; the target is not needed."""
    from hiddenstore.fs.seam import storage_error
    from hiddenstore.process import from_environment
    from trainer.parallel.group import use_all_cores
    from trainer.train.loop import train as train_run

    use_all_cores()
    is_first = from_environment().is_first
    if not is_first:
        output().mode = "silent"
    try:
        report = train_run(store, run, drafter=drafter, file=file, words=words, resume=resume)
    except OSError as error:
        refusal = storage_error(error, error.filename or run)
        if refusal.kind in _REFUSED_BY_DISK and Path(run, "run.json").is_file():
            refusal.hint = shlex.join(["hiddenstore", "train", store, "-o", run, "--resume"])
        raise refusal from (None if refusal is error else error)
    except HiddenstoreError as error:
        if is_first or error.kind not in _REPORTED_BY_RANK_0:
            raise
        raise click.exceptions.Exit(error.exit_code) from error
    output().data(_document(report), human=lambda: output().pairs(_rows(report)), quiet=str(report.checkpoint))
    if report.stopped_early:
        output().note("stopped early: no better validation within train.patience; train.patience=N --resume goes on")
    elif report.was_finished:
        output().note(f"nothing to do: {run} finished at step {report.steps:,}; more steps: train.max_steps=N --resume")
    is_best = report.best_checkpoint in (None, report.checkpoint)
    output().hint("hiddenstore", "eval", run, store, *([] if is_best else ["--best"]))


def _document(report: "TrainReport") -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(report).items()}


def _rows(report: "TrainReport") -> list[tuple[str, str]]:
    from hiddenstore.console.text import percent

    rows = [
        ("drafter", f"{report.trainable_parameters:,} trainable parameters"),
        ("draft vocabulary", f"covers {percent(report.vocab_coverage)} of the supervised tokens"),
        ("steps", f"{report.steps:,}" + ("" if report.was_finished else f" in {report.seconds:,.0f} s")),
        ("loss", f"{report.loss:.4f}  of the last step, depths weighted"),
        ("accuracy by depth", " ".join(f"{a:.3f}" for a in report.acc)),
    ]
    if report.validation:
        rows.append(("on validation", " ".join(f"{a:.3f}" for a in report.validation["acc"])))
    if report.validation.get("accepted_length") is not None:
        rows.append(("accepted length", f"{report.validation['accepted_length']:.3f} on validation, chains of 3"))
    if report.skipped_steps:
        rows.append(("skipped", f"{report.skipped_steps:,} steps whose loss was a spike: see metrics.jsonl"))
    rows.append(("checkpoint", str(report.checkpoint)))
    if report.best_checkpoint not in (None, report.checkpoint):
        rows.append(("best checkpoint", str(report.best_checkpoint)))
    return rows
