"""The vLLM engine: in this process, or a server that runs already. vLLM hands the last layer out before the norm."""

from collectors.engines import CaptureEngine, EngineOptions
from collectors.engines.vllm_process import VllmProcess
from collectors.engines.vllm_server import VllmServer
from collectors.target import EngineTarget


def open_vllm(target: EngineTarget, options: EngineOptions) -> CaptureEngine:
    """Start vLLM for a target, or reach the server at ``options.server``; raises as the two do."""
    return VllmProcess(target, options) if options.server is None else VllmServer(target, options)
