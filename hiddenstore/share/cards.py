"""README.md of what is pushed: YAML that the hub reads, then what it is, where it came from and how to use it.

No word of a sample stands in it unless asked for, no path of this machine, and nothing that was not measured.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hiddenstore.console.output import output
from hiddenstore.console.text import clean, size
from hiddenstore.errors import ConfigError, Kind, NotFoundError
from hiddenstore.files.damage import raise_refusal
from hiddenstore.files.documents import foreign_json
from hiddenstore.fs.seam import storage_errors
from hiddenstore.inspect.facts import info
from hiddenstore.store import Store
from hiddenstore.targets.checkpoint import read_object

_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))
_IDS = (
    "The token ids of every sample are in it, and token ids are the text: whoever can read this can read the "
    "conversations. It is not anonymised."
)
_SHOWN_CHARACTERS = 2000


def store_card(store: "Store", address: str, measured: str, samples: int) -> str:
    """The card of a store at ``address``; ``samples`` of its first samples are shown as text."""
    facts, target = info(store), store.capture.target
    width = facts["hidden_size"]
    front: dict[str, Any] = {
        "pretty_name": _line(f"Hidden states of {target.name}"),
        "tags": ["hiddenstore", "speculative-decoding", "hidden-states", "webdataset"],
        "size_categories": [next((word for most, word in _SIZES if facts["samples"] < most), "n>10M")],
    }
    # The hub's viewer shows rows, and so the text.
    front |= {} if samples else {"viewer": False}
    final = "none" if store.capture.final == "none" else f"{store.capture.final} rows, {store.capture.final_norm}"
    engine = facts["engine"] or {"name": "?", "version": ""}
    splits = ", ".join(f"{split} {number:,}" for split, number in facts["splits"].items())
    rows = [
        ("target", _target(target.model_dump())),
        ("layers", f"{list(store.capture.aux_layers)} (states after decoder block k, from 0), width {width:,}"),
        ("final hidden", final),
        ("recipe", f"{facts['recipe']} ({', '.join(f'{k}: {v}' for k, v in facts['codecs'].items())})"),
        ("samples", f"{facts['samples']:,} ({splits})"),
        ("tokens", f"{facts['tokens']:,}, of which {facts['supervised_tokens']:,} supervised"),
        ("size", f"{size(facts['bytes_on_disk'])}; as bf16 at every token {size(facts['bytes_raw'])}"),
        ("captured by", f"{engine['name']} {engine['version']}".strip()),
    ]
    use = [
        shlex.join(["hiddenstore", "pull", address, "store"]),
        "hiddenstore verify store --full",
        "hiddenstore train store -o run",
    ]
    what = "A store of hidden states to train drafters for speculative decoding from, without the target in memory."
    parts = [_IDS, measured, *_texts(store, samples)]
    return _card(front, f"Hidden states of {target.name}", what, rows, use, parts)


def drafter_card(folder: Path, files: Sequence[Path], address: str, measured: str) -> str:
    """The card of an exported drafter. Raises ConfigError ``drafter-unfit``: its ``hiddenstore.json`` is none."""
    try:
        about = foreign_json((folder / "hiddenstore.json").read_bytes())
        config = foreign_json((folder / "config.json").read_bytes())
        target, drafter = about["target"], _line(str(about["drafter"]))
        engine = f"{about['engine']} {about['engine_version']}"
        reads = next((config[key] for key in config if "layer_ids" in key), about.get("layers"))
        rows = [
            ("target", _target(target)),
            ("drafter", drafter),
            ("for", f"{engine}, drafts of {about['draft_len']} tokens"),
            ("reads layers", f"{reads}, as {engine} counts them" if reads else "the final hidden only"),
            ("size", size(sum(file.stat().st_size for file in files))),
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise_refusal(error, folder)
        message = f"no card can be made of {folder}, whose hiddenstore.json or config.json says too little: {error}"
        raise ConfigError(message, kind=Kind.DRAFTER_UNFIT, hint="--card README.md, one of your own") from error
    name = _line(str(target["name"]))
    front: dict[str, Any] = {"tags": ["hiddenstore", "speculative-decoding", drafter]}
    front |= {"base_model": name} if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else {}
    use = [
        shlex.join(["hiddenstore", "pull", address, "drafter"]),
        shlex.join(["hiddenstore", "serve", "drafter", "--target", "TARGET", "--engine", _line(str(about["engine"]))]),
    ]
    what = f"A {drafter} drafter for speculative decoding of {name}, trained with hiddenstore."
    return _card(front, f"{drafter} for {name}", what, rows, use, [measured])


def accepted_length(results: str | Path, drafter: Path | None = None) -> str:
    """What ``eval --json`` or ``decode --json`` printed: the accepted length and the command that measured it, by the
    last names of its folders. Raises NotFoundError ``path-missing``; ConfigError ``option-invalid``: something else, or
    figures of another run or step than the exported ``drafter`` is of."""
    try:
        given = foreign_json(Path(results).read_bytes())
        width, run = int(given.get("tree_width", 1)), Path(given["run"]).name
        shape = f"{int(given['draft_len'])}x{width}" if width > 1 else str(int(given["draft_len"]))
        if given["schema"] == "hiddenstore.eval/1":
            where = f"simulated on recorded {_plain(given['split'])} text"
            words = ["eval", run, Path(given["store"]).name, "--split", given["split"], "--draft-len", shape]
        elif given["schema"] == "hiddenstore.decode/1":
            where = "live speculative decoding"
            words = ["decode", run, "--target", given["target"], "--draft-len", shape]
            words += ["--temperature", str(given["temperature"])] if given.get("temperature") else []
        else:
            raise ValueError(f"schema is {given['schema']!r}")
        floor = given.get("ngram_accepted_length")
        beside = "" if floor is None else f" The best n-gram table from the same text has {floor:.3f}."
        command = shlex.join(["hiddenstore", *map(_line, words)])
        text = (
            f"## Accepted length\n\n**{given['accepted_length']:.3f}** tokens a target forward, bonus token counted, "
            f"step {given['step']:,}, {where}.{beside} Measured by:\n\n```sh\n{command}\n```"
        )
        measured = _run_name(given["run"]), int(given["step"])
    except FileNotFoundError as error:
        raise NotFoundError(f"--results: {results} does not exist", kind=Kind.PATH_MISSING) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise_refusal(error, results)
        hint = "hiddenstore eval RUN STORE --json > results.json"
        message = f"--results: {results} is not what eval or decode prints with --json: {error}"
        raise ConfigError(message, kind=Kind.OPTION_INVALID, hint=hint) from error
    if drafter is not None:
        _require_measured(drafter, *measured, results)
    return text


def _run_name(path: str) -> str:
    """Of a run, or of the one whose checkpoint is named; empty where it was the working folder."""
    folder = Path(path)
    return (folder.parent.parent if folder.parent.name == "checkpoints" else folder).name


def _require_measured(drafter: Path, run: str, step: int, results: str | Path) -> None:
    """ConfigError ``option-invalid`` unless the export is of the step that was measured; a warning where it is one of
    an earlier version and does not say."""
    file = drafter / "hiddenstore.json"
    with storage_errors(file):
        about = (read_object(file) if file.is_file() else None) or {}
    exported = about.get("run"), about.get("step")
    if exported == (None, None):
        output().warn(f"{drafter} does not say of which run it is: nothing tells whether --results measured it")
    elif exported[1] != step or (run and exported[0] != run):
        problem = f"--results: {results} measured step {step:,} of {run or 'a run'}, and {drafter} is"
        raise ConfigError(
            f"{problem} step {exported[1]} of {exported[0]}",
            kind=Kind.OPTION_INVALID,
            hint="hiddenstore eval RUN STORE --json > results.json   of that run, or export the one measured",
        )


def _target(target: Mapping[str, Any]) -> str:
    revision = f" at {target['revision']}" if target.get("revision") else ""
    weights = target.get("checkpoint_sha256") or target["weights_sha256"]
    return f"{target['name']}{revision} ({target['num_layers']} layers, {target['dtype']}, weights {weights[:12]}…)"


def _texts(store: "Store", samples: int) -> list[str]:
    from hiddenstore.inspect.samples import load_tokenizer, token_text

    tokenizer = load_tokenizer(store) if samples else None
    texts = []
    for sample_id in list(store.sample_ids[:samples]):
        ids = store[sample_id].sample.input_ids
        text = token_text(ids, 0, len(ids), tokenizer)[:_SHOWN_CHARACTERS]
        texts.append("\n".join([f"Sample `{sample_id[:12]}`:", "", *(f"    {line}" for line in text.splitlines())]))
    return texts


def _line(text: str) -> str:
    """What a document says, on one line; a line of its own could end the YAML, a table or a fence."""
    return clean(" ".join(text.split()))


def _plain(text: str) -> str:
    """The same as text of Markdown, in which nothing is code, a link or HTML."""
    return re.sub(r"[\\`*<]|(?<=\])\(", r"\\\g<0>", _line(text))


def _card(
    front: Mapping[str, Any],
    title: str,
    what: str,
    rows: Sequence[tuple[str, str]],
    use: Sequence[str],
    parts: Sequence[str],
) -> str:
    table = ["| | |", "|---|---|", *(f"| {name} | {_plain(value).replace('|', '/')} |" for name, value in rows)]
    head = ["---", yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True).rstrip(), "---"]
    code = ["```sh", *use, "```"]
    body = [f"# {_plain(title)}", _plain(what), "\n".join(table), "\n".join(code), *filter(None, parts)]
    return "\n".join(head) + "\n\n" + "\n\n".join(body) + "\n"
