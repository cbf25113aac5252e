"""Pages of the site that are read from the code at build, and what keeps the committed ones readable in both places.

MkDocs calls the functions named ``on_…``; they need the package's own environment beside MkDocs.
"""

import inspect
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
API = {
    "Stores and records": ("hiddenstore.open", "hiddenstore.store.Store", "hiddenstore.records"),
    "Reading for training": ("hiddenstore.data.samples", "hiddenstore.data.batches", "hiddenstore.data.packed"),
    "Writing": ("hiddenstore.writer",),
    "Errors": ("hiddenstore.errors",),
    "Seams for plug-ins": (
        *("hiddenstore.codecs.base", "hiddenstore.segments.base", "collectors.engines"),
        *("trainer.drafters.base", "trainer.losses.kinds", "trainer.serve.plan", "hiddenstore.fs.seam"),
    ),
}
OUTSIDE = re.compile(
    r"\[([^\]]*)\]\((?:\.\./)+((?:CONTRIBUTING|CHANGELOG|README)\.md|(?:benchmarks|collectors|tests)/[^)#]+|NOTICE)\)"
)
PLACES = {"CONTRIBUTING.md": "reference/contributing.md", "CHANGELOG.md": "reference/changelog.md"}


def on_config(config: MkDocsConfig) -> None:
    """MkDocs puts the search path back after loading this file, so the repository joins it here."""
    sys.path.insert(0, str(ROOT))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the two of the repository's root."""
    pages = {
        "reference/commands.md": "\n".join(_commands()),
        "reference/settings.md": "\n".join(_settings()),
        "reference/python.md": "\n".join(_api()),
        **{place: (ROOT / name).read_text(encoding="utf-8") for name, place in PLACES.items()},
    }
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_rest: Any) -> str:
    """Paths as the repository has them become those of the site; files that are no pages become plain text."""
    up = "../" * page.file.src_uri.count("/")

    def inside(match: re.Match[str]) -> str:
        text, path = match.groups()
        return f"[{text}]({up}{PLACES[path]})" if path in PLACES else f"{text} (`{path}`)"

    return OUTSIDE.sub(inside, markdown)


def _commands() -> Iterator[str]:
    """Every command by section: what ``--help`` says, and its options as a table."""
    from hiddenstore.cli import SECTIONS, find_commands, main

    yield "# Commands\n\nRead from the command line itself; `hiddenstore COMMAND --help` says the same."
    for section in SECTIONS:
        specs = [spec for spec in find_commands().values() if spec.section == section]
        if specs:
            yield f"\n## {section}\n"
        for spec in specs:
            context = click.Context(main)
            command = main.get_command(context, spec.name)
            assert command is not None
            yield from _command(command, click.Context(command, context, spec.name), spec.summary)


def _command(command: click.Command, context: click.Context, summary: str) -> Iterator[str]:
    usage = " ".join(["hiddenstore", str(context.info_name), *command.collect_usage_pieces(context)])
    yield f"### {context.info_name}\n\n{summary}\n\n```\n{usage}\n```\n"
    yield _prose(command.help)
    rows = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
    yield "\n| option | what it does |\n|---|---|"
    yield from (f"| {_code(name)} | {_cell(text)} |" for name, text in rows)
    lines = (command.epilog or "").partition("Examples:\n")[2]
    yield f"\n```sh\n{re.sub('^  ', '', lines, flags=re.MULTILINE)}\n```\n" if lines else ""


def _settings() -> Iterator[str]:
    """Every training setting of every drafter: default or where it comes from, and its docstring."""
    from hiddenstore.settings import key_paths
    from hiddenstore.testing.builders import make_store
    from trainer.drafters import DRAFTERS
    from trainer.presets import preset_names
    from trainer.settings import config_class, derived

    yield "# Training settings\n"
    yield (
        "`hiddenstore train STORE -o RUN KEY=VALUE …` takes any of these, a YAML file (`-c FILE`) or a preset "
        f"({', '.join(f'`{name}`' for name in preset_names())}) several. *store*: derived from the store, its target "
        "and the drafter; `hiddenstore train STORE --settings` lists the values a run would take and why. "
        "Precedence: default, store, file, word."
    )
    scratch = tempfile.mkdtemp()
    store = make_store(Path(scratch))
    fields: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name in DRAFTERS:
        model, from_store = config_class(name), derived(store, name)
        for key in dict.fromkeys(".".join(path.split(".")[:2]) for path in key_paths(model)):
            section, field = key.split(".")
            info = model.model_fields[section].annotation.model_fields[field]
            is_derived = field in from_store.get(section, {})
            value = "*store*" if is_derived else _code(_default(info))
            said = (value, _cell(" ".join((info.description or "").split())))
            fields.setdefault(key, {}).setdefault(said, []).append(name)
    shutil.rmtree(scratch)
    headed = None
    for key, variants in fields.items():
        if (section := key.partition(".")[0]) != headed:
            headed = section
            yield f"\n## {section}\n\n| setting | default | of | what it is |\n|---|---|---|---|"
        for (value, text), names in variants.items():
            yield f"| `{key}` | {value} | {'all' if len(names) == len(DRAFTERS) else ', '.join(names)} | {text} |"


def _default(info: Any) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    return "none" if value is None else str(value)


def _api() -> Iterator[str]:
    yield "# Python API\n\nSignatures and docstrings from the source. The guide: [from Python](../python.md)."
    for title, names in API.items():
        yield f"\n## {title}\n"
        yield from (f"::: {name}\n" for name in names)


def _prose(text: str | None) -> str:
    # Indented lines would be a listing.
    return inspect.cleandoc((text or "").replace("\f", "").replace("\b", "")).replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
