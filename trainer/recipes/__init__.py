"""Recipes shipped with the package: published hyperparameters, one YAML file each, taken by name with ``-c``."""

import difflib
from pathlib import Path

from hiddenstore.errors import ConfigError

_FOLDER = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml")


def recipe_names() -> list[str]:
    """The names that ``-c`` takes."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def settings_file(asked: str | Path) -> Path:
    """The file that ``-c`` means: a recipe's by its name, else ``asked`` itself.

    Raises:
        ConfigError: ``recipe-unknown``: neither a recipe nor a file.
    """
    name, names = str(asked), recipe_names()
    if name in names:
        return _FOLDER / f"{name}.yaml"
    path = Path(asked)
    # What looks like a path is left to the reader of settings, which says that the file does not exist.
    if path.is_file() or path.suffix in _SUFFIXES or len(path.parts) > 1:
        return path
    near = difflib.get_close_matches(name, names, n=1)
    raise ConfigError(
        f"-c {name}: no file of that name and no recipe; recipes are {', '.join(names)}",
        kind="recipe-unknown",
        hint=f"-c {near[0]}" if near else None,
    )
