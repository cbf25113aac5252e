"""One run over one shard: its conversations, who answers them, and what is counted while answers come."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from collectors.conversations import Conversation, parse_row
from collectors.regenerating.answers import AnswerLog
from collectors.regenerating.options import RegenerateOptions, RegenerateReport
from collectors.regenerating.rewrite import Reply, Rewrite
from collectors.rows import Source
from hiddenstore import api_key
from hiddenstore.errors import ConfigError
from hiddenstore.progress import Progress

AnswerAll = Callable[[Iterator[Rewrite], AnswerLog, Callable[[], None]], None]


def conversations(sources: list[Source], options: RegenerateOptions) -> Iterator[Rewrite | tuple[str, str]]:
    """Every usable conversation, numbered from 0, and (reason, where) of the others; ``max_samples`` usable at most."""
    number = 0
    for source in sources:
        for row in source.rows():
            if options.max_samples is not None and number >= options.max_samples:
                return
            item = parse_row(row)
            if not isinstance(item, Conversation):
                yield item.reason, f"{item.place}: {item.detail}"
            elif not Rewrite.has_slot(item):
                yield "no-answer", f"{item.place}: nothing in it can be answered"
            else:
                yield Rewrite.of(number, item, options.system)
                number += 1


class Work:
    """One run over one shard: who answers, and what is counted while answers come."""

    def __init__(self, options: RegenerateOptions, report: RegenerateReport) -> None:
        self._options, self._report = options, report
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._log: AnswerLog | None = None
        self.conversations = 0
        self.label = ""

    def in_process(self) -> AnswerAll:
        """The target of this process answers; its weights are read when the first batch asks for them."""
        from collectors.generate import Sampling
        from collectors.regenerating.in_process import InProcess, answer_all
        from collectors.target_folder import open_target
        from collectors.template import read_template

        options = self._options
        template = None if options.template is None else read_template(options.template)
        folder = open_target(str(options.target), options.revision, template)
        if not folder.tokenizer.chat_template:
            raise ConfigError(f"target {folder.label} has no chat template", kind="target-no-chat-template")
        self.label = folder.label
        sampling = Sampling(options.temperature, options.max_new_tokens, options.seed, options.top_p)
        setup = InProcess(folder, sampling, options.batch_size, options.workers, options.dtype, options.device)
        return lambda rewrites, log, check: answer_all(rewrites, log.replies, self.take, setup, check)

    def by_server(self) -> AnswerAll:
        """A server answers; without a model named, it must serve exactly one."""
        from collectors.regenerating.by_server import ServerRun
        from collectors.regenerating.chat_server import ChatServer, ServerSettings

        options = self._options
        settings = ServerSettings(
            url=str(options.server),
            model=options.model or "",
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
            top_p=options.top_p,
            api_key=api_key.from_environment(options.api_key_env),
            timeout_s=options.timeout_s,
            retries=options.retries,
            extra=options.extra,
        )
        if options.model is None:
            settings = _with_only_model(settings)
        self.label = settings.model
        limits = {"concurrency": options.concurrency, "max_failures": options.max_failures, "seed": options.seed}

        def answer_all(rewrites: Iterator[Rewrite], log: AnswerLog, check: Callable[[], None]) -> None:
            ServerRun(ChatServer(settings), log.replies, self.take, **limits).answer_all(rewrites, check)

        return answer_all

    def counting(self, log: AnswerLog, sources: list[Source]) -> Progress:
        """Progress over the conversations of this shard, shown while the block runs."""
        total = None if any(source.count is None for source in sources) else sum(s.count or 0 for s in sources)
        self._log = log
        self._progress = Progress("regenerate", None if total is None else total // self._options.shard[1], "answers")
        return self._progress

    def rewrites(self, sources: list[Source]) -> Iterator[Rewrite]:
        """The conversations of this shard."""
        shard, shards = self._options.shard
        for item in conversations(sources, self._options):
            self._report.read += 1
            if isinstance(item, Rewrite) and item.number % shards == shard - 1:
                self.conversations += 1
                yield item

    def take(self, rewrite: Rewrite, reply: Reply) -> None:
        """Keep a reply, put it in its place, and count the conversation once it has all."""
        assert self._log is not None
        assert self._progress is not None
        is_new = self._log.append(rewrite, reply)
        rewrite.take(reply)
        is_done = not rewrite.advance()
        with self._lock:
            self._report.resumed += not is_new
            self._report.new_tokens += reply.tokens * is_new
            if is_done:
                self._report.count(rewrite)
            self._progress.advance(1, tokens=self._report.new_tokens, looping=self._report.dropped["looping"])


def _with_only_model(settings: Any) -> Any:
    from collectors.regenerating.chat_server import ChatServer

    models = ChatServer(replace(settings, retries=1)).models()
    if len(models) != 1:
        raise ConfigError(
            f"{settings.url} serves {', '.join(models) or 'nothing'}; which one is the target?",
            kind="model-unclear",
            hint=f"--model {models[0]}" if models else None,
        )
    return replace(settings, model=models[0])
