"""``hiddenstore train STORE --settings``: every setting of a run, its value, and where that comes from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hiddenstore.cli.words import open_store
from hiddenstore.console.output import output
from hiddenstore.console.text import Column
from hiddenstore.settings import assignments, key_paths

DEFAULT, DERIVED = "default", "store"


def show_settings(store: str, drafter: str | None, file: str | Path | None, words: Sequence[str]) -> None:
    """Print what a run with these arguments would take; nothing is written. Raises ConfigError: a wrong setting."""
    from trainer.settings import derived, load_config
    from trainer.train.run_folder import configured_start

    opened = open_store(store)
    start = configured_start(file, words)
    config = load_config(opened, drafter, file, words, start.spec.drafter if start else None)
    name = config.drafter.name
    rows = _rows(config, type(config), derived(opened, name), file, words)
    document = {"drafter": name, "settings": rows}

    def human() -> None:
        cells = [[row["key"], _text(row["value"]), row["origin"], row["why"]] for row in rows]
        output().table(["setting", "value", "origin", Column("what it is", wide=True)], cells)

    output().data(document, human=human, quiet="\n".join(f"{row['key']}={_text(row['value'])}" for row in rows))


def _rows(
    config: BaseModel,
    model: type[BaseModel],
    derived: Mapping[str, Mapping[str, Any]],
    file: str | Path | None,
    words: Sequence[str],
) -> list[dict[str, Any]]:
    values, rows = config.model_dump(mode="json"), []
    # The parts of a scaling are one setting, as a person gives it.
    keys = dict.fromkeys(".".join(path.split(".")[:2]) for path in key_paths(model))
    for key in keys:
        section, name = key.split(".")
        set_by = [origin for origin, _ in assignments(key, file, words)]
        origin = set_by[-1] if set_by else DERIVED if name in derived.get(section, {}) else DEFAULT
        field = type(getattr(config, section)).model_fields[name]
        why = " ".join((field.description or "").split())
        rows.append({"key": key, "value": values[section][name], "origin": origin, "why": why})
    return rows


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
