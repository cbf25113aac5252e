"""The Ray launcher: an actor per worker, on the cluster that RAY_ADDRESS names or else on one started here.

A lost actor is replaced by a new one rather than restarted by Ray, so that it is one of two cases: an answer, or none.
"""

import io
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from collectors.job import CollectReport
from collectors.job_open import CollectOptions
from collectors.launch.crew import Lost
from collectors.launch.dispatch import Dispatch
from collectors.launch.placement import Placement, place
from collectors.launch.worker import CaptureWorker
from hiddenstore.cli.terminal import plural
from hiddenstore.errors import ConfigError
from hiddenstore.rank import Drain, Rank

# Units and answers are small; states never pass through Ray.
OBJECT_STORE_BYTES = 100 << 20
CONNECT_WITHIN_S = 10.0
# Where Ray keeps what its workers print, unless the cluster was started with another --temp-dir.
OUTPUT = "/tmp/ray/session_latest/logs/worker-*.err"

_log = logging.getLogger(__name__)


def launch(options: CollectOptions, workers: int | None, drain: Drain, note: Callable[[str], None]) -> CollectReport:
    """Collect with Ray actors; see ``collectors.launch.dispatch.Dispatch.run`` for what it raises.

    Raises:
        ConfigError: ``ray-missing``, ``ray-unreachable``, ``launcher-resources``.
    """
    ray = _import_ray()
    with _connected(ray):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        device = "cpu" if options.server is not None else options.device
        placement = place(nodes, workers, options.tensor_parallel, device)
        each = f"{placement.gpus} GPU" if placement.gpus else f"{placement.cpus:g} CPU"
        note(f"{plural(placement.workers, 'worker')} with {each} each on {plural(len(nodes), 'Ray node')}")
        return Dispatch(RayCrew(ray, _anywhere(options), placement), options, drain, note).run()


class RayCrew:
    """Workers as Ray actors; see ``collectors.launch.crew.Crew``."""

    def __init__(self, ray: Any, options: CollectOptions, placement: Placement) -> None:
        self.size = placement.workers
        self._ray, self._options = ray, options
        self._actor_class = _actor_class(ray, placement)
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, int] = {}

    def start(self, index: int) -> None:
        # Ray shows an actor its own GPUs only, so each is the first worker of a machine of its own.
        self._actors[index] = self._actor_class.remote(self._options, Rank(index, self.size))

    def call(self, index: int, method: str, *arguments: Any) -> None:
        self._calls[getattr(self._actors[index], method).remote(*arguments)] = index

    def wait(self, timeout_s: float) -> list[tuple[int, Any]]:
        if not self._calls:
            return []
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        return [(self._calls.pop(call), self._result(call)) for call in ready]

    def stop(self, index: int) -> None:
        self._actors[index].stop.remote()

    def kill(self, index: int) -> None:
        if index in self._actors:
            self._ray.kill(self._actors[index])

    def _result(self, call: Any) -> Any:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            return Lost(f"{type(error.cause).__name__}: {error.cause}")
        except self._ray.exceptions.RayError as error:
            return Lost(f"{_in_short(str(error))}; what its process said is in {OUTPUT} on its machine")


def _actor_class(ray: Any, placement: Placement) -> Any:
    class Actor(CaptureWorker):
        """``stop`` has a thread of its own: it comes while a unit is under way."""

        stop = ray.method(concurrency_group="control")(CaptureWorker.stop)

    return ray.remote(
        num_cpus=placement.cpus,
        num_gpus=placement.gpus,
        max_restarts=0,
        concurrency_groups={"control": 1},
        scheduling_strategy="SPREAD",
    )(Actor)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "--launcher ray needs Ray, which is not installed here",
            kind="ray-missing",
            hint="pip install 'hiddenstore[ray]'",
        ) from error


@contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Ray, connected; a connection that is there already is used and left as it is."""
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    # Ray prints what happens to workers on stdout, where the answer of a command goes.
    with redirect_stdout(_ToLog()):
        with _signal_handlers_kept():
            if address := os.environ.get("RAY_ADDRESS"):
                _connect(ray, address, quiet)
            else:
                ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        try:
            yield
        finally:
            ray.shutdown()


def _connect(ray: Any, address: str, quiet: dict[str, Any]) -> None:
    try:
        require_answer(address)
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the Ray cluster at RAY_ADDRESS={address} cannot be used: {first}",
            kind="ray-unreachable",
            hint="ray status; or unset RAY_ADDRESS to start one here",
        ) from error


def require_answer(address: str) -> None:
    """OSError where nothing listens at ``HOST:PORT``; Ray itself would try for minutes. Other forms are left to Ray."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_WITHIN_S).close()


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Undo that ``ray.init`` makes SIGTERM end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _ToLog(io.TextIOBase):
    def write(self, text: str) -> int:
        if text.strip():
            _log.info(text.strip())
        return len(text)


def _anywhere(options: CollectOptions) -> CollectOptions:
    """The options with absolute paths: actors run in folders of their own."""
    target = Path(options.target)
    return replace(
        options,
        data=Path(options.data).absolute(),
        store=Path(options.store).absolute(),
        target=str(target.absolute()) if target.exists() else options.target,
        template=None if options.template is None else str(Path(options.template).absolute()),
        scratch=None if options.scratch is None else Path(options.scratch).absolute(),
    )


def _in_short(text: str) -> str:
    """First and last line of what Ray says of a lost actor, without its list of common causes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1].partition(" Some common causes")[0] if lines else ""
    return " ".join(dict.fromkeys((lines[0] if lines else "no reason given", last)))
