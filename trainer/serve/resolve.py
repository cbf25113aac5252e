"""From what a person typed to what is served: the method, the draft length and the version, each checked first."""

import shlex
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from hiddenstore.errors import ConfigError
from trainer.serve.container import containerised
from trainer.serve.drafter import ServedDrafter, check_engine, check_target, read_drafter
from trainer.serve.plan import METHODS, NEEDS_MODEL, ServePlan, ServeRequest, ServingEngine
from trainer.serve.traps import traps
from trainer.serve.versions import parse

DRAFT_LEN = 3
"""Tokens drafted per step where neither the user nor the drafter says: what all three engines' own pages start with."""


@dataclass(frozen=True)
class Asked:
    """The words of a command line; see ``hiddenstore serve --help``."""

    target: str
    drafter: str | None = None
    method: str | None = None
    draft_len: int | None = None
    version: str | None = None
    form: str = "command"
    settings: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    config_file: str | None = None


@dataclass(frozen=True)
class Resolved:
    """A request that was checked; ``warnings`` say what looks wrong or could not be checked."""

    request: ServeRequest
    warnings: list[str] = field(default_factory=list)


def resolve(engine: ServingEngine, asked: Asked) -> Resolved:
    """The request that ``asked`` means.

    Raises:
        ConfigError: nothing says what drafts, the engine lacks the method, or the drafter cannot draft so far.
        FormatError: the drafter was exported for another engine or target.
        NotFoundError: the drafter's folder is missing.
    """
    drafter = _drafter(asked)
    method = drafter.method if drafter else (asked.method or "")
    if asked.form not in engine.forms:
        raise ConfigError(
            f"{engine.title} has no form {asked.form!r}; there is: {', '.join(engine.forms)}", kind="serve-form"
        )
    version = asked.version or engine.version
    if asked.version is None and drafter and drafter.version and parse(drafter.version) > parse(version):
        version = drafter.version
    parse(version)
    engine.check(method, version)
    warnings = []
    if drafter and method in NEEDS_MODEL:
        check_engine(drafter, engine, version)
        warnings += check_target(drafter, asked.target)
        warnings += traps(drafter, engine, asked.target)
    draft_len, said = _draft_len(asked, drafter)
    request = ServeRequest(
        target=asked.target,
        method=method,
        drafter=asked.drafter if method in (*NEEDS_MODEL, "user-provided") else None,
        draft_len=draft_len,
        version=version,
        form=asked.form,
        settings=asked.settings,
        flags=asked.flags,
        config_file=asked.config_file,
    )
    return Resolved(request, warnings + said)


def plan_of(engine: ServingEngine, request: ServeRequest) -> ServePlan:
    """What would run, in the form asked for.

    Raises:
        ConfigError: a setting is wrong; see the engine's ``plan``.
    """
    return containerised(engine, request) if request.form == "container" else engine.plan(request)


def _drafter(asked: Asked) -> ServedDrafter | None:
    """What is in the drafter's folder; a hub id cannot be looked into, so its method has to be said."""
    if asked.method is not None and asked.method not in METHODS:
        close = get_close_matches(asked.method, METHODS, n=1, cutoff=0.4)
        raise ConfigError(
            f"no method {asked.method!r}; there is: {', '.join(METHODS)}",
            kind="serve-method",
            hint=f"--method {close[0]}" if close else None,
        )
    if asked.drafter is None:
        if asked.method is None:
            raise ConfigError(
                "nothing says what drafts: neither a drafter's folder nor a method",
                kind="serve-method",
                hint=f"hiddenstore serve DIR --target {shlex.quote(asked.target)}, or --method ngram",
            )
        if asked.method in NEEDS_MODEL:
            raise ConfigError(
                f"--method {asked.method} needs {METHODS[asked.method]}: its folder or hub id as the first argument",
                kind="serve-drafter",
                hint=f"hiddenstore serve DIR --method {asked.method} --target {shlex.quote(asked.target)}",
            )
        return None
    if asked.method is not None and asked.method not in NEEDS_MODEL and asked.method != "user-provided":
        raise ConfigError(
            f"--method {asked.method} takes no drafter, but {asked.drafter} was given",
            kind="serve-drafter",
            hint="leave the folder out",
        )
    folder = Path(asked.drafter)
    if asked.method == "user-provided" or (asked.method and not folder.exists()):
        return None
    return read_drafter(folder, asked.method)


def _draft_len(asked: Asked, drafter: ServedDrafter | None) -> tuple[int, list[str]]:
    trained = drafter.draft_len if drafter else None
    longest = drafter.longest if drafter else None
    if asked.draft_len is None:
        return trained or DRAFT_LEN, []
    if longest is not None and asked.draft_len > longest:
        raise ConfigError(
            f"{asked.drafter} drafts at most {longest} tokens, asked for {asked.draft_len}",
            kind="serve-draft-len",
            hint=f"--draft-len {longest}",
        )
    if drafter and drafter.engine and trained and asked.draft_len > trained:
        return asked.draft_len, [f"the drafter was trained to draft {trained}; further tokens are accepted less"]
    return asked.draft_len, []
