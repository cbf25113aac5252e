"""``hiddenstore vocab``."""

import click

from hiddenstore.cli.output import common_options, examples, output


@click.command(
    epilog=examples(
        "hiddenstore vocab STORE --size 32000 -o vocab.safetensors",
        "hiddenstore train STORE -o RUN drafter.vocab_file=vocab.safetensors",
    )
)
@click.argument("store")
@click.option("--size", type=click.IntRange(min=1), default=32000, show_default=True, help="Tokens the drafter knows.")
@click.option("-o", "--out", metavar="FILE", help="Write t2d and d2t as safetensors; without it only say coverage.")
@click.option("--file", "existing", metavar="FILE", help="Measure an existing d2t.pt or vocab.safetensors instead.")
@common_options
def vocab(store: str, size: int, out: str | None, existing: str | None) -> None:
    """Choose the draft vocabulary: the most frequent supervised tokens of the training split."""
    from pathlib import Path

    from hiddenstore.cli.terminal import percent
    from hiddenstore.errors import ConflictError
    from hiddenstore.store import Store
    from trainer.run.checkpoint import write_atomically
    from trainer.vocab import DraftVocab, count_store, coverage

    opened = Store.open(store)
    target_size = opened.capture.target.vocab_size
    counts = count_store(opened, target_size)
    if existing is not None:
        chosen = DraftVocab.load(existing, target_size)
    else:
        chosen = DraftVocab.of_counts(counts, min(size, target_size))
    if out is not None:
        data, path = chosen.save_bytes(), Path(out)
        if path.exists() and path.read_bytes() != data:
            raise ConflictError(f"{path} exists and holds something else", kind="file-exists")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    covered = coverage(chosen, counts)
    document = {
        "size": chosen.size,
        "target_size": target_size,
        "coverage": covered,
        "supervised_tokens": int(counts.sum()),
        "distinct_tokens": int((counts > 0).sum()),
        "path": out,
    }
    output().data(
        document,
        human=lambda: output().pairs(
            [
                ("draft vocabulary", f"{chosen.size:,} of {target_size:,} tokens"),
                ("coverage", f"{percent(covered)} of {document['supervised_tokens']:,} supervised tokens"),
                ("distinct tokens", f"{document['distinct_tokens']:,}"),
                *([("written", out)] if out else []),
            ]
        ),
    )
    if out is not None:
        output().hint("hiddenstore", "train", store, "-o", "RUN", f"drafter.vocab_file={out}")
