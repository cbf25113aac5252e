"""Which engine of which version takes which drafter: the table, asked for one pair or printed as a whole."""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hiddenstore.errors import ConfigError
from trainer.export.base import Checkpoint, Engine, Reads, Refused, Support
from trainer.serve.versions import is_within, parse

if TYPE_CHECKING:
    from trainer.config import DrafterConfig

ENGINES: dict[str, str] = {
    "vllm": "trainer.export.vllm:VLLM",
    "sglang": "trainer.export.sglang:SGLANG",
    "trtllm": "trainer.export.trtllm:TRTLLM",
    "speculators": "trainer.export.speculators:SPECULATORS",
}
WRITERS: dict[str, str] = {
    "eagle1": "trainer.export.eagle1",
    "eagle3": "trainer.export.eagle3",
    "eagle3.1": "trainer.export.eagle3",
    "dflash": "trainer.export.dflash",
    "medusa": "trainer.export.medusa",
}


def engine_named(name: str) -> Engine:
    """The table of an engine; ConfigError ``engine-unknown`` says which exist."""
    if name not in ENGINES:
        raise ConfigError(f"no export for engine {name!r}; there is: {', '.join(ENGINES)}", kind="engine-unknown")
    module, attribute = ENGINES[name].split(":")
    engine: Engine = getattr(import_module(module), attribute)
    return engine


def drafter_word(config: "DrafterConfig") -> str:
    """The table's name of a drafter: EAGLE-3 with either of its later flags is ``eagle3.1``."""
    is_later = getattr(config, "fc_norm", False) or getattr(config, "norm_output", False)
    return f"{config.name}.1" if is_later else config.name


def row(engine: Engine, version: str, drafter: str) -> Reads | Refused | None:
    """What the engine's table says of a drafter at a version; None where it says nothing.

    Raises:
        ConfigError: ``engine-version``, no version.
    """
    rows = engine.drafters.get(drafter, ())
    return next((found for found in rows if is_within(version, found.since, found.before)), None)


def support(engine: str, version: str | None, drafter: str) -> Support:
    """Whether ``engine`` of ``version`` (None: the one its table was made for) takes ``drafter``.

    ``drafter`` is a key of ``WRITERS``. What a drafter's own settings add is asked of `refusal`.

    Raises:
        ConfigError: unknown engine, drafter or version.
    """
    table = engine_named(engine)
    if drafter not in WRITERS:
        raise ConfigError(f"unknown drafter {drafter!r}; there are: {', '.join(WRITERS)}", kind="drafter-unknown")
    at = version or table.version
    found = row(table, at, drafter)
    if isinstance(found, Reads):
        has_run = found.ran is not None and parse(at)[:2] == parse(found.ran)[:2]
        return Support(engine, at, drafter, True, proof="ran" if has_run else "names", source=found.source)
    reason = found.reason if found else f"{table.title} {at} has no loader for {drafter}"
    return Support(engine, at, drafter, False, reason=reason, nearest=found.nearest if found else _elsewhere(drafter))


def refusal(checkpoint: Checkpoint, engine: Engine, reads: Reads) -> ConfigError | None:
    """Why this very drafter cannot be served by an engine that reads its kind; None where it can."""
    found = [lack for lack in reads.lacks if lack.of(checkpoint)]
    if not found:
        return None
    word = drafter_word(checkpoint.config)
    return ConfigError(
        f"{engine.title} cannot run this {word} drafter: {'; '.join(lack.reason for lack in found)}",
        kind="export-unsupported",
        hint="; ".join(dict.fromkeys(lack.fix for lack in found if lack.fix)) or None,
    )


def required(checkpoint: Checkpoint, engine: Engine, version: str) -> Reads:
    """The row a checkpoint is written by.

    Raises:
        ConfigError: ``export-unsupported`` with the reason and the nearest that works.
    """
    word = drafter_word(checkpoint.config)
    found = row(engine, version, word)
    if not isinstance(found, Reads):
        said = support(engine.name, version, word)
        raise ConfigError(
            f"{engine.title} {version} cannot serve {word}: {said.reason}",
            kind="export-unsupported",
            hint=said.nearest,
        )
    refused = refusal(checkpoint, engine, found)
    if refused is not None:
        raise refused
    return found


def matrix(versions: Sequence[tuple[str, str]] = ()) -> list[Support]:
    """Every engine × drafter, at its table's version, or at the (engine, version) pairs given."""
    asked = list(versions) or [(name, engine_named(name).version) for name in ENGINES]
    return [support(engine, version, drafter) for engine, version in asked for drafter in WRITERS]


def writer(drafter: str) -> Any:
    """The module that makes a drafter's files."""
    return import_module(WRITERS[drafter])


def _elsewhere(drafter: str) -> str | None:
    for name in ENGINES:
        table = engine_named(name)
        if isinstance(row(table, table.version, drafter), Reads):
            return f"--engine {name}"
    return None
