"""The stages of a recipe as command lines. A section's keys are the options of the command itself, whatever they are.

A stage makes one thing, ``makes``, below the recipe's folder; what it reads was made by the stages before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from hiddenstore.cli.inner import check, find
from hiddenstore.config import all_problems
from hiddenstore.errors import ConfigError, NotFoundError
from hiddenstore.pipeline.recipe import DrafterSection, Recipe

GIVEN = ("--out", "--target", "--drafter", "--config", "--resume", "--json", "--quiet", "--verbose")
"""Options that a recipe has its own place for, or that belong to the whole run."""

SECTIONS = ("regenerate", "prepare", "collect", "verify", "eval", "decode", "export")
"""Sections of a recipe that hold the options of the command of their name."""


@dataclass(frozen=True)
class Stage:
    """``name``: ``prepare``, or ``eagle3/train``. ``command`` with its ``words``. ``makes``: what it leaves on disk,
    None for an answer alone. ``going_on``: the words instead where ``makes`` was begun before. ``ranks``: processes."""

    name: str
    command: str
    words: tuple[str, ...]
    makes: Path | None = None
    going_on: tuple[str, ...] = ()
    ranks: int = 1


def stages_of(recipe: Recipe) -> list[Stage]:
    """Every stage in order.

    Raises:
        ConfigError: ``recipe-option``: a section holds an option that its command does not have, or a value that is
            none of that option's; the message lists every one.
    """
    drafters = (stage for name, one in recipe.drafters.items() for stage in _drafter(recipe, name, one))
    stages, problems = [*_capture(recipe), *drafters], _unknown_options(recipe)
    for stage in stages:
        try:
            check(stage.command, stage.words)
        except click.UsageError as error:
            problems.setdefault(f"{stage.command}: {error.format_message()}", f"hiddenstore {stage.command} --help")
        except ConfigError as error:
            # The words come from the recipe.
            said = [problem.replace(" (command line)", "") for problem in error.problems]
            problems |= {f"{stage.name}: {problem}": error.hint for problem in said}
        except NotFoundError as error:
            problems[f"{stage.name}: {error.message}"] = error.hint
    if problems:
        hint = next(iter(problems.values()))
        raise ConfigError(all_problems(list(problems)), kind="recipe-option", hint=hint)
    return stages


def _unknown_options(recipe: Recipe) -> dict[str, str | None]:
    """Every key of a section that is no option of its command, as a message, with what fixes it."""
    problems: dict[str, str | None] = {}
    for command in SECTIONS:
        known = _known(command)
        for key in getattr(recipe, command) or {}:
            name = _name(key)
            if name not in known:
                close = get_close_matches(name, known, n=1)
                there = f"did you mean {close[0]}?" if close else f"it takes {', '.join(sorted(known))}"
                problems[f"{command}: hiddenstore {command} takes no {name!r} here; {there}"] = (
                    f"hiddenstore {command} --help"
                )
    return problems


def _capture(recipe: Recipe) -> Iterator[Stage]:
    out, target = Path(recipe.out), ("--target", recipe.target)
    data, store, inputs = out / "data", out / "store", tuple(recipe.inputs)
    if recipe.regenerate is not None:
        answers = out / "answers.jsonl"
        words = (*inputs, "-o", str(answers), *target, *_options("regenerate", recipe.regenerate))
        yield Stage("regenerate", "regenerate", words, answers)
        inputs = (str(answers),)
    words = (*inputs, "-o", str(data), *target, *_options("prepare", recipe.prepare))
    yield Stage("prepare", "prepare", words, data)
    words = (str(data), "-o", str(store), *target, *_options("collect", recipe.collect))
    yield Stage("collect", "collect", words, store)
    yield Stage("verify", "verify", (str(store), *_options("verify", recipe.verify)))


def _drafter(recipe: Recipe, name: str, section: DrafterSection) -> Iterator[Stage]:
    store, home = str(Path(recipe.out, "store")), Path(recipe.out, name)
    run, drafter = home / "run", home / "drafter"
    named = [("--drafter", section.drafter), ("-c", section.config)]
    chosen = tuple(word for option, value in named if value is not None for word in (option, value))
    words = (store, "-o", str(run), *chosen, *_settings(section.settings))
    going_on = (store, "-o", str(run), "--resume")
    yield Stage(f"{name}/train", "train", words, run, going_on, section.ranks)
    yield Stage(f"{name}/eval", "eval", (str(run), store, *_options("eval", recipe.eval)))
    if recipe.decode is not None:
        words = (str(run), "--target", recipe.target, *_options("decode", recipe.decode))
        yield Stage(f"{name}/decode", "decode", words)
    yield Stage(f"{name}/export", "export", (str(run), "-o", str(drafter), *_options("export", recipe.export)), drafter)


def _options(command: str, section: Mapping[str, Any]) -> tuple[str, ...]:
    """A section as the words of its command; what the command does not have is left to ``_unknown_options``."""
    known, words = _known(command), []
    for key, value in section.items():
        name = _name(key)
        if name in known:
            words += _words(f"--{name}", known[name], value)
    return tuple(words)


def _known(command: str) -> dict[str, click.Option]:
    """Options of a command by their long names, but those that a recipe says elsewhere."""
    return {
        option.removeprefix("--"): parameter
        for parameter in find(command).params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
        if option.startswith("--") and option not in GIVEN
    }


def _name(key: Any) -> str:
    return str(key).replace("_", "-")


def _words(option: str, parameter: click.Option, value: Any) -> list[str]:
    if parameter.is_flag:
        return [option] if value is True or str(value).lower() == "true" else []
    if value is None:
        return []
    many = value if isinstance(value, list | tuple) else [value]
    if parameter.nargs > 1:
        return [option, *map(str, many)]
    if parameter.multiple:
        return [word for one in many for word in (option, str(one))]
    return [option, ",".join(map(str, many))]


def _settings(tree: Mapping[str, Any], path: Sequence[str] = ()) -> Iterator[str]:
    """A tree of settings as ``key.path=value`` words."""
    for key, value in tree.items():
        here = (*path, str(key))
        if isinstance(value, Mapping):
            yield from _settings(value, here)
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)
            yield f"{'.'.join(here)}={text}"
