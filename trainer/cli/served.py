"""The part of ``hiddenstore eval`` that measures a running server: its options, and how the answer looks."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hiddenstore.cli.output import output

if TYPE_CHECKING:
    from trainer.drafting.questions import Question
    from trainer.served.servers import Render, Server

F = TypeVar("F", bound=Callable[..., Any])

ENGINES = ("vllm", "sglang", "http")


def served_options(function: F) -> F:
    """The options of a measured server, in the order ``--help`` shows them."""
    options = (
        click.option("--engine", type=click.Choice(ENGINES), help="Measure a running server instead of walking text."),
        click.option("--server", "servers", multiple=True, metavar="URL", help="Of the server; several make a table."),
        click.option("--baseline-server", metavar="URL", help="The same target without speculation, for the speed-up."),
        click.option("--prompts", "prompts", multiple=True, metavar="FILE", help="JSONL of questions; repeatable."),
        click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the servers' key."),
        click.option("--model", help="The served model, where a server has several."),
        click.option("--target", help="Render prompts with this tokenizer here, and send token ids."),
        click.option("-n", "--count", type=click.IntRange(min=1), help="Questions of each task. Default: all."),
        click.option(
            "--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Per answer."
        ),
        click.option(
            "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy."
        ),
        click.option("--concurrency", type=click.IntRange(min=1), default=1, show_default=True, help="At a time."),
        click.option("--markdown", type=click.Path(dir_okay=False), metavar="FILE", help="Also write the table there."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def measure_servers(asked: dict[str, Any]) -> None:
    """Ask every question of every server and print what was measured.

    Raises:
        ConfigError: no server or prompts named; a server that does not draft, or serves another model.
        StorageError: ``server-unreachable``.
    """
    from hiddenstore.errors import ConfigError
    from trainer.drafting.questions import left_out, read_questions
    from trainer.served.measure import require_one_model
    from trainer.served.servers import Sampling

    for name, given in (("--server URL", asked["servers"]), ("--prompts FILE", asked["prompts"])):
        if not given:
            raise ConfigError(f"eval --engine {asked['engine']} needs {name}", kind="usage", hint=name)
    unusable: list[str] = []
    questions = read_questions(asked["prompts"], unusable, asked["count"])
    if unusable:
        output().warn(left_out(unusable))
    render = _renderer(asked["target"]) if asked["target"] else None
    servers = [_open(asked, url, render) for url in asked["servers"]]
    plain = _open(asked, asked["baseline_server"], render) if asked["baseline_server"] else None
    for server in servers if plain else []:
        require_one_model(server, plain)  # type: ignore[arg-type]
    for server in servers:
        if asked["engine"] == "vllm" and server.counts() is None:
            raise server.no_counts()
    sampling = Sampling(asked["max_new_tokens"], asked["temperature"])
    document = {
        "engine": asked["engine"],
        "model": servers[0].model,
        "server": asked["servers"][0],
        "baseline_server": asked["baseline_server"],
        "prompts_from": list(asked["prompts"]),
        "prompts_unusable": len(unusable),
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "concurrency": asked["concurrency"],
        **_measured(servers, plain, questions, sampling, asked),
    }
    if asked["markdown"]:
        _write(Path(asked["markdown"]), document)
    output().data(document, human=lambda: _show(document))
    if not asked["markdown"] or plain is None:
        output().hint("--baseline-server URL gives the speed-up, --markdown FILE the table for a report")


def _measured(
    servers: "list[Server]", plain: "Server | None", questions: "list[Question]", sampling: Any, asked: dict[str, Any]
) -> dict[str, Any]:
    """The rows of all servers, and the total of the first as members of its own, as ``eval`` of a store has them."""
    from hiddenstore.progress import Progress
    from trainer.served.measure import measure
    from trainer.served.report import Baseline, rows

    turns = sum(1 + len(question.more) for question in questions)
    listed: list[dict[str, Any]] = []
    with Progress("eval", total=len(questions) * (len(servers) + bool(plain)), unit="questions") as progress:

        def run(server: "Server") -> Any:
            return measure(server, questions, sampling, asked["concurrency"], lambda _tokens: progress.advance(1))

        baseline = Baseline.of(run(plain)) if plain else None
        for server in servers:
            found = run(server)
            if server.counts_each_answer and not any(one.counts for one in found):
                raise server.no_counts()
            listed += rows(server.client.url, found, baseline)
    for row in listed:
        if row["others_were_served"] and row["task"] != "all":
            output().warn(f"{row['server']} drafted for others while {row['task']} ran: its accepted length is mixed")
    if all(row["accepted_length"] is None for row in listed):
        output().warn("the server counts no drafts where we can read it: speed only")
    whole = next(row for row in listed if row["task"] == "all")
    names = ("draft_len", "accepted_length", "per_position", "drafts", "tokens_per_s", "speedup")
    return {**{name: whole[name] for name in names}, "answers": turns, "rows": listed}


def _open(asked: dict[str, Any], url: str, render: "Render | None") -> "Server":
    from hiddenstore import api_key
    from trainer.served.client import Client
    from trainer.served.servers import SERVERS

    client = Client(url, api_key=api_key.from_environment(asked["api_key_env"]))
    return SERVERS[asked["engine"]](client, asked["model"], render)


def _renderer(target: str) -> "Render":
    from transformers import AutoTokenizer

    from hiddenstore.errors import ConfigError

    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"no tokenizer at {target}: {reason}", kind="target-unreadable") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"the tokenizer of {target} has no chat template", kind="template-missing")

    def render(messages: Any) -> list[int]:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return [int(token) for token in ids]

    return render


def _write(path: Path, document: dict[str, Any]) -> None:
    from hiddenstore.fs import storage_error
    from trainer.served.report import markdown

    try:
        path.write_text(markdown(document), encoding="utf-8")
    except OSError as error:
        raise storage_error(error, str(path)) from error


def _show(document: dict[str, Any]) -> None:
    from trainer.served.report import shown

    several = len({row["server"] for row in document["rows"]}) > 1
    for url in dict.fromkeys(row["server"] for row in document["rows"]):
        if several:
            output().print(f"{url}")
        head, cells = shown([row for row in document["rows"] if row["server"] == url])
        output().table([head[0], *(f">{name}" for name in head[1:])], cells)
    output().pairs(
        [
            ("model", document["model"]),
            (
                "asked",
                f"{document['answers']:,} answers of at most {document['max_new_tokens']:,} tokens, "
                f"{document['concurrency']} at a time, temperature {document['temperature']:g}",
            ),
        ]
    )
