"""The exact command and files that serve a target with a drafter in an engine.

An engine is one module with a ``ServingEngine`` in it and one line in ``ENGINES``. Nothing here imports an engine,
torch or transformers: what is printed is known from tables.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hiddenstore.errors import ConfigError

if TYPE_CHECKING:
    from trainer.serve.plan import ServingEngine

ENGINES: dict[str, str] = {
    "vllm": "trainer.serve.vllm:VLLM",
    "sglang": "trainer.serve.sglang:SGLANG",
    "trtllm": "trainer.serve.trtllm:TRTLLM",
}
"""Engine → ``module:ServingEngine``."""


def serving_engine(name: str) -> "ServingEngine":
    """The engine of that name; ConfigError ``engine-unknown`` says which exist."""
    if name not in ENGINES:
        raise ConfigError(f"no engine {name!r} to serve with; there is: {', '.join(ENGINES)}", kind="engine-unknown")
    module, _, attribute = ENGINES[name].partition(":")
    engine: ServingEngine = getattr(import_module(module), attribute)
    return engine
