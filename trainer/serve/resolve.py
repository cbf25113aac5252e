"""From what a person typed to what runs: method, draft length and version, each checked first, and the container.

Flags of containers as in vLLM's, SGLang's and TensorRT-LLM's own container pages and NVIDIA's playbooks.
"""

import shlex
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from hiddenstore.errors import ConfigError, Kind
from trainer.formats.base import parse_version
from trainer.serve.drafter import ServedDrafter, check_engine, check_target, read_drafter, warnings_of
from trainer.serve.plan import ServeOptions, ServePlan, ServeRequest, ServingEngine, flag_value, methods, needs_model

DRAFT_LEN = 3
"""Tokens drafted per step where neither the user nor the drafter says: what all three engines' own pages start with."""


TARGET, DRAFTER, CONFIG, HUB_CACHE = "/models/target", "/models/drafter", "/config", "/models/hub"
_DOCKER = (
    "docker",
    "run",
    "--rm",
    "--gpus",
    "all",
    "--ipc=host",
    "--ulimit",
    "memlock=-1",
    "--ulimit",
    "stack=67108864",
)


@dataclass(frozen=True)
class Resolved:
    """A request that was checked; ``warnings`` say what looks wrong or could not be checked."""

    request: ServeRequest
    warnings: list[str] = field(default_factory=list)


def resolve(engine: ServingEngine, options: ServeOptions) -> Resolved:
    """The request that ``options`` means.

    Raises:
        ConfigError: nothing says what drafts, the engine lacks the method, or the drafter cannot draft so far.
        FormatError: the drafter was exported for another engine or target.
        NotFoundError: the drafter's folder is missing.
    """
    drafter = _drafter(options)
    method = drafter.method if drafter else (options.method or "")
    if options.form not in engine.forms:
        raise ConfigError(
            f"{engine.title} has no form {options.form!r}; there is: {', '.join(engine.forms)}",
            kind=Kind.OPTION_INVALID,
        )
    version = options.version or engine.version
    if (
        options.version is None
        and drafter
        and drafter.version
        and parse_version(drafter.version) > parse_version(version)
    ):
        version = drafter.version
    parse_version(version)
    engine.check(method, version)
    warnings = []
    if drafter and needs_model(method):
        check_engine(drafter, engine, version)
        warnings += check_target(drafter, options.target)
        warnings += warnings_of(drafter, engine, version, options.target)
    draft_len, remarks = _draft_len(options, drafter)
    checked = {
        "method": method,
        "drafter": options.drafter if needs_model(method) or method == "user-provided" else None,
        "draft_len": draft_len,
        "version": version,
    }
    request = ServeRequest(**{**vars(options), **checked})
    return Resolved(request, warnings + remarks)


def plan_of(engine: ServingEngine, request: ServeRequest) -> ServePlan:
    """What would run, in the form asked for.

    Raises:
        ConfigError: a setting is wrong; see the engine's ``plan``.
    """
    return _containerised(engine, request) if request.form == "container" else engine.plan(request)


def _containerised(engine: ServingEngine, request: ServeRequest) -> ServePlan:
    """The plan of ``request`` as ``docker run``; local folders and the configuration file become mounts.

    Raises:
        ConfigError: what the engine's own plan raises.
    """
    mounts: list[tuple[str, str]] = []
    inside = replace(request, form="command")
    # A local folder can be looked into only under its own name.
    engine.plan(inside)
    if Path(request.target).is_dir():
        mounts.append((_absolute(request.target), TARGET))
        inside = replace(inside, target=TARGET)
    if needs_model(request.method) and request.drafter and Path(request.drafter).is_dir():
        mounts.append((_absolute(request.drafter), DRAFTER))
        inside = replace(inside, drafter=DRAFTER)
    if flag_value(request.flags, "--host") is None:
        inside = replace(inside, flags=("--host", "0.0.0.0", *inside.flags))
    if flag_value(request.flags, "--port") is None:
        inside = replace(inside, flags=("--port", str(engine.port), *inside.flags))
    on_host = request.config_file or engine.config_file
    if on_host is not None:
        inside = replace(inside, config_file=f"{CONFIG}/{Path(on_host).name}")
    planned = engine.plan(inside)
    files = {}
    for path, text in planned.files.items():
        files[on_host or path] = text
        mounts.append((_absolute(on_host or path), path))
    command = [*_DOCKER, "-p", f"{planned.port}:{planned.port}"]
    command += ["-v", f"{Path.home() / '.cache' / 'huggingface'}:{HUB_CACHE}"]
    command += ["-e", f"HF_HOME={HUB_CACHE}", "-e", "HF_TOKEN"]
    for host, path in mounts:
        command += ["-v", f"{host}:{path}:ro"]
    for name, value in planned.env.items():
        command += ["-e", f"{name}={value}"]
    image = engine.image(request.version)
    start = list(planned.command)
    if engine.entrypoint:
        command += ["--entrypoint", engine.entrypoint, image, *start[1:]]
    else:
        command += [image, *start]
    return replace(planned, command=tuple(command), files=files, env={}, image=image)


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def _drafter(options: ServeOptions) -> ServedDrafter | None:
    """What is in the drafter's folder; a hub id cannot be looked into, so its method has to be said."""
    if options.method is not None and options.method not in methods():
        close = get_close_matches(options.method, methods(), n=1, cutoff=0.4)
        raise ConfigError(
            f"no method {options.method!r}; there is: {', '.join(methods())}",
            kind=Kind.SERVE_UNSUPPORTED,
            hint=f"--method {close[0]}" if close else None,
        )
    if options.drafter is None:
        if options.method is None:
            raise ConfigError(
                "nothing says what drafts: neither a drafter's folder nor a method",
                kind=Kind.SERVE_UNSUPPORTED,
                hint=f"hiddenstore serve DIR --target {shlex.quote(options.target)}, or --method ngram",
            )
        if needs_model(options.method):
            meaning = methods()[options.method]
            raise ConfigError(
                f"--method {options.method} needs {meaning}: its folder or hub id as the first argument",
                kind=Kind.SERVE_SETTING,
                hint=f"hiddenstore serve DIR --method {options.method} --target {shlex.quote(options.target)}",
            )
        return None
    if options.method is not None and not needs_model(options.method) and options.method != "user-provided":
        raise ConfigError(
            f"--method {options.method} takes no drafter, but {options.drafter} was given",
            kind=Kind.SERVE_SETTING,
            hint="leave the folder out",
        )
    folder = Path(options.drafter)
    if options.method == "user-provided" or (options.method and not folder.exists()):
        return None
    return read_drafter(folder, options.method)


def _draft_len(options: ServeOptions, drafter: ServedDrafter | None) -> tuple[int, list[str]]:
    trained = drafter.draft_len if drafter else None
    longest = drafter.longest if drafter else None
    if options.draft_len is None:
        return trained or DRAFT_LEN, []
    if longest is not None and options.draft_len > longest:
        raise ConfigError(
            f"{options.drafter} drafts at most {longest} tokens, asked for {options.draft_len}",
            kind=Kind.SERVE_SETTING,
            hint=f"--draft-len {longest}",
        )
    if drafter and drafter.engine and trained and options.draft_len > trained:
        return options.draft_len, [f"the drafter was trained to draft {trained}; further tokens are accepted less"]
    return options.draft_len, []
