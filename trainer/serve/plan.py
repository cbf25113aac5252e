"""What to serve (``ServeRequest``) and what would run (``ServePlan``): the words every engine module speaks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from hiddenstore import settings as config
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.servers import flag_value
from trainer.export.support import ENGINES, row, support, words
from trainer.formats.base import Reads

UNTRAINED = {
    "draft-target": "a small model of the same vocabulary",
    "ngram": "tokens looked up in the text so far",
    "suffix": "tokens looked up in the text so far and in earlier answers",
    "mtp": "the target's own multi-token prediction",
    "user-provided": "your own drafter class",
    "none": "no speculation: the baseline",
}
"""How tokens are drafted without a drafter that was trained, in our words."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What to serve, as a person says it. ``drafter`` is a folder or hub id; ``settings`` are ``key=value`` words for
    the engine's speculation or file; ``flags`` go to the engine's command line as they are; ``config_file`` is where a
    configuration file is written."""

    target: str
    method: str | None = None
    draft_len: int | None = None
    version: str | None = None
    drafter: str | None = None
    form: str = "command"
    settings: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    config_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServeRequest(ServeOptions):
    """Options that were checked, none of which is open; ``layers`` are those of `ServedDrafter`."""

    method: str
    draft_len: int
    version: str
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServePlan:
    """What would run: a command, the files written before it, variables set for it; ``folders`` are variables whose
    values are folders of this machine. ``program`` is Python source
    instead of a command where the Python form was asked for; ``notes`` say what a user should know; ``served_as`` and
    ``port`` are what the smoke test calls; ``image`` is the container it runs in."""

    command: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    program: str = ""
    notes: tuple[str, ...] = ()
    served_as: str = ""
    port: int = 8000
    image: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """Everything set for the command."""
        return {**self.env, **self.folders}


@dataclass(frozen=True)
class ServingEngine:
    """One engine. ``version`` is what commands are written for unless told; ``untrained`` are the methods it has
    besides drafters that are trained (of those the drafters say it), and what it calls them; ``plan`` writes the
    command, ``install`` and ``image`` get the engine; ``entrypoint`` is the program that its image has to be told to
    start, where the image would start another; ``config_file`` is the usual name of the file it is configured by;
    ``loads`` are the formats of ``hiddenstore export`` that it reads."""

    name: str
    version: str
    untrained: Mapping[str, str]
    plan: Callable[[ServeRequest], ServePlan]
    install: str
    image: Callable[[str], str]
    port: int
    forms: tuple[str, ...]
    entrypoint: str | None
    config_file: str | None
    loads: tuple[str, ...]

    @property
    def title(self) -> str:
        return ENGINES[self.name].title

    def method(self, method: str, version: str, model: str | None) -> str:
        """What ``version`` of the engine calls a method that drafts with ``model``; empty for ``none``. Raises
        ConfigError: ``serve-unsupported``: it does not draft so; ``serve-setting``: a model is needed."""
        reads = self.reads(method, version)
        if model is None and needs_model(method):
            raise ConfigError(f"{method} needs a drafter: its folder or hub id", kind=Kind.SERVE_SETTING)
        return self.untrained.get(method, "") if reads is None else reads.method

    def reads(self, method: str, version: str) -> Reads | None:
        """What ``version`` of the engine reads of a drafter that was trained; None where ``method`` drafts without one.
        Raises ConfigError: ``serve-unsupported``: it does not draft so."""
        if method == "none" or method in self.untrained:
            return None
        if method not in words():
            raise ConfigError(
                f"{self.title} does not draft with {method} ({methods().get(method, 'unknown')})",
                kind=Kind.SERVE_UNSUPPORTED,
                hint=f"--method {' | '.join((*self.untrained, 'none'))}",
            )
        found = row(ENGINES[self.name], version, method)
        if isinstance(found, Reads):
            return found
        answer = support(self.name, version, method)
        problem = f"{self.title} {version} does not serve {methods()[method]}: {answer.reason}"
        raise ConfigError(problem, kind=Kind.SERVE_UNSUPPORTED, hint=answer.nearest)


def methods() -> dict[str, str]:
    """Every word for how tokens are drafted, and what it means."""
    return {word: export.titles[word] for word, export in words().items()} | UNTRAINED


def needs_model(method: str) -> bool:
    """Whether a method drafts with weights of its own."""
    return method == "draft-target" or method in words()


def checked_settings(model: type[BaseModel], settings: tuple[str, ...]) -> dict[str, Any]:
    """``key=value`` words as values of the settings that an engine has. Raises ConfigError: ``serve-setting``: an
    unknown one, with what was meant, or a wrong value; all of them at once."""
    try:
        return config.load(model, None, settings).model_dump(exclude_unset=True)
    except ConfigError as error:
        raise ConfigError(error.message, kind=Kind.SERVE_SETTING, hint=error.hint) from error


def hyphened_settings(model: type[BaseModel], settings: tuple[str, ...]) -> dict[str, Any]:
    """The same of words whose hyphens are underscores in ``model``."""
    names = (word.partition("=") for word in settings)
    return checked_settings(model, tuple(name.replace("-", "_") + equals + text for name, equals, text in names))


def flags_of(prefix: str, values: Mapping[str, Any]) -> list[str]:
    """Settings as flags of a command line, by names that begin with ``prefix``; one that is on has no value, and one
    that is off no flag."""
    flags = []
    for name, value in values.items():
        if value is not False:
            flags += [prefix + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return flags


def port_of(flags: tuple[str, ...], usual: int) -> int:
    """The port that ``flags`` ask the server to listen on, else the ``usual`` one."""
    port = flag_value(flags, "--port")
    return int(port) if port and port.isdecimal() else usual
