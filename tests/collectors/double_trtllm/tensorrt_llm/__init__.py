"""A double of TensorRT-LLM 1.2's LLM API for machines without its GPUs: what its documentation describes, no more.

Signatures restated from the published llm-api reference; unknown arguments are refused as pydantic's ``extra="forbid"``
does. The model runs in a process of its own (``worker.py``), as TensorRT-LLM's executor does. Nothing here knows the
code that reads its files. ``DOUBLE_TRAPS`` in the environment is a JSON object of what goes wrong; see ``worker.py``.
"""

from tensorrt_llm import llmapi
from tensorrt_llm.llmapi import LLM, SamplingParams

__version__ = "1.2.1"
__all__ = ["LLM", "SamplingParams", "__version__", "llmapi"]
