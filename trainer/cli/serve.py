"""``hiddenstore serve``: the exact command and configuration that serve a target with a drafter, printed or run."""

import shlex
from pathlib import Path
from typing import Any

import click

from hiddenstore.cli.words import Name
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.files.layout import kind_of
from trainer.serve import ENGINES

_FLAGS = "hiddenstore.serve.flags"


class WithEngineFlags(click.Command):
    """A command that leaves everything after ``--`` to the engine, even where DIR is left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_FLAGS] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ENGINE FLAGS…]"]


@click.command(
    cls=WithEngineFlags,
    epilog=examples(
        "hiddenstore serve drafter --target Qwen/Qwen3-8B --engine vllm",
        "hiddenstore serve --method ngram --target Qwen/Qwen3-8B --engine sglang --print-only",
        "hiddenstore serve drafter --target Qwen/Qwen3-8B --engine trtllm -o serve.yaml --print-only -- --tp_size 2",
        "hiddenstore serve drafter.gguf --target target.gguf --engine llamacpp -- --port 8080",
        "hiddenstore serve --check serve.yaml",
    ),
)
@click.argument("drafter", required=False, metavar="[DIR]")
@click.option("--target", help="Folder, GGUF file or hub id of the target.")
@click.option(
    "--engine", type=Name(ENGINES.require, ENGINES), metavar="NAME", help=f"{', '.join(ENGINES)}: what serves it."
)
@click.option("--engine-version", "version", metavar="V", help="Write the command for this version of the engine.")
@click.option("--method", metavar="M", help="How to draft without a drafter: ngram, suffix, mtp, none; or what DIR is.")
@click.option("--draft-len", type=click.IntRange(min=1), help="Tokens drafted per step. Default: the drafter's own.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the engine's speculation.")
@click.option(
    "--form",
    type=click.Choice(["command", "python", "container", "bench"]),
    default="command",
    show_default=True,
    help="A command, a Python program, a container, or trtllm-bench with the same file.",
)
@click.option(
    "-o", "--write", "config_file", type=click.Path(dir_okay=False), help="Where to write the configuration file."
)
@click.option("--print-only", is_flag=True, help="Print what would run, and run nothing.")
@click.option("--check", "checked", type=click.Path(dir_okay=False), help="Check a TensorRT-LLM YAML file instead.")
@common_options
def serve(drafter: str | None, engine: str | None, print_only: bool, checked: str | None, **options: Any) -> None:
    """Serve a target with a drafter: print the engine's exact command and configuration, or run it.

    DIR is what ``hiddenstore export`` wrote (a folder, or a GGUF file), a published drafter, or a run or checkpoint of
    ``hiddenstore train``, which is exported first, into RUN/exports. Everything after -- goes to the engine.
    """
    if checked:
        _check(checked, options["version"])
        return
    from trainer.serve.launch import become, document_of, plan_of, require_installed, resolve, script, show, write_files
    from trainer.serve.plan import ServeOptions

    missing = [name for name, value in (("--target", options["target"]), ("--engine", engine)) if not value]
    if engine is None or missing:
        raise ConfigError(
            f"serve needs {' and '.join(missing)}",
            kind=Kind.SERVE_SETTING,
            hint="hiddenstore serve DIR --target Qwen/Qwen3-8B --engine vllm",
        )
    serving = ENGINES[engine]
    flags = click.get_current_context().meta[_FLAGS]
    if drafter is not None and (run := _run_at(drafter)):
        drafter, draft_len = _exported(run, engine, options["version"], options["target"])
        options["draft_len"] = options["draft_len"] or draft_len
    resolved = resolve(serving, ServeOptions(drafter=drafter, flags=flags, **options))
    request, plan = resolved.request, plan_of(serving, resolved.request)
    runs = not print_only and output().mode != "json"
    if runs:
        require_installed(plan, serving, request.form)
    if request.config_file or runs:
        write_files(plan.files)
    document = document_of(request, plan, engine) | {"warnings": resolved.warnings}
    output().data(document, human=lambda: show(request, plan, serving.title), quiet=script(request, plan))
    for warning in resolved.warnings:
        output().warn(warning)
    for note in plan.notes:
        output().note(note)
    if runs:
        become(plan)


def _run_at(drafter: str) -> str | None:
    """The run or checkpoint that ``drafter`` is; None where it is none."""
    path = Path(drafter)
    is_checkpoint = (path / "state.json").is_file() or (path.name == "LATEST" and path.is_file())
    return drafter if is_checkpoint or kind_of(path) == "run" else None


def _exported(run: str, engine: str, version: str | None, target: str) -> tuple[str, int | None]:
    """The folder of a checkpoint's export for an engine, made where it is not there yet, and the draft length that
    ``eval --costs`` chose, be it after the export; None where nobody did."""
    from trainer.evaluate.cost import kept
    from trainer.export.support import ENGINES
    from trainer.export.write import checkpoint_of
    from trainer.export.write import export as write
    from trainer.serve.drafter import read_drafter
    from trainer.train.checkpoint import resolve
    from trainer.train.run_folder import EXPORTS, describe, load_drafter

    checkpoint = resolve(Path(run))
    at = version or ENGINES[engine].version
    out = checkpoint.parent.parent / EXPORTS / f"{engine}-{at}-{checkpoint.name}"
    if not out.is_dir():
        words = ["hiddenstore", "export", str(checkpoint), "--engine", engine, "--engine-version", at, "-o", str(out)]
        named = target if ENGINES[engine].reads_gguf else None
        words += [] if named is None else ["--target", named]
        output().note(f"$ {shlex.join(words)}")
        write(checkpoint_of(load_drafter(checkpoint), str(checkpoint), named), engine, out, None, at)
    info, longest = describe(str(checkpoint)), read_drafter(out).longest
    length = kept(info.run, info.spec.step, info.spec.target.dtype)
    return str(out), min(length, longest or length) if length else None


def _check(file: str, version: str | None) -> None:
    from trainer.serve.trtllm import check_file

    settings = check_file(Path(file), version)
    kind = (settings.get("speculative_config") or {}).get("decoding_type")
    output().data(
        {
            "schema": "hiddenstore.serve-check/1",
            "file": file,
            "valid": True,
            "engine_version": version,
            "decoding_type": kind,
            "settings": settings,
        },
        human=f"{file}: {len(settings)} settings, nothing wrong" + (f" · {kind}" if kind else ""),
    )
