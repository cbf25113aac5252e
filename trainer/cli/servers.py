"""``hiddenstore eval`` with ``--engine``, ``--serve`` or ``--method``: what servers get accepted, and how fast."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from hiddenstore.console.output import output
from hiddenstore.console.progress import Progress
from hiddenstore.conversation.messages import Message
from hiddenstore.errors import ConfigError, HiddenstoreError, Kind
from hiddenstore.fs.publish import replace_file
from hiddenstore.servers import VllmPython, engine_flags, running
from hiddenstore.servers.http import HttpClient, ServerAccess
from hiddenstore.targets.folder import open_target
from hiddenstore.targets.rendering import RENDER_ERRORS, reason_of
from trainer.evaluate.acceptance import FRACTION_BITS, tie_gap
from trainer.evaluate.prompts import Beside, Question, has_tools, left_out, prompt_ids, read_questions
from trainer.evaluate.rounds import (
    FEWEST_ROUNDS,
    Departure,
    Parted,
    Rounds,
    departures,
    is_shown_to_pay,
    measure_rounds,
    parted,
    rows_of,
)
from trainer.evaluate.server import ALL, SERVERS, Render, Row, SamplingOptions, Server, require_one_model
from trainer.serve import ENGINES
from trainer.serve.drafter import keep_draft_len
from trainer.serve.launch import server_of
from trainer.serve.plan import ServeOptions

LOGPROBS_MODE = "--logprobs-mode"
_DTYPES = {"half": "float16", "float": "float32"} | {name: name for name in ("float16", "float32", "bfloat16")}
"""Of vLLM's ``--dtype``, in torch's words."""


@dataclass(frozen=True)
class ServerOptions:
    """The options of ``eval`` that measure servers, by the names that its command line gives them."""

    engine: str
    servers: tuple[str, ...]
    baseline_server: str | None
    prompts: tuple[str, ...]
    api_key_env: str | None
    model: str | None
    target: str | None
    revision: str | None
    trust_remote_code: bool
    count: int | None
    max_new_tokens: int
    temperature: float
    concurrency: int
    markdown: str | None
    rounds: int
    drafter: str | None
    method: str | None
    engine_python: str | None
    engine_args: tuple[str, ...]
    draft_lens: tuple[int, ...] = ()

    @property
    def starts_servers(self) -> bool:
        return self.drafter is not None or self.method is not None

    def __post_init__(self) -> None:
        if not self.prompts:
            problem = f"eval --engine {self.engine} needs --prompts FILE"
            raise ConfigError(problem, kind=Kind.USAGE, hint="--prompts FILE")
        if self.markdown and not (folder := Path(self.markdown).parent).is_dir():
            problem = f"--markdown {self.markdown}: there is no folder {folder}"
            raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint=shlex.join(["mkdir", "-p", str(folder)]))
        if self.starts_servers:
            if self.servers or self.baseline_server or self.target is None:
                raise click.UsageError("--serve and --method start both servers: give --target T, and no server")
            if self.engine == "llamacpp" and (self.engine_python or self.revision or self.trust_remote_code):
                problem = (
                    "--engine-python, --revision and --trust-remote-code are vLLM's: llama-server is that of the PATH"
                )
                raise click.UsageError(problem)
        elif not self.servers:
            problem = f"eval --engine {self.engine} needs --server URL"
            raise ConfigError(problem, kind=Kind.USAGE, hint="--server URL")
        elif self.draft_lens:
            raise click.UsageError("--draft-len: a server that is up drafts as it was started; this is for --serve")
        elif self.rounds > 1 and self.baseline_server is None:
            raise click.UsageError("--rounds ask two servers in turn: give --baseline-server URL")


def measure_servers(options: ServerOptions) -> None:
    """Ask every question of every server and print what was measured. Raises ConfigError: a server that does not draft,
    or serves another model; StorageError, CaptureError: what HttpClient raises."""
    # Before servers start, which takes minutes.
    unusable: list[str] = []
    questions = read_questions(options.prompts, unusable, options.count, takes_tools=options.target is not None)
    questions, render = _rendered(options, questions, unusable)
    if unusable:
        output().warn(left_out(unusable))
    if not options.starts_servers:
        _measure_running(options, options.baseline_server, options.servers, Asked(questions, len(unusable), render))
        return
    with _started(options) as (plain, *drafted):
        _measure_running(options, plain, drafted, Asked(questions, len(unusable), render))


@dataclass(frozen=True)
class Asked:
    """What servers are asked, how many rows ask nothing, and what renders prompts here."""

    questions: list[Question]
    unusable: int
    render: Render | None


def _rendered(
    options: ServerOptions, questions: list[Question], unusable: list[str]
) -> tuple[list[Question], Render | None]:
    """The questions that the template of ``--target`` takes, where it renders them here, and what does; the others are
    put into ``unusable``. A server that is started here has the target's own template, and needs it for tools alone.
    Raises ConfigError ``template-invalid``: it takes none."""
    here = [one for one in questions if not options.starts_servers or has_tools(one.history, one.beside)]
    if options.target is None or not here:
        return questions, None
    render, refused = _renderer(options.target, options), dict[int, ConfigError]()
    for question in here:
        try:
            render(question.history, question.beside)
        except ConfigError as error:
            refused[id(question)] = error
            unusable.append(f"{question.location}: {error}")
    if len(refused) == len(questions):
        raise next(iter(refused.values()))
    return [question for question in questions if id(question) not in refused], render


@contextmanager
def _started(options: ServerOptions) -> Iterator[list[str]]:
    """URLs of a server without the drafter or method and one with it, or one for each draft length, started here."""
    python, serving = VllmPython(options.engine_python), ENGINES[options.engine]
    flags = engine_flags(options.engine_args)
    flags += ("--revision", options.revision) if options.revision else ()
    flags += ("--trust-remote-code",) if options.trust_remote_code else ()
    drafted = ServeOptions(target=str(options.target), method=options.method, drafter=options.drafter, flags=flags)
    # The size of a logit says how wide a tie is.
    of_logits = (LOGPROBS_MODE, "raw_logits") if options.engine == "vllm" and LOGPROBS_MODE not in flags else ()
    plain = replace(drafted, method="none", drafter=None, flags=(*flags, *of_logits))
    drafter = str(options.method or options.drafter)
    # What is no path here has no folder to write beside.
    place = drafter.rstrip("/") if Path(drafter).exists() else Path(drafter).name
    named = {"plain": plain, "drafted": drafted}
    if options.draft_lens:
        lengths = {f"drafted-{length}": replace(drafted, draft_len=length) for length in options.draft_lens}
        named = {"plain": plain, **lengths}
    logs = [Path(f"{place}.{name}.log") for name in named]
    servers = [server_of(serving, python, each, log) for each, log in zip(named.values(), logs, strict=True)]
    places = ", ".join(map(str, logs[:-1]))
    output().note(f"starting {serving.title} without and with {drafter}; they write {places} and {logs[-1]}")
    with running(servers) as urls:
        yield urls


def _measure_running(options: ServerOptions, plain: str | None, urls: Sequence[str], asked: Asked) -> None:
    servers = [_open(options, url, asked.render) for url in urls]
    baseline = _open(options, plain, asked.render) if plain else None
    if baseline:
        baseline.dtype = _served_dtype(options)
    for server in servers:
        if baseline:
            require_one_model(server, baseline)
        if options.engine in ("vllm", "llamacpp") and server.counts() is None:
            raise server.no_counts()
    names = ("temperature", "max_new_tokens", "concurrency", "rounds")
    document = {
        "engine": options.engine,
        "model": servers[0].model,
        "server": urls[0],
        "baseline_server": plain,
        "prompts_from": list(options.prompts),
        "prompts_unusable": asked.unusable,
        "dtype": baseline.dtype if baseline else None,
        **{name: getattr(options, name) for name in names},
        **_measured(servers, baseline, asked.questions, options),
    }
    if len(options.draft_lens) > 1:
        pays = is_shown_to_pay(document["speedup_rounds"])
        document["draft_len_kept"] = pays and _keeps(options.drafter, document["draft_len"])
    output().data(document, human=lambda: _show(document))
    if document.get("draft_len_kept") is False:
        output().warn(_not_kept(document))
    if options.markdown:
        replace_file(Path(options.markdown), markdown(document).encode())
    for row in document["differences"]:
        output().warn(
            f"an answer differs that is no tie: “{row['question']}”, turn {row['turn'] + 1}, {row['plain']!r} without "
            f"and {row['drafted']!r} with the drafter, at a logit gap of {_text_of(row['logit_gap'])}"
        )
    if baseline is None:
        output().hint("--baseline-server URL gives the speed-up, --markdown FILE the table for a report")


def _keeps(drafter: str | None, length: int) -> bool:
    try:
        return keep_draft_len(drafter, length)
    except HiddenstoreError as error:
        # What was measured is not lost over an export that cannot be written.
        output().warn(error.message)
        return False


def _not_kept(document: dict[str, Any]) -> str:
    ratios = document["speedup_rounds"]
    best = f"drafts of {document['draft_len']} give {document['speedup']:.2f}x{spread(ratios)} of plain decoding"
    if document["speedup"] <= 1:
        return f"no draft length pays on this machine: {best}"
    if len(ratios) < FEWEST_ROUNDS:
        return f"no draft length is shown to pay by fewer than {FEWEST_ROUNDS} rounds: {best}; --rounds sets how many"
    if not is_shown_to_pay(ratios):
        return f"no draft length is shown to pay on this machine, for none is above 1 in every round: {best}"
    return f"{best}; nothing here keeps that: hiddenstore serve … --draft-len {document['draft_len']}"


def _text_of(gap: float | None) -> str:
    unknown = "unknown size: the plain server did not say, did not repeat itself, or did not weigh the other word"
    return unknown if gap is None else f"{gap:.3g}"


def _measured(
    servers: Sequence[Server], baseline: Server | None, questions: list[Question], options: ServerOptions
) -> dict[str, Any]:
    """The rows of all servers, and a total as members of its own, as ``eval`` of a store has them: that of the first
    server, of draft lengths that of the fastest."""
    sampling = SamplingOptions(options.max_new_tokens, options.temperature)
    everyone, rounds = [*([baseline] if baseline else []), *servers], options.rounds
    with Progress("eval", total=len(questions) * len(everyone) * rounds, unit="questions") as progress:
        measured = measure_rounds(everyone, questions, sampling, options.concurrency, rounds, progress.advance)
    plain, drafted = (measured[0], measured[1:]) if baseline else (None, measured)
    for server, results in zip(servers, drafted, strict=True):
        total = results[0][-1].counts
        # llama.cpp has its counters, at zero, where nothing drafts.
        if server.lost:
            output().warn(server.lost)
        elif options.engine in ("sglang", "trtllm", "llamacpp") and (total is None or not total.drafts):
            raise server.no_counts()
    _warn_of_thoughts(everyone, measured)
    rows = [row for one, all_of in zip(servers, drafted, strict=True) for row in rows_of(one.client.url, all_of, plain)]
    lengths = dict(zip((server.client.url for server in servers), options.draft_lens, strict=False))
    rows = [row | {"draft_len": lengths.get(row["server"], row["draft_len"])} for row in rows]
    judged: list[Departure] = []
    if baseline is not None and plain is not None and not sampling.temperature:
        differing = [each for all_of in drafted if (each := parted(questions, plain, all_of))]
        judged = _judged(baseline, questions, differing, sampling)
    for row in rows:
        if row["others_were_served"] and row["task"] != ALL:
            output().warn(f"{row['server']} drafted for others while {row['task']} ran: its accepted length is mixed")
    if all(row["accepted_length"] is None for row in rows):
        output().warn("the server counts no drafts where we can read it: speed only")
    totals = [row for row in rows if row["task"] == ALL]
    overall = totals[0]
    if options.draft_lens:
        overall = max(totals, key=lambda row: (is_shown_to_pay(row["speedup_rounds"]), row["speedup"]))
    names = ("draft_len", "accepted_length", "per_position", "drafts", "tokens_per_s", "baseline_tokens_per_s")
    return {
        **{name: overall[name] for name in (*names, "speedup", "speedup_rounds")},
        "answers": len(servers) * rounds * sum(1 + len(question.more) for question in questions),
        "ties": [one.document() for one in judged if one.is_tie],
        "differences": [one.document() for one in judged if not one.is_tie],
        "rows": rows,
    }


def _warn_of_thoughts(servers: Sequence[Server], measured: Sequence[Rounds]) -> None:
    for server, rounds in zip(servers, measured, strict=True):
        answers = [answer for results in rounds for answer in results[-1].answers]
        if not any(answer.text for answer in answers) and any(answer.thought for answer in answers):
            output().warn(
                f"{server.client.url} answered with thoughts alone, no content: these are compared, and later turns "
                "follow empty answers; a greater --max-new-tokens lets thoughts end"
            )


def _judged(
    baseline: Server, questions: Sequence[Question], differing: Sequence[Parted], sampling: SamplingOptions
) -> list[Departure]:
    """Answers that differ, each asked for once more."""
    if not differing:
        return []
    with Progress("compare", total=sum(map(len, differing)), unit="answers") as progress:
        judged = []
        for each in differing:
            for one in departures(baseline, questions, each, sampling):
                judged.append(one)
                progress.advance()
    return judged


def _open(options: ServerOptions, url: str, render: Render | None) -> Server:
    hint = f"start it, or look whether it is up: curl {url}/v1/models"
    # One try: the time of a failed one would be in the figures.
    client = HttpClient(ServerAccess(url, tries=1, api_key_env=options.api_key_env, hint=hint))
    return SERVERS[options.engine](client, options.model, render, not options.starts_servers)


def _served_dtype(options: ServerOptions) -> str | None:
    """What a vLLM that is started here computes in: the ``dtype`` it is given, else the target's own, if that is one of
    two bytes (it turns float32 into another); None for every other server."""
    if options.engine != "vllm" or not options.starts_servers:
        return None
    given = [value for name, _, value in (word.partition("=") for word in options.engine_args) if name == "dtype"]
    if given and given[-1] != "auto":
        return _DTYPES.get(given[-1])
    try:
        own = open_target(str(options.target), options.revision, None, options.trust_remote_code).dtype
    except HiddenstoreError:
        # The engine may read what is no target here.
        return None
    return own if own in FRACTION_BITS else None


def _renderer(target: str, options: ServerOptions) -> Render:
    tokenizer = open_target(target, options.revision, None, options.trust_remote_code).tokenizer
    if tokenizer.chat_template is None:
        raise ConfigError(f"the tokenizer of {target} has no chat template", kind=Kind.TEMPLATE_MISSING)
    alone = "leave --target out: the server renders by its own"
    fix = "--prompts without tools" if options.starts_servers else alone

    def render(messages: Sequence[Message], beside: Beside) -> list[int]:
        try:
            return prompt_ids(tokenizer, messages, "a prompt", fix, beside)
        except RENDER_ERRORS as error:
            problem = f"the chat template of {target} refuses a prompt: {reason_of(error)}"
            raise ConfigError(problem, kind=Kind.TEMPLATE_INVALID, hint=fix) from error

    return render


def _show(document: dict[str, Any]) -> None:
    urls, of_lengths = list(dict.fromkeys(row["server"] for row in document["rows"])), "draft_len_kept" in document
    for url in (None,) if of_lengths else urls:
        if url and len(urls) > 1:
            output().print(url)
        head, cells = table([row for row in document["rows"] if url in (None, row["server"])])
        output().table([head[0], *(f">{name}" for name in head[1:])], cells, parts_of(head))
    answers = f"{document['answers']:,} answers of at most {document['max_new_tokens']:,} tokens"
    how = f"{document['concurrency']} at a time, temperature {document['temperature']:g}"
    pairs = [("model", document["model"]), ("asked", f"{answers}, {how}")]
    if document["speedup"] is not None and not document["temperature"]:
        gaps = ", ".join(f"{gap:.3g}" for gap in sorted({tie["logit_gap"] for tie in document["ties"]}))
        parted = f"{count_of(document['ties'])} first differ at a tie" + (f" (logit gaps {gaps})" if gaps else "")
        pairs.append(("differ", f"{parted}, {count_of(document['differences'])} otherwise"))
        if document["dtype"] is None and (document["ties"] or document["differences"]):
            pairs.append(("", "what it computes in is not known: taken for bf16, whose ties are the widest"))
        if any(tie["logit"] is None for tie in document["ties"]):
            widest = tie_gap(None, document["dtype"] or "bfloat16")
            pairs.append(("", f"their logits' size was not said: taken to be below 64, so that a tie is {widest:g}"))
    if document.get("draft_len_kept"):
        best = f"drafts of {document['draft_len']}: {document['speedup']:.2f}x{spread(document['speedup_rounds'])}"
        pairs.insert(1, ("pays", f"{best} of plain decoding; serve takes it from now on"))
    output().pairs(pairs)


def count_of(departures: Sequence[dict[str, Any]]) -> int:
    """How many answers these are, over all rounds."""
    return sum(one["rounds"] for one in departures)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells for a terminal or Markdown; a server's total is left out where it is that of one task."""
    servers = [row["server"] for row in rows]
    listed = [row for row in rows if row["task"] != ALL or servers.count(row["server"]) > 2]
    head = ["task", "draft of", "accepted length", "by position", "tokens/s"]
    cells = [
        [
            row["task"],
            _cell(row["draft_len"], "{}"),
            _cell(row["accepted_length"], "{:.2f}"),
            " ".join(f"{share:.2f}" for share in row["per_position"]) or "–",
            f"{row['tokens_per_s']:,.1f}",
        ]
        for row in listed
    ]
    if any(row["speedup"] is not None for row in rows):
        head += ["without", "speed-up", "same answers"]
        for line, row in zip(cells, listed, strict=True):
            line += [
                _cell(row["baseline_tokens_per_s"], "{:,.1f}"),
                _cell(row["speedup"], "{:.2f}x") + spread(row["speedup_rounds"]),
                _cell(row["same_as_baseline"], "{}") + f" of {row['answers']}",
            ]
    return head, cells


def parts_of(head: Sequence[str]) -> list[list[int]]:
    """Columns of `table` for a terminal that is too narrow for all: what was accepted, and how fast it was."""
    accepted = [head.index(name) for name in ("accepted length", "by position")]
    return [[0, 1, *accepted], [number for number in range(len(head)) if number not in accepted]]


def markdown(document: Mapping[str, Any]) -> str:
    """The report: what was measured in a line, and the table."""
    head, cells = table(document["rows"])
    how = "greedy" if not document["temperature"] else f"temperature {document['temperature']:g}"
    beside = "; speed-up against the same server without speculation" if document["baseline_server"] else ""
    lines = [
        f"{document['model']} on {document['engine']}, {how}, answers of at most {document['max_new_tokens']} tokens, "
        f"{document['concurrency']} at a time. Accepted length counts the target's own token{beside}.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(line)} |" for line in cells),
    ]
    return "\n".join(lines) + "\n"


def spread(ratios: Sequence[float]) -> str:
    """`` (1.19–1.31)``: least and greatest of several; nothing of one."""
    return f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else ""


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)
