"""Every file name of a store, made and parsed here only, and what a folder is, by the files in it: an error about the
wrong kind of folder says which, and the next command.

```
store.json · target/ · inputs/<digest>.parquet · snapshots/<name>.json
calibration/profile.json, slice.json, slice-<16 hex>.safetensors · advice/<n>.json · index/<n>.parquet
commits/<unit>[.rN].json · segments/<unit>[-rN]-<8 hex>/ (a Zarr group, or samples.tar and index.json)
```
"""

import re
import secrets
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from hiddenstore.errors import ConfigError, Kind, NotFoundError
from hiddenstore.fs import open_filesystem

STORE_JSON = "store.json"
TARGET_DIR = "target"
HEAD_NAME = "head.safetensors"
HEAD_PATH = f"{TARGET_DIR}/{HEAD_NAME}"
BLOCKS_NAME = "blocks.safetensors"
INPUTS_DIR = "inputs"
COMMITS_DIR = "commits"
SEGMENTS_DIR = "segments"
SNAPSHOTS_DIR = "snapshots"
CALIBRATION_DIR = "calibration"
ADVICE_DIR = "advice"
INDEX_DIR = "index"
QUARANTINE_DIR = "quarantine"
TOP_NAMES = {
    STORE_JSON, TARGET_DIR, INPUTS_DIR, COMMITS_DIR, SEGMENTS_DIR, SNAPSHOTS_DIR, CALIBRATION_DIR, ADVICE_DIR,
    INDEX_DIR, QUARANTINE_DIR, "lost+found",
}  # fmt: skip
"""What lies in the folder of a store: its own, and what mkfs leaves on a fresh disk."""
DATA_JSON = "data.json"

_UNIT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,119}")
_COMMIT = re.compile(rf"({_UNIT.pattern})(?:\.r([1-9][0-9]{{0,8}}))?\.json")
_COMMITS = re.compile(f"^{_COMMIT.pattern}$", re.MULTILINE)
_SEGMENT = re.compile(rf"({_UNIT.pattern})-[0-9a-f]{{8}}")
_REVISED_SEGMENT = re.compile(rf"({_UNIT.pattern})-r([1-9][0-9]{{0,8}})-[0-9a-f]{{8}}")
_INPUT = re.compile(r"([0-9a-f]{64})\.parquet")
_SLICE = re.compile(r"slice-[0-9a-f]{16}\.safetensors")
_ADVICE = re.compile(r"([1-9][0-9]{0,5})\.json")
_INDEX = re.compile(r"([1-9][0-9]{0,11})\.parquet")
_SNAPSHOT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_SAVED = re.compile(rf"({_SNAPSHOT.pattern})\.json")
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


class CommitName(NamedTuple):
    """What the file name of a commit record says; revision 0 is the first record of a unit."""

    unit: str
    revision: int


def unit_name(input_digest: str, index: int) -> str:
    """``<12 hex of the input digest>-<6 digits>``: sorted by name is sorted by place in the input."""
    return f"{unit_prefix(input_digest)}{index:06d}"


def unit_prefix(input_digest: str) -> str:
    """What the name of every unit of an input begins with."""
    return f"{input_digest[:12]}-"


def new_attempt() -> str:
    """8 random hex digits that tell two attempts at one unit apart."""
    return secrets.token_hex(4)


def commit_path(unit: str, revision: int = 0) -> str:
    """Path of a commit record."""
    return f"{COMMITS_DIR}/{_required(_UNIT, unit, 'unit name')}{f'.r{revision}' if revision else ''}.json"


def segment_path(unit: str, attempt: str, revision: int = 0) -> str:
    """Path of the segment that one attempt at a revision of a unit writes."""
    name = f"{unit}{f'-r{revision}' if revision else ''}-{attempt}"
    return f"{SEGMENTS_DIR}/{_required(_SEGMENT, name, 'segment name')}"


def input_path(digest: str) -> str:
    """Path of a registered input."""
    return f"{INPUTS_DIR}/{_required(_INPUT, f'{digest}.parquet', 'input digest')}"


def fitted_name(codec: str) -> str:
    """The file of ``target/`` that a fitted codec reads, by the codec's name."""
    return f"{codec}.safetensors"


def snapshot_path(name: str) -> str:
    """Path of a saved snapshot."""
    return f"{SNAPSHOTS_DIR}/{_required(_SNAPSHOT, name, 'snapshot name')}.json"


def slice_path(sha256: str) -> str:
    """Path of the states of a calibration slice, by the digest of the file."""
    return f"{CALIBRATION_DIR}/{_required(_SLICE, f'slice-{sha256[:16]}.safetensors', 'slice name')}"


def advice_path(number: int) -> str:
    """Path of an advice document; numbers start at 1."""
    return f"{ADVICE_DIR}/{_required(_ADVICE, f'{number}.json', 'advice name')}"


def index_path(number: int) -> str:
    """Path of an index file; numbers start at 1."""
    return f"{INDEX_DIR}/{_required(_INDEX, f'{number}.parquet', 'index name')}"


def part_name(index: int) -> str:
    """Name of a parquet part of prepared DATA."""
    return f"part-{index:05d}.parquet"


def parse_commit(name: str) -> CommitName | None:
    """What a name under ``commits/`` says; None for anything that is not a commit record."""
    return CommitName(match[1], int(match[2] or 0)) if (match := _COMMIT.fullmatch(name)) else None


def parse_commits(names: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """Unit, revision and name of each of the names that is a commit record's: ``parse_commit`` of a whole folder."""
    lines = "\n".join([name for name in names if "\n" not in name])
    for unit, revision in _COMMITS.findall(lines):
        yield unit, int(revision or 0), f"{unit}.r{revision}.json" if revision else f"{unit}.json"


def segment_claims(name: str) -> tuple[CommitName, ...]:
    """The records that a segment of this name may compete for; none for anything that is not a segment.

    Two for a name that ends in ``-rN-<8 hex>``: revision N of a unit, or revision 0 of a unit whose own name ends so.
    """
    claims = []
    if match := _REVISED_SEGMENT.fullmatch(name):
        claims.append(CommitName(match[1], int(match[2])))
    if match := _SEGMENT.fullmatch(name):
        claims.append(CommitName(match[1], 0))
    return tuple(claims)


def parse_input(name: str) -> str | None:
    """The digest of a name under ``inputs/``; None for anything that is not a registered input."""
    return match[1] if (match := _INPUT.fullmatch(name)) else None


def parse_snapshot(name: str) -> str | None:
    """The snapshot that a name under ``snapshots/`` saves; None for anything that is not a snapshot."""
    return match[1] if (match := _SAVED.fullmatch(name)) else None


def split_snapshot(text: str) -> tuple[str, str | None]:
    """Path and snapshot of ``path@name``; no snapshot where a folder has that very name."""
    path, at, snapshot = text.rpartition("@")
    if at and path and snapshot and not Path(text).exists() and "/" not in snapshot:
        return path, snapshot
    return text, None


def refuse_snapshot(location: str | Path) -> None:
    """Refuse the name of a snapshot as a place to write to: what lay there would be read in place of it. ConfigError
    ``usage``."""
    path, snapshot = split_snapshot(str(location))
    if snapshot is not None and open_filesystem(path).size(STORE_JSON) is not None:
        problem = f"{location} is a name for the snapshot {snapshot} of the store {path}, which it would hide"
        raise ConfigError(problem, kind=Kind.USAGE, hint=f"another place, such as {shlex.quote(f'{path}-{snapshot}')}")


def is_slice(name: str) -> bool:
    """Whether a name under ``calibration/`` is that of a slice's states."""
    return _SLICE.fullmatch(name) is not None


def parse_advice(name: str) -> int | None:
    """The number of a name under ``advice/``; None for anything that is not an advice document."""
    return int(match[1]) if (match := _ADVICE.fullmatch(name)) else None


def parse_index(name: str) -> int | None:
    """The number of a name under ``index/``; None for anything that is not an index file."""
    return int(match[1]) if (match := _INDEX.fullmatch(name)) else None


def _required(pattern: re.Pattern[str], value: str, what: str) -> str:
    if not pattern.fullmatch(value):
        message = f"{value!r} cannot be a {what}: expected {pattern.pattern}"
        raise ConfigError(message, kind=Kind.NAME_INVALID)
    return value


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
