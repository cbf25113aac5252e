"""A twin: EAGLE-1 of two layers, under a name and in a format of its own."""

from dataclasses import replace
from typing import Any

from trainer.drafters.base import TargetFacts
from trainer.drafters.eagle1 import EAGLE1, Eagle1Config
from trainer.formats.base import Reads


class TwinConfig(Eagle1Config):
    """Settings of a twin."""

    name: str = "twin"
    num_layers: int = 2


class TwinKind(type(EAGLE1)):  # type: ignore[misc]
    """What the trainer, export and serve ask of a twin."""

    name = layers = "twin"
    config = TwinConfig
    export = replace(
        EAGLE1.export,
        drafter="twin",
        titles={"twin": "a twin drafter"},
        word=lambda flags: "twin",
        rows={("vllm", "twin"): (Reads("TwinModel", "twin", "twin.py"),)},
        architectures="TwinModel",
        signs=lambda config, tensors: False,
    )

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        return {"drafter": {**super().derive(facts)["drafter"], "num_layers": 2}}


TWIN = TwinKind()
