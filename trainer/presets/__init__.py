"""Presets shipped with the package: published hyperparameters, one YAML file each, named by ``-c``."""

from pathlib import Path

from hiddenstore.errors import ConfigError
from hiddenstore.registry import unknown

_FOLDER = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml")


def preset_names() -> list[str]:
    """The names that ``-c`` takes."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def settings_file(name_or_path: str | Path) -> Path:
    """The file that ``-c`` means: a preset's by its name, else the path itself. Raises ConfigError: ``name-unknown``:
    neither a preset nor a file."""
    name, names = str(name_or_path), preset_names()
    if name in names:
        return _FOLDER / f"{name}.yaml"
    path = Path(name_or_path)
    # What looks like a path is left to the reader of settings, which says that the file does not exist.
    if path.is_file() or path.suffix in _SUFFIXES or len(path.parts) > 1:
        return path
    error = unknown("preset", name, names, "-c")
    raise ConfigError(f"-c {name}: no file of that name, and {error}", kind=error.kind, hint=error.hint)
