"""A server answers: ``concurrency`` conversations at a time, each turn after turn."""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator

from collectors.regenerating.chat_server import ChatServer, GivenUpError
from collectors.regenerating.rewrite import Reply, Rewrite
from hiddenstore.errors import ConfigError, HiddenstoreError, StorageError

REFUSALS_WITHOUT_ANSWER = 10
_LOOK_EVERY_S = 0.2


class ServerRun:
    """Conversations through one server.

    A conversation whose request was given up is tried once more at the end, and left out if it fails again; more than
    ``max_failures`` of them end the run.
    """

    def __init__(
        self,
        server: ChatServer,
        recorded: Callable[[Rewrite], list[Reply]],
        take: Callable[[Rewrite, Reply], None],
        *,
        concurrency: int,
        max_failures: int,
        seed: int,
    ) -> None:
        self._server, self._recorded, self._take = server, recorded, take
        self._concurrency, self._max_failures, self._seed = concurrency, max_failures, seed
        self._lock = threading.Lock()
        self._failed: list[Rewrite] = []
        self._answers = self._refusals = 0
        self._error: BaseException | None = None
        self._is_over = False

    def answer_all(self, rewrites: Iterator[Rewrite], check: Callable[[], None]) -> None:
        """Answer every turn of every conversation; ``check`` may raise to stop.

        Raises:
            StorageError: ``server-failing``, the budget is spent.
            ConfigError: ``server-refused``: wrong key or model, or every request so far was refused.
        """
        try:
            self._pass(rewrites, check, last=False)
            again, self._failed = self._failed, []
            if again:
                self._pass(iter(again), check, last=True)
        finally:
            self._is_over = True

    def _pass(self, rewrites: Iterator[Rewrite], check: Callable[[], None], last: bool) -> None:
        waiting: queue.Queue[Rewrite | None] = queue.Queue(self._concurrency)
        # Daemons: a request on its way must not hold up a process that was asked to stop.
        threads = [
            threading.Thread(target=self._work, args=(waiting, last), daemon=True) for _ in range(self._concurrency)
        ]
        for thread in threads:
            thread.start()
        for rewrite in rewrites:
            self._put(waiting, rewrite, check)
        for _ in threads:
            self._put(waiting, None, check)
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_EVERY_S)
                self._look(check)
        self._look(check)

    def _put(self, waiting: "queue.Queue[Rewrite | None]", item: Rewrite | None, check: Callable[[], None]) -> None:
        while True:
            self._look(check)
            try:
                waiting.put(item, timeout=_LOOK_EVERY_S)
                return
            except queue.Full:
                continue

    def _look(self, check: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        check()

    def _work(self, waiting: "queue.Queue[Rewrite | None]", last: bool) -> None:
        try:
            while (rewrite := self._next(waiting)) is not None:
                try:
                    self._answer(rewrite)
                except GivenUpError as error:
                    self._give_up(rewrite, error, last)
        except HiddenstoreError as error:
            self._error = error
        except BaseException as error:
            # A bug in a thread must end the run like one in the main thread.
            self._error = error
            raise
        finally:
            self._server.close()

    def _next(self, waiting: "queue.Queue[Rewrite | None]") -> Rewrite | None:
        while self._error is None and not self._is_over:
            try:
                return waiting.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                continue
        return None

    def _answer(self, rewrite: Rewrite) -> None:
        for reply in self._recorded(rewrite)[rewrite.turn :]:
            rewrite.advance()
            self._take(rewrite, reply)
        while rewrite.advance() and not self._is_over:
            seed = _seed(self._seed, rewrite.number, rewrite.turn)
            reply = self._server.reply(rewrite.done, rewrite.tools, seed)
            with self._lock:
                self._answers += reply.drop != "refused"
                self._refusals += reply.drop == "refused"
                if not self._answers and self._refusals >= REFUSALS_WITHOUT_ANSWER:
                    raise ConfigError(
                        f"every request was refused so far; the last: {reply.detail}",
                        kind="server-refused",
                        hint="check the settings; conversations that are refused alone are left out and counted",
                    )
            if not self._is_over:
                self._take(rewrite, reply)

    def _give_up(self, rewrite: Rewrite, error: GivenUpError, last: bool) -> None:
        with self._lock:
            self._failed.append(rewrite)
            failed = len(self._failed)
        if last:
            self._take(rewrite, Reply(drop="server-failed", detail=str(error)))
        elif failed > self._max_failures:
            self._error = StorageError(
                f"{failed} conversations failed, more than max_failures={self._max_failures}; the last: {error}",
                kind="server-failing",
                hint="what was answered is kept; the same command goes on once the server is well",
            )


def _seed(seed: int, number: int, turn: int) -> int:
    """A seed for each answer, so that equal prompts get answers of their own."""
    digest = hashlib.blake2b(f"{seed}/{number}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
