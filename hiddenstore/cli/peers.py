"""Training files of Model Optimizer and NeMo AutoModel as settings of ours: every field, and what it becomes here.

What each field is stands in ``peers.yaml``. Fields that nothing there names are said and change nothing; values that
ask for what is not offered are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import yaml

from hiddenstore.console.output import output
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.settings import all_problems, written

_SETTINGS = ("data", "drafter", "loss", "optim", "train")
_YARN = "eagle.eagle_export_rope_scaling"
_MIX, _MIX_MODE = "eagle.eagle_mix_hidden_states", "eagle.eagle_hsm_mode"
_IMPORT, _IMPORTS = "$import", "imports"


@dataclass
class Translation:
    """What a file says in our words. ``values``: settings (``optim.lr``) and, for ``hiddenstore run``, options of
    stages (``prepare.max-tokens``) and members of a pipeline; ``rows``: every field, its value and what became of it;
    ``unknown``: fields that nothing is known of; ``rest``: words that are ours already."""

    title: str
    drafter: str
    values: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    rest: tuple[str, ...] = ()

    def row(self, name: str, value: Any, meaning: str) -> None:
        """Note what a field became."""
        self.rows.append((name, _text(value), meaning))

    def words(self) -> tuple[str, ...]:
        """The settings of ``hiddenstore train`` as ``key.path=value``, and then the user's own."""
        named = {key: value for key, value in self.values.items() if key.partition(".")[0] in _SETTINGS}
        return (*(f"{key}={_text(value)}" for key, value in named.items()), *self.rest)

    def pipeline(self) -> dict[str, Any]:
        """The tree of a pipeline that does the same."""
        tree: dict[str, Any] = {"collect": {"layers": _text(self.values.get("drafter.aux_layers", self.drafter))}}
        settings: dict[str, Any] = {}
        for key, value in self.values.items():
            section, _, name = key.partition(".")
            if section in _SETTINGS:
                settings.setdefault(section, {})[name] = value
            elif name:
                tree.setdefault(section, {})[name] = value
            else:
                tree[section] = [value] if section == "inputs" else value
        return {**tree, "drafters": {self.drafter: {"drafter": self.drafter, "settings": settings}}}

    def show(self) -> None:
        """Print the map to stderr, a line a field, and warn of what is not known."""
        width = max((len(name) for name, _, _ in self.rows), default=0)
        output().note(f"{self.title}'s file, in our words:")
        for name, value, meaning in self.rows:
            output().note(f"  {name:<{width}}  {value} → {meaning}")
        if self.unknown:
            output().warn(f"nothing is known of {', '.join(self.unknown)}: left out")


def translated(file: str | Path, words: Sequence[str] = (), ranks: int = 1) -> Translation | None:
    """A file of another project, and ``key.path=value`` words in its names or ours, in our words; None where the file
    is not one of theirs. ``ranks``: processes that share a batch. Raises ConfigError: ``config-invalid``: it asks for
    what is not offered; every such field. ``config-unreadable``; NotFoundError: the file does not exist."""
    fields = written(file)
    peer = next((one for one in _peers().values() if _is_of(one, fields)), None)
    if peer is None:
        return None
    theirs = [word for word in words if _is_theirs(peer, word.partition("=")[0])]
    fields |= written(None, theirs)
    fields = {**_imported(peer, fields), **fields}
    if str(fields.get(_MIX)).lower() == "true" and fields.get(_MIX_MODE):
        fields[_MIX] = fields[_MIX_MODE]
    translation = Translation(peer["title"], _drafter(peer, fields), dict(peer["implied"]))
    translation.rest = tuple(word for word in words if word not in theirs)
    problems = [problem for name, value in fields.items() if (problem := _take(translation, peer, name, value))]
    if problems:
        raise ConfigError(all_problems(problems), kind=Kind.CONFIG_INVALID, problems=problems)
    _take_batch(translation, peer, fields, ranks)
    _take_yarn(translation, fields)
    split = fields.get("recipe_args.train_split")
    if split is not None and "inputs" in translation.values:
        translation.values["inputs"] = f"{translation.values['inputs']}:{split}"
    translation.rows += [
        ("", "not written", f"{key}={_text(value)}")
        for key, value in peer["implied"].items()
        if not any(f"{key}=" in meaning for _, _, meaning in translation.rows)
    ]
    return translation


@cache
def _peers() -> dict[str, dict[str, Any]]:
    peers: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("peers.yaml").read_text("utf-8"))
    return peers


def _is_of(peer: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    sections = {name.partition(".")[0] for name in fields}
    return not sections & {*_SETTINGS} - {"data"} and len(sections & {*peer["sections"]} - {"data"}) > 1


def _is_theirs(peer: Mapping[str, Any], name: str) -> bool:
    return name in peer["fields"] or name.partition(".")[0] in {*peer["sections"]} - {*_SETTINGS}


def _imported(peer: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the imports of a file say, of those whose values are known."""
    values: dict[str, Any] = {}
    for name, imported in fields.items():
        if name.rpartition(".")[2] == _IMPORT:
            if str(imported) not in peer[_IMPORTS]:
                raise ConfigError(
                    f"{name}: {imported}: what it imports lies in another file; write its values here",
                    kind=Kind.CONFIG_INVALID,
                )
            values |= peer[_IMPORTS][str(imported)]
    return values


def _drafter(peer: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    sections = {name.partition(".")[0] for name in fields}
    named = str(fields["recipe"]) if "recipe" in fields else next((s for s in peer["drafters"] if s in sections), "")
    if named not in peer["drafters"]:
        known = ", ".join(peer["drafters"])
        raise ConfigError(
            f"{peer['title']}'s file trains {named or 'no drafter'}; there are {known}", kind=Kind.CONFIG_INVALID
        )
    return str(peer["drafters"][named])


def _take(translation: Translation, peer: Mapping[str, Any], name: str, value: Any) -> str | None:
    """Put one field into ``translation``; what is wrong with it, if something is."""
    first, _, last = name.partition(".")
    if first == _IMPORTS or last == _IMPORT:
        return None
    rule = peer["fields"].get(name) or peer["fields"].get(first)
    if rule is None:
        if value not in (None, {}, "{}"):
            translation.unknown.append(f"{name}={_text(value)}")
        return None
    if isinstance(rule, str) and rule.startswith("- "):
        translation.row(name, value, rule.removeprefix("- "))
        return None
    key = "null" if value is None else str(value).lower()
    if isinstance(rule, Mapping) and "only" in rule:
        if key not in [_text(one) for one in rule["only"]] and value is not None:
            return f"{name}={_text(value)}: {rule['why']}"
        translation.row(name, value, "as it is here")
        return None
    if value is None:
        translation.row(name, value, "not set")
        return None
    names, meanings = (rule["to"], rule.get("is", {})) if isinstance(rule, Mapping) else (rule, {})
    names = [names] if isinstance(names, str) else names
    values = value if isinstance(value, list) and len(value) == len(names) > 1 else [value] * len(names)
    for ours, one in zip(names, values, strict=True):
        meant = meanings.get(key, meanings.get("*", one)) if meanings else one
        if meant is not None:
            translation.values[ours] = meant
    kept = [f"{ours}={_text(translation.values[ours])}" for ours in names if ours in translation.values]
    translation.row(name, value, " ".join(kept) or "off")
    return None


def _take_batch(translation: Translation, peer: Mapping[str, Any], fields: Mapping[str, Any], ranks: int) -> None:
    """Samples of a step times the longest sample: what a batch of theirs holds at most."""
    sizes = [fields.get(name) for name in peer["batch"]]
    if sizes[-1] is None:
        return
    micro, accumulated, longest = (int(str(size)) if str(size).isdecimal() else 1 for size in sizes)
    translation.values["data.pack_tokens"] = micro * longest
    translation.values["data.batch_tokens"] = prod((micro, accumulated, longest, ranks))
    over = f"{ranks} ranks, " if ranks > 1 else ""
    keys = ("data.batch_tokens", "data.pack_tokens")
    translation.row(
        "", f"{over}{micro} × {accumulated} samples", " ".join(f"{key}={translation.values[key]}" for key in keys)
    )


def _take_yarn(translation: Translation, fields: Mapping[str, Any]) -> None:
    yarn = [fields.get(f"{_YARN}.{name}") for name in ("factor", "original_max_position_embeddings")]
    if None not in yarn:
        translation.values["export.yarn"] = [float(str(yarn[0])), int(float(str(yarn[1])))]
        translation.values["export.engine"] = "vllm"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
