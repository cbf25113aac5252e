"""What is asked for (``ServeRequest``) and what would run (``ServePlan``): the words every engine module speaks."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hiddenstore.errors import ConfigError
from trainer.export.support import support

METHODS = {
    "eagle1": "an EAGLE-1/2 drafter",
    "eagle3": "an EAGLE-3 drafter",
    "eagle3.1": "an EAGLE-3.1 drafter",
    "dflash": "a DFlash drafter",
    "medusa": "a Medusa drafter",
    "draft-target": "a small model of the same vocabulary",
    "ngram": "tokens looked up in the text so far",
    "mtp": "the target's own multi-token prediction",
    "user-provided": "your own drafter class",
    "none": "no speculation: the baseline",
}
"""How tokens are drafted, in our words."""

TRAINED = ("eagle1", "eagle3", "eagle3.1", "dflash", "medusa")
NEEDS_MODEL = (*TRAINED, "draft-target")
FORMS = ("command", "python", "container", "bench")


@dataclass(frozen=True)
class ServeRequest:
    """What to serve.

    ``drafter`` is a folder or hub id; ``settings`` are ``key=value`` words for the engine's speculation or file;
    ``flags`` go to the engine's command line as they are; ``config_file`` is where a configuration file is written.
    """

    target: str
    method: str
    draft_len: int
    version: str
    drafter: str | None = None
    form: str = "command"
    settings: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    config_file: str | None = None


@dataclass(frozen=True)
class ServePlan:
    """What would run: a command, the files written before it, variables set for it.

    ``program`` is Python source instead of a command where the Python form was asked for; ``notes`` say what a user
    should know; ``served_as`` and ``port`` are what the smoke test calls; ``image`` is the container it runs in.
    """

    command: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    program: str = ""
    notes: tuple[str, ...] = ()
    served_as: str = ""
    port: int = 8000
    image: str = ""


@dataclass(frozen=True)
class ServingEngine:
    """One engine.

    ``version`` is what commands are written for unless told; ``untrained`` are the methods it has besides drafters
    that are trained (those are the export table's to say), ``plan`` writes the command, ``install`` and ``image`` get
    the engine; ``entrypoint`` is the program that its image has to be told to start, where the image would start
    another; ``config_file`` is the usual name of the file it is configured by; ``loads`` are the
    formats of ``hiddenstore export`` that it reads.
    """

    name: str
    title: str
    version: str
    untrained: tuple[str, ...]
    plan: Callable[[ServeRequest], ServePlan]
    install: str
    image: Callable[[str], str]
    port: int
    forms: tuple[str, ...]
    entrypoint: str | None
    config_file: str | None
    loads: tuple[str, ...]

    def check(self, method: str, version: str) -> None:
        """Raise ConfigError ``serve-unsupported`` unless ``version`` of the engine drafts with ``method``."""
        if method in self.untrained:
            return
        if method not in TRAINED:
            raise ConfigError(
                f"{self.title} does not draft with {method} ({METHODS.get(method, 'unknown')})",
                kind="serve-unsupported",
                hint=f"--method {' | '.join(self.untrained)}",
            )
        said = support(self.name, version, method)
        if not said.ok:
            raise ConfigError(
                f"{self.title} {version} does not serve {METHODS[method]}: {said.reason}",
                kind="serve-unsupported",
                hint=said.nearest,
            )


def flag_value(flags: tuple[str, ...], *names: str) -> str | None:
    """The value of ``--name value`` or ``--name=value`` among ``flags``; the last one counts."""
    found = None
    for i, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name in names:
            found = value if equals else (flags[i + 1] if i + 1 < len(flags) else None)
    return found


def port_of(flags: tuple[str, ...], usual: int) -> int:
    """The port that ``flags`` ask the server to listen on, else the ``usual`` one."""
    port = flag_value(flags, "--port")
    return int(port) if port and port.isdecimal() else usual


def split_settings(words: tuple[str, ...]) -> dict[str, str]:
    """``key=value`` words as a mapping.

    Raises:
        ConfigError: a word without an equals sign.
    """
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {word}: should be key=value", kind="serve-setting")
        found[key] = value
    return found


def smoke_test(plan: ServePlan) -> list[str]:
    """A curl command that asks the running server for a few tokens, as arguments."""
    body = {"model": plan.served_as, "prompt": "The capital of France is", "max_tokens": 32, "temperature": 0}
    return [
        "curl",
        f"http://localhost:{plan.port}/v1/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps(body, ensure_ascii=False),
    ]


def shell_lines(
    command: tuple[str, ...] | list[str], env: Mapping[str, str] | None = None, image: str = ""
) -> list[str]:
    """A command as a person would write it in a shell: each option with its values on a line, and the ``image``."""
    lines: list[list[str]] = [[f"{name}={shlex.quote(value)}" for name, value in (env or {}).items()]]
    for i, part in enumerate(command):
        is_option = part.startswith("-") and part not in ("-m", "-c") and i > 0
        if is_option or (image and part == image):
            lines.append([])
        lines[-1].append(shlex.quote(part))
    texts = [" ".join(line) for line in lines if line]
    return [("  " if i else "") + text + (" \\" if i + 1 < len(texts) else "") for i, text in enumerate(texts)]
