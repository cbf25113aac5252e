"""Which commands exist, found without importing what they do."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata

SECTIONS = ("Make", "Look", "Care", "Train", "System", "Added")
ENTRY_POINT_GROUP = "hiddenstore.commands"


@dataclass(frozen=True)
class CommandSpec:
    """Where a command lives and its one line in ``--help``. ``target`` is ``module:attribute``."""

    name: str
    section: str
    summary: str
    target: str


# name, section, summary. Those without a module here come from an entry point, so that nothing points upward.
_KNOWN: tuple[tuple[str, str, str, str], ...] = (
    ("demo", "Make", "The whole path on CPU with a tiny bundled target.", ""),
    ("run", "Make", "Conversations → served drafter from one recipe file; resumable.", "hiddenstore.cli.run:run"),
    ("prepare", "Make", "Conversations → tokens, loss mask and turn spans.", ""),
    ("regenerate", "Make", "Let the target rewrite the answers itself.", ""),
    ("plan", "Make", "Bytes, files and hours, before anything is written.", ""),
    ("collect", "Make", "Capture the target's hidden states into a store; resumable.", ""),
    ("import", "Make", "Another project's dump of hidden states into a store; resumable.", ""),
    ("info", "Look", "What a store holds, on one screen.", "hiddenstore.cli.look:info"),
    ("ls", "Look", "The samples of a store.", "hiddenstore.cli.look:ls"),
    ("show", "Look", "One sample: its text, what is trained on, norms per layer.", "hiddenstore.cli.look:show"),
    ("stats", "Look", "Lengths, splits and norms per layer over the whole store.", "hiddenstore.cli.look:stats"),
    ("diff", "Look", "How two stores differ: capture, samples, numbers.", "hiddenstore.cli.look:diff"),
    ("advise", "Look", "Which recipe the states can take, measured on them.", "hiddenstore.cli.advise:advise"),
    ("verify", "Care", "Every byte there, intact, and meaning what it says.", "hiddenstore.cli.care:verify"),
    ("copy", "Care", "Merge, subset or re-encode stores; resumable.", "hiddenstore.cli.care:copy"),
    ("repair", "Care", "Drop what is damaged, keep the rest; prints a plan first.", "hiddenstore.cli.care:repair"),
    ("gc", "Care", "Sweep what no commit names; prints a plan first.", "hiddenstore.cli.care:gc"),
    ("vocab", "Train", "The draft vocabulary, from supervised tokens.", ""),
    ("train", "Train", "Train a drafter from a store.", ""),
    ("import-drafter", "Train", "A published drafter as a run to start from.", ""),
    ("eval", "Train", "Accepted length on recorded text.", ""),
    ("decode", "Train", "Accepted length in real speculative decoding.", ""),
    ("export", "Train", "A drafter as an engine loads it.", ""),
    ("serve", "Train", "A drafter in an engine: the exact command and file, or run it.", ""),
    ("export-data", "Train", "A store's samples as another trainer reads them.", ""),
    ("doctor", "System", "This machine: versions, engines, disk speed.", "hiddenstore.cli.doctor:doctor"),
)

# What people type first, coming from other tools.
OTHER_WORDS: Mapping[str, str] = {
    "convert": "copy",
    "merge": "copy",
    "subset": "copy",
    "reencode": "copy",
    "cp": "copy",
    "head": "ls",
    "list": "ls",
    "cat": "show",
    "inspect": "info",
    "status": "info",
    "validate": "verify",
    "check": "verify",
    "fsck": "verify",
    "evaluate": "eval",
    "tokenize": "prepare",
    "capture": "collect",
    "extract": "collect",
    "generate": "regenerate",
    "clean": "gc",
    "fix": "repair",
    "compare": "diff",
}


@cache
def find_commands() -> Mapping[str, CommandSpec]:
    """Every command of this installation in the order of ``--help``: built-in, ours by entry point, then others'.

    A foreign entry point never replaces a built-in command nor one of ours.
    """
    installed: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name not in installed or _distribution(point) == "hiddenstore":
            installed[point.name] = point
    found: dict[str, CommandSpec] = {}
    for name, section, summary, target in _KNOWN:
        entry = installed.pop(name, None)
        if target or entry is not None:
            found[name] = CommandSpec(name, section, summary, target or (entry.value if entry else ""))
    for name in sorted(installed):
        found[name] = CommandSpec(name, "Added", f"From {_distribution(installed[name])}.", installed[name].value)
    return found


def _distribution(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "another package"
