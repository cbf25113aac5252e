"""From what a person typed to what runs: checked, planned, in a container, shown, written; this process become it.

Flags of containers as in vLLM's, SGLang's and TensorRT-LLM's own container pages and NVIDIA's playbooks.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from hiddenstore.console.output import output
from hiddenstore.console.text import clean
from hiddenstore.errors import ConfigError, ConflictError, Kind
from hiddenstore.fs.publish import replace_file
from hiddenstore.fs.seam import storage_errors
from hiddenstore.registry import nearest
from hiddenstore.servers import ServerProcess, VllmPython, flag_value
from hiddenstore.targets.folder import trusts_pinned_code
from hiddenstore.targets.gguf import target_folder
from trainer.export.support import ENGINES
from trainer.formats.base import parse_version
from trainer.serve.drafter import ServedDrafter, check_engine, check_target, read_drafter, refuse_python, warnings_of
from trainer.serve.plan import ServeOptions, ServePlan, ServeRequest, ServingEngine, methods, needs_model

DRAFT_LEN = 3
"""Tokens drafted per step where neither the user nor the drafter says: what all three engines' own pages start with."""


TARGET, DRAFTER, CONFIG, HUB_CACHE = "/models/target", "/models/drafter", "/config", "/models/hub"
FOLDERS = "/models/folders"
_DOCKER = ("docker", "run", "--rm", "--gpus", "all", "--ipc=host")
_ULIMITS = ("--ulimit", "memlock=-1", "--ulimit", "stack=67108864")


@dataclass(frozen=True)
class Resolved:
    """A request that was checked; ``warnings`` say what looks wrong or could not be checked."""

    request: ServeRequest
    warnings: list[str] = field(default_factory=list)


def resolve(engine: ServingEngine, options: ServeOptions) -> Resolved:
    """The request that ``options`` means. Raises ConfigError: nothing says what drafts, the engine lacks the method, or
    the drafter cannot draft so far; FormatError: the drafter was exported for another engine or target; NotFoundError:
    the drafter's folder is missing. ConfigError ``code-unpinned``: an engine that is to run the target's own Python
    would run what no commit pins, or the drafter's."""
    if not ENGINES[engine.name].reads_gguf:
        options = replace(options, target=target_folder(options.target))
    drafter = _drafter(options)
    method = drafter.method if drafter else (options.method or "")
    flags = (*options.flags, *(f"--{word}" for word in options.settings))
    if trusts_pinned_code(options.target, flags) and options.drafter and needs_model(method):
        refuse_python(options.drafter)
    if options.form not in engine.forms:
        raise ConfigError(
            f"{engine.title} has no form {options.form!r}; there is: {', '.join(engine.forms)}",
            kind=Kind.OPTION_INVALID,
        )
    version = options.version or engine.version
    exported_for = drafter.version if drafter and drafter.engine == engine.name else None
    if options.version is None and exported_for and parse_version(exported_for) != parse_version(version):
        version = exported_for
    parse_version(version)
    reads, warnings = engine.reads(method, version), []
    if drafter and needs_model(method):
        check_engine(drafter, engine, version)
        warnings += check_target(drafter, options.target)
        warnings += warnings_of(drafter, engine, version, options.target)
    draft_len, remarks = _draft_len(options, drafter, engine.title if reads and reads.full_blocks else None)
    checked = {
        "method": method,
        "drafter": options.drafter if needs_model(method) or method == "user-provided" else None,
        "draft_len": draft_len,
        "version": version,
        "layers": drafter.layers if drafter else (),
    }
    request = ServeRequest(**{**vars(options), **checked})
    return Resolved(request, warnings + remarks)


def plan_of(engine: ServingEngine, request: ServeRequest) -> ServePlan:
    """What would run, in the form asked for. Raises ConfigError: a setting is wrong; see the engine's ``plan``."""
    return _containerised(engine, request) if request.form == "container" else engine.plan(request)


def server_of(engine: ServingEngine, python: VllmPython, options: ServeOptions, log: Path) -> ServerProcess:
    """The server that ``options`` describe: vLLM's started by ``python``, llama.cpp's found on the PATH. Raises
    ConfigError: ``option-invalid``: of another engine; ``not-installed``; what cannot be served, as ``resolve``."""
    if engine.name not in ("vllm", "llamacpp"):
        raise ConfigError(
            f"{engine.title} is not started here; start it yourself, and name it",
            kind=Kind.OPTION_INVALID,
            hint=f"hiddenstore eval --engine {engine.name} --server URL --baseline-server URL",
        )
    if engine.name == "vllm":
        python.require()
    plan = plan_of(engine, resolve(engine, options).request)
    if engine.name == "llamacpp":
        require_installed(plan, engine, options.form)
        return ServerProcess(plan.command, {**os.environ, **plan.variables}, log)
    _, _, model, *flags = plan.command
    return ServerProcess(python.command(model, flags), {**python.environment(), **plan.variables}, log)


def _containerised(engine: ServingEngine, request: ServeRequest) -> ServePlan:
    """The plan of ``request`` as ``docker run``; local folders and the configuration file become mounts. Raises
    ConfigError: what the engine's own plan raises."""
    mounts: list[tuple[str, str]] = []
    inside = replace(request, form="command")
    # A local folder can be looked into only under its own name.
    outside = engine.plan(request)
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
    command = [*_DOCKER, *_ULIMITS, "-p", f"{planned.port}:{planned.port}"]
    command += ["-v", f"{Path.home() / '.cache' / 'huggingface'}:{HUB_CACHE}"]
    command += ["-e", f"HF_HOME={HUB_CACHE}", "-e", "HF_TOKEN"]
    for host, path in mounts:
        command += ["-v", f"{host}:{path}:ro"]
    for name, value in outside.folders.items():
        command += ["-v", f"{_absolute(value)}:{FOLDERS}/{name}:ro", "-e", f"{name}={FOLDERS}/{name}"]
    for name, value in planned.env.items():
        command += ["-e", f"{name}={value}"]
    image = engine.image(request.version)
    start = list(planned.command)
    if engine.entrypoint:
        command += ["--entrypoint", engine.entrypoint, image, *start[1:]]
    else:
        command += [image, *start]
    return replace(planned, command=tuple(command), files=files, env={}, folders={}, notes=outside.notes, image=image)


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def _drafter(options: ServeOptions) -> ServedDrafter | None:
    """What is in the drafter's folder; a hub id cannot be looked into, so its method has to be said."""
    if options.method is not None and options.method not in methods():
        close = nearest(options.method, methods())
        problem = f"no method {options.method!r}; there is: {', '.join(methods())}"
        raise ConfigError(problem, kind=Kind.SERVE_UNSUPPORTED, hint=f"--method {close}" if close else None)
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
        problem = f"--method {options.method} takes no drafter, but {options.drafter} was given"
        raise ConfigError(problem, kind=Kind.SERVE_SETTING, hint="leave the folder out")
    folder = Path(options.drafter)
    if options.method == "user-provided" or (options.method and not folder.exists()):
        return None
    return read_drafter(folder, options.method)


def _draft_len(options: ServeOptions, drafter: ServedDrafter | None, full: str | None) -> tuple[int, list[str]]:
    """``full``: the engine that drafts as far as this drafter can and no less; None where it may be less."""
    trained = drafter.draft_len if drafter else None
    longest = drafter.longest if drafter else None
    if full and longest and options.draft_len in (None, longest):
        remark = f"the drafter was exported to draft {trained}; {full} drafts its whole blocks alone, {longest} tokens"
        return longest, [remark] if trained != longest else []
    if full and longest:
        problem = f"{full} drafts whole blocks of {options.drafter} alone, {longest} tokens, not {options.draft_len}"
        raise ConfigError(problem, kind=Kind.SERVE_SETTING, hint=f"--draft-len {longest}")
    if options.draft_len is None:
        return trained or DRAFT_LEN, []
    if longest is not None and options.draft_len > longest:
        problem = f"{options.drafter} drafts at most {longest} tokens, asked for {options.draft_len}"
        raise ConfigError(problem, kind=Kind.SERVE_SETTING, hint=f"--draft-len {longest}")
    if drafter and drafter.engine and trained and options.draft_len > trained:
        return options.draft_len, [f"the drafter was exported to draft {trained}; further tokens are accepted less"]
    return options.draft_len, []


def document_of(request: ServeRequest, plan: ServePlan, engine: str) -> dict[str, Any]:
    """``hiddenstore.serve/1``: everything that would run, in parts."""
    return {
        "engine": engine,
        "engine_version": request.version,
        "method": request.method,
        "target": request.target,
        "drafter": request.drafter,
        "draft_len": request.draft_len if request.method != "none" else 0,
        "form": request.form,
        "command": list(plan.command),
        "env": dict(plan.variables),
        "files": dict(plan.files),
        "program": plan.program or None,
        "smoke_test": smoke_test(plan) if _serves(request) else None,
        "notes": list(plan.notes),
    }


def script(request: ServeRequest, plan: ServePlan) -> str:
    """The plan as one file: a shell script that writes the files and starts the engine, or a Python program."""
    if plan.program:
        return plan.program.rstrip("\n")
    parts = []
    for name, text in plan.files.items():
        parts.append("\n".join([f"cat > {shlex.quote(name)} <<'END_OF_FILE'", text.rstrip("\n"), "END_OF_FILE"]))
    parts.append("\n".join(shell_lines(plan.command, plan.variables, plan.image)))
    if _serves(request):
        lines = ["once it is up, from another terminal:", *shell_lines(smoke_test(plan))]
        parts.append("\n".join(f"# {line}" for line in lines))
    return "\n\n".join(parts)


def show(request: ServeRequest, plan: ServePlan, engine_title: str) -> None:
    """Print the plan to stdout."""
    if not output().out.is_terminal:
        output().print(script(request, plan))
        return
    what = request.method + (f" of {request.drafter}" if request.drafter else "")
    length = "" if request.method == "none" else f" · {request.draft_len} tokens a draft"
    _title(f"{engine_title} {request.version} · {what}{length}")
    if plan.program:
        _code(plan.program, "python")
        return
    for name, text in plan.files.items():
        _title(name)
        _code(text, "yaml")
    _title("runs" if request.form != "bench" else "measures")
    _code("\n".join(shell_lines(plan.command, plan.variables, plan.image)), "bash")
    if _serves(request):
        _title("once it is up, from another terminal")
        _code("\n".join(shell_lines(smoke_test(plan))), "bash")


def write_files(files: Mapping[str, str]) -> None:
    """Write each file; one that stands there with the same text stays. Raises ConflictError: a file of that name says
    something else; StorageError: the disk refused."""
    for name, text in files.items():
        path = Path(name)
        with storage_errors(name):
            if path.exists() and path.read_bytes() != text.encode():
                what = f"{path} exists and says something else"
                raise ConflictError(what, kind=Kind.OUTPUT_EXISTS, hint="-o ANOTHER.yaml")
            replace_file(path, text.encode())


def require_installed(plan: ServePlan, engine: ServingEngine, form: str) -> None:
    """Raise NotFoundError ``not-installed``, with how to get it, unless the plan's program can be started."""
    if not plan.command:
        problem = "the Python form is a program to keep, not a server to start"
        raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint="add --print-only, and redirect it to a file")
    program = plan.command[0]
    if shutil.which(program) is None:
        how = "install Docker with the NVIDIA container toolkit" if form == "container" else engine.install
        raise ConfigError(f"{program} is not installed here", kind=Kind.NOT_INSTALLED, hint=_hint(how, engine, form))
    if (
        program.startswith("python")
        and plan.command[1:2] == ("-m",)
        and not _has_module(program, plan.command[2].partition(".")[0])
    ):
        problem = f"{program} has no module {plan.command[2]}"
        raise ConfigError(problem, kind=Kind.NOT_INSTALLED, hint=_hint(engine.install, engine, form))


def become(plan: ServePlan) -> NoReturn:
    """Replace this process by the engine's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(plan.command[0], list(plan.command), {**os.environ, **plan.variables})


def smoke_test(plan: ServePlan) -> list[str]:
    """A curl command that asks the running server for a few tokens, as arguments."""
    body = {"model": plan.served_as, "prompt": "The capital of France is", "max_tokens": 32, "temperature": 0}
    url, data = f"http://localhost:{plan.port}/v1/completions", json.dumps(body, ensure_ascii=False)
    return ["curl", url, "-H", "Content-Type: application/json", "-d", data]


def shell_lines(command: Sequence[str], env: Mapping[str, str] | None = None, image: str = "") -> list[str]:
    """A command as a person would write it in a shell: each option with its values on a line, and the ``image``."""
    lines: list[list[str]] = [[f"{name}={shlex.quote(value)}" for name, value in (env or {}).items()]]
    for i, part in enumerate(command):
        is_option = part.startswith("-") and part not in ("-m", "-c") and i > 0
        if is_option or (image and part == image):
            lines.append([])
        lines[-1].append(shlex.quote(part))
    texts = [" ".join(line) for line in lines if line]
    return [("  " if i else "") + text + (" \\" if i + 1 < len(texts) else "") for i, text in enumerate(texts)]


def _serves(request: ServeRequest) -> bool:
    return request.form in ("command", "container") and request.method != "user-provided"


def _title(text: str) -> None:
    from rich.text import Text

    output().out.print(Text(clean(text), style="bold"), soft_wrap=True)


def _code(text: str, language: str) -> None:
    """Highlighted and never wrapped, so that it can be copied out of the terminal."""
    from rich.syntax import Syntax

    highlighted = Syntax("", language, theme="ansi_dark", background_color="default").highlight(
        clean(text.rstrip("\n"))
    )
    highlighted.rstrip()
    output().out.print(highlighted, soft_wrap=True)
    output().out.print()


def _has_module(python: str, name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


def _hint(how: str, engine: ServingEngine, form: str) -> str:
    can_contain = form != "container" and "container" in engine.forms and "container" not in how
    container = ", or --form container" if can_contain else ""
    return f"{how}{container}, or --print-only to run the command where {engine.title} is"
