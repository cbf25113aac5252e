"""An engine that has the work done by ours and says so."""

from collections.abc import Iterator

from collectors.engines import CaptureEngine, EngineOptions, EngineRow
from collectors.targets.load import EngineTarget
from hiddenstore.doctor import DoctorCheck
from schemas.manifest import Engine

RELAY = EngineRow("other_house.engine:open_relay", "other_house.engine:checks")


def checks() -> Iterator[DoctorCheck]:
    """What ``doctor`` says of it."""
    yield DoctorCheck("engine relay", "ok", "relay 1.5")


def open_relay(target: EngineTarget, options: EngineOptions) -> CaptureEngine:
    """Hugging Face under another name."""
    from collectors.engines.hf import HfEngine

    class RelayEngine(HfEngine):
        def describe(self) -> Engine:
            return super().describe().model_copy(update={"name": "relay", "version": "1.5"})

    return RelayEngine(target, options)
