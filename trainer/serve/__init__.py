"""The exact command and files that serve a target with a drafter in an engine.

An engine is one module with a ``ServingEngine`` in it and one line in ``ENGINES``. Nothing here imports an engine,
torch or transformers: what is printed is known from tables.
"""

from typing import TYPE_CHECKING

from hiddenstore.registry import Registry

if TYPE_CHECKING:
    from trainer.serve.plan import ServingEngine

ENGINES: "Registry[ServingEngine]" = Registry(
    "engine",
    "hiddenstore.servers",
    {
        "vllm": "trainer.serve.vllm:VLLM",
        "sglang": "trainer.serve.sglang:SGLANG",
        "trtllm": "trainer.serve.trtllm:TRTLLM",
        "llamacpp": "trainer.serve.llamacpp:LLAMACPP",
    },
    "trainer.serve.plan:ServingEngine",
    option="--engine",
)
