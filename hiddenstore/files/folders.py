"""What a folder is, by the files in it: an error about the wrong kind of folder says which, and the next command."""

import shlex
from pathlib import Path
from typing import Literal

from hiddenstore.errors import Kind, NotFoundError
from hiddenstore.files.layout import DATA_JSON, STORE_JSON

FolderKind = Literal["store", "data", "run", "drafter", "dump", "model", "text"]
Wanted = Literal["store", "data", "run"]

# The first with all of its files decides.
_FILES: dict[FolderKind, tuple[str, ...]] = {
    "store": (STORE_JSON,),
    "data": (DATA_JSON,),
    "run": ("run.json",),
    "drafter": ("config.json", "hiddenstore.json"),
    "dump": ("hiddenstore.json",),
    "model": ("config.json",),
}
_TEXT = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_WORDS: dict[FolderKind, str] = {
    "store": "it is a store",
    "data": "it holds prepared data",
    "run": "it is a training run",
    "drafter": "it is an exported drafter",
    "dump": "it is a dump for another trainer",
    "model": "it is a model",
    "text": "it is a file of conversations",
}
_COMMANDS: dict[FolderKind, str] = {
    "store": "info {}",
    "data": "collect {} -o STORE --target TARGET",
    "run": "eval {} STORE",
    "drafter": "serve {} --target TARGET --engine vllm",
    "dump": "import {} -o STORE --target TARGET --from LAYOUT",
    "model": "collect DATA -o STORE --target {}",
    "text": "prepare {} -o DATA --target TARGET",
}
# What a person who wanted the first and has the second does next, where that is not the command above.
_ON_THE_WAY: dict[tuple[Wanted, FolderKind], str] = {
    ("data", "model"): "prepare INPUT -o DATA --target {}",
    ("run", "store"): "train {} -o RUN",
    ("run", "drafter"): "import-drafter {} --store STORE -o RUN",
}
# What is said where nothing of ours lies: claim, kind of the error, what is lacking, the command that makes it.
_WANTED: dict[Wanted, tuple[str, Kind, str, str]] = {
    "store": (
        "{} is no store",
        Kind.STORE_MISSING,
        f"{STORE_JSON} is missing",
        "collect DATA -o {} --target TARGET",
    ),
    "data": (
        "{} holds no prepared data",
        Kind.PATH_MISSING,
        f"{DATA_JSON} is missing",
        "prepare INPUT -o {} --target T",
    ),
    "run": (
        "{} is no run with a checkpoint",
        Kind.CHECKPOINT_MISSING,
        "{}/checkpoints holds none",
        "train STORE -o {}",
    ),
}


def kind_of(path: str | Path) -> FolderKind | None:
    """What lies at a path; None where nothing of ours does."""
    folder = Path(path)
    if folder.is_file():
        return "text" if folder.name.endswith(_TEXT) else None
    return next((kind for kind, files in _FILES.items() if all((folder / file).is_file() for file in files)), None)


def missing(wanted: Wanted, path: str | Path) -> NotFoundError:
    """What to raise where a command wants one kind of folder and there is none: ``store-missing`` and its like."""
    claim, kind, lacking, command = _WANTED[wanted]
    what, command = _instead(path, wanted) or (lacking.format(path), command.format(shlex.quote(str(path))))
    return NotFoundError(f"{claim.format(path)}: {what}", kind=kind, hint=f"hiddenstore {command}")


def _instead(path: str | Path, wanted: Wanted) -> tuple[str, str] | None:
    """What lies there in place of what was wanted, and the command for it; None where nothing of ours does."""
    kind, place = kind_of(path), Path(path)
    if wanted == "run" and kind is None and place.parent.name == "checkpoints":
        names = sorted(child.name for child in place.parent.iterdir()) if place.parent.is_dir() else []
        command = _COMMANDS["run"] if names else "train STORE -o {}"
        return f"{place.parent} holds {', '.join(names) or 'none'}", command.format(shlex.quote(str(place.parents[1])))
    if kind is not None and kind != wanted:
        command = _ON_THE_WAY.get((wanted, kind), _COMMANDS[kind])
        return _WORDS[kind], command.format(shlex.quote(str(path)))
    if kind is not None or not Path(path).is_dir():
        return None
    inside = [child for child in sorted(Path(path).iterdir()) if child.is_dir() and kind_of(child) == wanted]
    child = next((child for child in inside if child.name == wanted or len(inside) == 1), None)
    return None if child is None else (f"{child} is one", _COMMANDS[wanted].format(shlex.quote(str(child))))
