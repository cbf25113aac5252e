"""A target's own Python: what may run, and the digest by which a store knows it."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hiddenstore.errors import ConfigError, Kind

_COMMIT = re.compile(r"[0-9a-f]{40}")


def require_pinned(name: str, revision: str | None) -> None:
    """Refuse a hub id without a commit, ConfigError ``code-unpinned``; a folder's code is known by its digest."""
    if not Path(name).exists() and (revision is None or not _COMMIT.fullmatch(revision)):
        raise ConfigError(
            f"--trust-remote-code runs the repository's own Python: revision {revision or 'none'} of {name} may be "
            f"other code tomorrow",
            kind=Kind.CODE_UNPINNED,
            hint="--target ORG/NAME --revision COMMIT, the 40 hex digits of a commit whose code was read",
        )


def code_sha256(name: str, documents: list[Mapping[str, Any]], find: Callable[[str], Path | None]) -> str | None:
    """Digest of every Python file that the ``auto_map`` of ``documents`` names, and those that they import from beside
    themselves; None where none names any. ``find`` gives a file of the target by its name. Raises ConfigError:
    ``code-unpinned``: it is code of another repository; ``target-incomplete``: a file is not there."""
    lines: dict[str, str] = {}
    waiting = [module for document in documents for module in _modules(name, document)]
    while waiting:
        module = waiting.pop()
        if module in lines:
            continue
        path = find(module)
        if path is None:
            raise ConfigError(
                f"target {name} names its own code in {module}, which it lacks", kind=Kind.TARGET_INCOMPLETE
            )
        lines[module] = hashlib.sha256(path.read_bytes()).hexdigest()
        waiting += _beside(path, module)
    listed = "".join(f"{module}\t{digest}\n" for module, digest in sorted(lines.items()))
    return hashlib.sha256(listed.encode()).hexdigest() if lines else None


def _modules(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    for value in (document.get("auto_map") or {}).values():
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, str):
                continue
            if "--" in entry:
                raise ConfigError(
                    f"the config of {name} runs code of another repository ({entry}), which nothing pins",
                    kind=Kind.CODE_UNPINNED,
                    hint="use a copy of the target that holds its own code",
                )
            yield f"{entry.partition('.')[0]}.py"


def _beside(path: Path, module: str) -> Iterator[str]:
    from transformers.dynamic_module_utils import get_relative_imports

    for name in get_relative_imports(path):
        yield str(Path(module).parent / f"{name}.py")
