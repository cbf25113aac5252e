"""``hiddenstore vocab``."""

from pathlib import Path
from typing import Any

import click

from hiddenstore.console.output import common_options, examples, output
from hiddenstore.errors import ConfigError, ConflictError, Kind

CURVE_WIDTH = 40


@click.command(
    epilog=examples(
        "hiddenstore vocab STORE --curve",
        "hiddenstore vocab STORE --size 32000 -o vocab.safetensors",
        "hiddenstore train STORE -o RUN drafter.vocab_file=vocab.safetensors",
    )
)
@click.argument("store")
@click.option("--size", type=click.IntRange(min=1), default=32000, show_default=True, help="Tokens the drafter knows.")
@click.option("-o", "--out", metavar="FILE", help="Write t2d and d2t as safetensors; without it only say coverage.")
@click.option("--file", "existing", metavar="FILE", help="Measure an existing d2t.pt or vocab.safetensors instead.")
@click.option("--curve", is_flag=True, help="Show what every size would cover.")
@click.option("--plot", metavar="FILE", type=click.Path(), help="Draw the curve as PNG or SVG.")
@common_options
def vocab(store: str, size: int, out: str | None, existing: str | None, curve: bool, plot: str | None) -> None:
    """Choose the draft vocabulary: the most frequent supervised tokens of the training split.

    A drafter never proposes a token outside it: 99 % coverage means that one token in a hundred ends a draft. The curve
    says how much each larger vocabulary, and so each larger LM head of the drafter, would add.
    """
    from hiddenstore.store import Store
    from trainer.vocab import DraftVocab, count_store, coverage, coverage_curve, curve_sizes

    opened = Store.open(store)
    target_size = opened.capture.target.vocab_size
    counts = count_store(opened, target_size)
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
        output().hint("hiddenstore", "train", store, "-o", "RUN", f"drafter.vocab_file={out}")
    elif curve:
        output().hint("hiddenstore", "vocab", store, "--size", "N", "-o", "vocab.safetensors")


def _write(path: Path, data: bytes) -> None:
    from hiddenstore.fs.publish import replace_file

    if path.exists() and path.read_bytes() != data:
        raise ConflictError(f"{path} exists and holds something else", kind=Kind.FILE_EXISTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)


def _show(document: dict[str, Any], with_curve: bool) -> None:
    from hiddenstore.console.text import bar, percent

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
        from hiddenstore.doctor.installation import install_command

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
