"""To others and from them: push and pull."""

import hashlib
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.care import copy_with_progress
from hiddenstore.cli.words import layers_option, open_store
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.text import plural, size
from hiddenstore.errors import ConfigError, Kind, NotFoundError
from hiddenstore.files.damage import raise_refusal
from hiddenstore.files.layout import STORE_JSON, kind_of, missing, split_snapshot
from hiddenstore.files.lock import FolderLock
from hiddenstore.fs import is_address, open_filesystem
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.publish import make_folder

if TYPE_CHECKING:
    from hiddenstore.share.remote import Advance, Begin, Remote
    from hiddenstore.store import Store


@click.command(
    epilog=examples(
        "hiddenstore push my-store hf://datasets/me/qwen3-8b-states",
        "hiddenstore push my-store hf://datasets/me/part --layers 2,18,33 --split train --where 'tokens<=2048'",
        "hiddenstore push drafter hf://me/qwen3-8b-eagle3 --results eval.json --public",
        "hiddenstore push my-store s3://bucket/my-store",
    )
)
@click.argument("source", type=click.Path(), metavar="SOURCE")
@click.argument("address", metavar="URL")
@layers_option
@click.option("--where", multiple=True, metavar="TEST", help="Only samples with tokens>4096, supervised>0, …")
@click.option("--split", type=click.Choice(["train", "validation"]), help="Only samples of this split.")
@click.option(
    "--staging",
    type=click.Path(),
    metavar="DIR",
    help="Where a copy to push is made; it stays, as the next push needs it. Default: beside SOURCE.",
)
@click.option("--public", is_flag=True, help="A new repository of the hub that everybody can read. Default: private.")
@click.option("--results", metavar="FILE", help="What eval or decode printed with --json, for the card.")
@click.option(
    "--sample", type=click.IntRange(0, 20), default=0, metavar="N", help="Show the text of N samples on the card."
)
@click.option("--card", type=click.Path(), metavar="FILE", help="A README.md of your own in place of the made one.")
@common_options
def push(
    source: str, address: str, public: bool, results: str | None, sample: int, card: str | None, **part: Any
) -> None:
    """Push SOURCE, a store or an exported drafter, to hf://datasets/OWNER/NAME, hf://OWNER/NAME or s3://BUCKET/PATH.

    A store is shared as WebDataset, with its indexes, a card and SHA256SUMS. Its token ids are its text: whoever can
    read it can read the conversations. The same command again continues where it stopped.
    """
    from hiddenstore.share.cards import accepted_length, drafter_card, store_card
    from hiddenstore.share.hub import HubRemote, open_remote
    from hiddenstore.share.push import drafter_files, push_drafter, push_store, require_place

    place = split_snapshot(source)[0]
    is_store = is_address(place) or kind_of(place) == "store"
    is_drafter = not is_store and (kind_of(place) == "drafter" or any(Path(place).glob("*.gguf")))
    if not is_drafter and (not is_store or open_filesystem(place).size(STORE_JSON) is None):
        raise _nothing_to_push(place)
    if not is_store and (sample or any(part.values())):
        raise click.UsageError("--layers, --where, --split, --staging and --sample are of stores")
    if card is not None and (sample or results is not None):
        raise click.UsageError("--results and --sample are for the card that is made; --card is one of your own")
    remote = open_remote(address)
    if public and not isinstance(remote, HubRemote):
        raise click.UsageError("--public is of the hub: who may read a bucket is said where it was made")
    require_place(remote, place, is_store)
    measured = "" if results is None else accepted_length(results, None if is_store else Path(source))
    text = None if card is None else _read_card(card)
    with ExitStack() as made:
        if is_store:
            store = _staged(open_store(source), remote, part, made)
            text = store_card(store, address, measured, sample) if text is None else text
            report = push_store(store, remote, text, public, _shown(made))
        else:
            files, others = drafter_files(Path(source))
            if others:
                output().warn(f"{', '.join(others)}: no part of an exported drafter, and not pushed")
            text = drafter_card(Path(source), files, address, measured) if text is None else text
            report = push_drafter(Path(source), remote, text, public, _shown(made))
    kind = "store" if is_store else "drafter"
    document = {"source": source, "address": remote.address, "kind": kind, "sample": sample, **vars(report)}
    sent = f"{size(report.bytes_sent)} in {plural(report.files_sent, 'file')} sent"
    there = f", {size(report.bytes - report.bytes_sent)} there already" if report.bytes > report.bytes_sent else ""
    output().data(document, human=lambda: output().well(f"{remote.address}: {sent}{there}"), quiet="")
    output().hint("hiddenstore", "pull", remote.address, "DEST")


def _nothing_to_push(place: str) -> NotFoundError:
    kind = None if is_address(place) else kind_of(place)
    if is_address(place) or kind not in (None, "run"):
        return missing("store", place)
    what, named = ("a training run", shlex.quote(place)) if kind == "run" else ("neither a store nor a drafter", "RUN")
    return NotFoundError(
        f"{place} is {what}; stores and exported drafters are pushed",
        kind=Kind.PATH_MISSING,
        hint=f"hiddenstore export {named} --engine vllm -o DRAFTER makes a drafter",
    )


def _staged(store: "Store", remote: "Remote", part: Mapping[str, Any], made: ExitStack) -> "Store":
    """The store to push: the one given, or what had to be copied of it, into which nobody else copies until ``made``
    ends."""
    from hiddenstore.inspect.samples import parse_where
    from hiddenstore.share.hub import HubRemote
    from hiddenstore.share.push import open_staging, staging_reason

    where, split, layers, staging = part["where"], part["split"], part["layers"], part["staging"]
    reason = staging_reason(store, is_part=bool(where or split or layers or store.is_frozen))
    if reason is None:
        return store
    keep = parse_where(where, split) if where or split else None
    words = repr((store.fs.address, store.catalog.snapshot, where, split, layers))
    name = f"{store.path.rstrip('/').rpartition('/')[2]}.push-{hashlib.sha256(words.encode()).hexdigest()[:8]}"
    beside = Path(name) if is_address(store.path) else Path(store.path).absolute().with_name(name)
    place = Path(staging or beside)
    output().note(f"{reason}: it is copied to {place} first, which stays for the next push")
    make_folder(place)
    made.callback(LocalFilesystem(place).remove_empty, ".")
    # What another choice brought meanwhile would be pushed too.
    made.enter_context(FolderLock(place, "staging folder", "wait for it, or --staging ANOTHER")).take()
    opened = open_staging(store, place, keep, layers, isinstance(remote, HubRemote))
    for note in opened.notes:
        output().warn(note)
    copy_with_progress(opened)
    return open_store(opened.destination.path)


@click.command(
    epilog=examples(
        "hiddenstore pull hf://datasets/me/qwen3-8b-states my-store",
        "hiddenstore pull hf://me/qwen3-8b-eagle3@main drafter",
    )
)
@click.argument("address", metavar="URL")
@click.argument("dest", type=click.Path(), metavar="DEST")
@common_options
def pull(address: str, dest: str) -> None:
    """Bring a store or a drafter that was pushed to URL into the folder DEST; hf://…@REVISION reads an older one.

    Every file is compared with its sha256 while it comes. The same command again continues, or brings what was added.
    """
    from hiddenstore.share.hub import open_remote
    from hiddenstore.share.pull import DRAFTER_JSON
    from hiddenstore.share.pull import pull as run_pull
    from hiddenstore.share.remote import restore_hint
    from hiddenstore.targets.checkpoint import read_object

    if is_address(dest):
        hint = f"{shlex.join(['hiddenstore', 'pull', address])} STORE && hiddenstore copy STORE {shlex.quote(dest)}"
        raise ConfigError("pull writes to this machine's disk", kind=Kind.SCHEME_UNSUPPORTED, hint=hint)
    remote = open_remote(address)
    with ExitStack() as made:
        report = run_pull(remote, Path(dest), _shown(made))
    kind = kind_of(dest)
    if report.replaced:
        output().warn(f"{plural(len(report.replaced), 'file')} had other bytes and came again: {report.replaced[0]} …")
    if report.lossy:
        units = plural(len(report.lossy), "unit")
        mend = f"`{restore_hint(remote, 'PUSHED', dest)}` brings them back"
        output().warn(f"a repair of {dest} dropped samples of {units} that {remote.address} holds: {mend}")
    if report.removed:
        output().warn(f"removed, as the drafter has them no more: {', '.join(report.removed)}")
    document = {"address": remote.address, "dest": dest, "kind": kind, **vars(report)}
    came = f"{size(report.bytes_read)} came, {plural(report.files, 'file')} as they were pushed"
    output().data(document, human=lambda: output().well(f"{dest}: {came}"), quiet="")
    if kind == "store":
        open_store(dest)
        output().hint("hiddenstore", "verify", dest, "--full")
    else:
        about = Path(dest, DRAFTER_JSON)
        engine = (read_object(about) or {}).get("engine") if about.is_file() else None
        output().hint("hiddenstore", "serve", dest, "--target", "TARGET", "--engine", str(engine or "vllm"))


def _read_card(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise_refusal(error, path)
        raise ConfigError(f"--card: {path} cannot be read: {error}", kind=Kind.INPUT_UNREADABLE) from error


def _shown(made: ExitStack) -> "Begin":
    """A bar for each pass over the bytes, the one before it closed; told from several threads."""
    from hiddenstore.console.progress import Progress

    bars, lock = made.enter_context(ExitStack()), Lock()

    def begin(label: str, total: int) -> "Advance":
        bars.close()
        bar: Any = bars.enter_context(Progress(label, total, "bytes"))

        def advance(count: int) -> None:
            with lock:
                bar.advance(count)

        return advance

    return begin
