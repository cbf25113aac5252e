"""One engine in a process of its own: requests as JSON lines on stdin, answers on stdout.

CPU seconds are those of all threads since the answer before, so that reading ahead between two turns is counted.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.train.case import Case

OURS = ("Ours", "OursHeld", "OursQ8")


class Worker:
    """``request["op"]`` names a method; its answer goes back as it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._imports()
        self._resident = resident("VmRSS")
        self.engine: Any = None
        self.folder = Path()

    def _imports(self) -> None:
        """All that a first step would import, so that memory growth is the training's."""
        import torch._dynamo  # noqa: F401 - the first optimizer step imports it

        if self.name in OURS:
            from benchmarks.train import ours as engines
        else:
            if "DFlash" in self.name:
                from benchmarks.train import peers_dflash as engines  # type: ignore[no-redef]
            else:
                from benchmarks.train import peers as engines  # type: ignore[no-redef]

            if self.name.startswith("SpecForge"):
                import specforge.algorithms.common.dflash_family_model
                import specforge.algorithms.eagle3.model  # noqa: F401
            elif self.name.startswith("Speculators"):
                import speculators.models.dflash.core
                import speculators.models.eagle3.core  # noqa: F401
            else:
                import modelopt.torch.speculative  # noqa: F401
                import transformers.models.llama.modeling_llama  # noqa: F401
        self._kind: Any = getattr(engines, self.name)

    def open(self, folder: str, **options: Any) -> dict[str, Any]:
        """Build the engine on the case of a folder."""
        self.folder, self.engine = Path(folder), None
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        torch.manual_seed(0)
        if self.name in OURS:
            options["root"] = Path(tempfile.mkdtemp(dir=self.folder)) / self.name
        self.engine = self._kind(*Case.load(self.folder), **options)
        self._cpu = time.process_time()
        return {"equal": getattr(self._kind, "equal", None)}

    def save_weights(self) -> dict[str, Any]:
        self.engine.save_weights(self.folder)
        return {}

    def losses(self, **options: Any) -> dict[str, Any]:
        return {"losses": self.engine.losses(**options)}

    def steps(self, count: int) -> dict[str, float]:
        """CPU and wall seconds of each of ``count`` steps."""
        wall = time.perf_counter()
        for _ in range(count):
            loss = self.engine.step()
        now = time.process_time()
        cpu, self._cpu = now - self._cpu, now
        return {"cpu": cpu / count, "wall": (time.perf_counter() - wall) / count, "loss": loss}

    def memory(self, count: int) -> dict[str, float]:
        """Bytes that opening and ``count`` steps added to the process that had imported everything, at their peak."""
        for _ in range(count):
            self.engine.step()
        return {"growth_bytes": resident("VmHWM") - self._resident}

    def products_share(self, count: int) -> dict[str, Any]:
        return {"shares": self.engine.products_share(count)}


def resident(field: str) -> int:
    """Bytes of a line of the process's status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    """Answer until stdin ends."""
    name = sys.argv[1]
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            worker = worker or Worker(name)
            answer = getattr(worker, request.pop("op"))(**request)
        except Exception as error:  # noqa: BLE001 - a peer's failure is a row of the results, whatever it is
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
