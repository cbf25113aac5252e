"""Which commands exist, found without importing what they do."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata

ENTRY_POINT_GROUP = "hiddenstore.commands"
_ADDED = "Added"

# Section, name and one line of every command of ours, in the order of ``--help``.
_SUMMARIES: Mapping[str, Mapping[str, str]] = {
    "Make": {
        "demo": "The whole path on CPU with a tiny bundled target.",
        "run": "Conversations → exported drafter from one pipeline file.",
        "prepare": "Conversations → tokens, loss mask and turn spans.",
        "regenerate": "Let the target rewrite the answers itself.",
        "plan": "Bytes, files and hours, before anything is written.",
        "collect": "Capture the target's hidden states into a store; resumable.",
        "import": "Another project's dump of hidden states into a store; resumable.",
    },
    "Look": {
        "info": "What a store holds, on one screen.",
        "ls": "The samples of a store.",
        "show": "One sample: its text, what is trained on, norms per layer.",
        "stats": "Lengths, splits and norms per layer over the whole store.",
        "diff": "How two stores differ: capture, samples, numbers.",
        "advise": "Which recipe the states can take, measured on them.",
    },
    "Care": {
        "verify": "Every byte there, intact, and meaning what it says.",
        "copy": "Merge, subset or re-encode stores; resumable.",
        "repair": "Drop what is damaged, keep the rest; prints a plan first.",
        "gc": "Sweep what no commit names; prints a plan first.",
    },
    "Train": {
        "vocab": "The draft vocabulary, from supervised tokens.",
        "train": "Train a drafter from a store.",
        "import-drafter": "A published drafter as a run to start from.",
        "eval": "Accepted length on recorded text.",
        "decode": "Accepted length in real speculative decoding.",
        "export": "A drafter as an engine loads it.",
        "serve": "A drafter in an engine: the exact command and file, or run it.",
        "export-data": "A store's samples as another trainer reads them.",
    },
    "System": {"doctor": "This machine: versions, engines, disk speed."},
}
SECTIONS = (*_SUMMARIES, _ADDED)
OUR_COMMANDS = frozenset(name for commands in _SUMMARIES.values() for name in commands)

# Commands of this package by module. Those of the upper packages come from entry points: nothing points upward.
_BUILT_IN = {
    "look": ("info", "ls", "show", "stats", "diff"),
    "care": ("verify", "copy", "repair", "gc"),
    "advise": ("advise",),
    "doctor": ("doctor",),
    "run": ("run",),
}


@dataclass(frozen=True)
class CommandSpec:
    """Where a command lives and its one line in ``--help``. ``target`` is ``module:attribute``."""

    name: str
    section: str
    summary: str
    target: str


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
    """Every command of this installation in the order of ``--help``: ours, then others'.

    A foreign entry point never replaces a command of ours.
    """
    targets: dict[str, tuple[str, str]] = {}
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        owner = point.dist.name if point.dist is not None else "another package"
        if point.name not in targets or owner == "hiddenstore":
            targets[point.name] = (point.value, owner)
    for module, names in _BUILT_IN.items():
        targets |= {name: (f"hiddenstore.cli.{module}:{name}", "hiddenstore") for name in names}
    added = {name: f"From {targets[name][1]}." for name in sorted(targets.keys() - OUR_COMMANDS)}
    return {
        name: CommandSpec(name, section, summary, targets[name][0])
        for section, summaries in {**_SUMMARIES, _ADDED: added}.items()
        for name, summary in summaries.items()
        if name in targets
    }
