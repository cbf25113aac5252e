"""Real exports to serve, and what ``hiddenstore serve`` plans for them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hiddenstore.targets.identity import config_sha256
from tests.trainer.export_cases import case
from trainer.export.write import export
from trainer.serve import ENGINES
from trainer.serve.launch import Resolved, plan_of, resolve
from trainer.serve.plan import ServeOptions, ServePlan
from trainer.serve.trtllm import file_problems

TARGET_CONFIG = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 8, "vocab_size": 50}
EXPORTS = (
    ("eagle1", "vllm", None),
    ("eagle3", "vllm", None),
    ("eagle3.1", "vllm", None),
    ("dflash", "vllm", None),
    ("medusa", "vllm", None),
    ("dflash2", "vllm", None),
    ("peagle", "vllm", None),
    ("eagle3", "sglang", None),
    ("dflash", "sglang", None),
    ("eagle1", "sglang", None),
    ("dspark", "sglang", None),
    ("eagle3", "trtllm", "1.3.0rc12"),
    ("dflash", "trtllm", "1.3.0"),
)
"""Drafter, engine and the engine's version of each export."""


def write_exports(root: Path, *drafters: str) -> dict[str, str]:
    """Real exports of some drafters (default: all), by "drafter for engine"; their target is the folder "target"."""
    (root / "target").mkdir()
    (root / "target" / "config.json").write_text(json.dumps(TARGET_CONFIG))
    found = {"target": str(root / "target")}
    for name, engine, version in EXPORTS:
        if drafters and name not in drafters:
            continue
        identity = case(name).identity.model_copy(update={"config_sha256": config_sha256(TARGET_CONFIG)})
        out = root / f"{name} {engine}"
        export(replace(case(name), identity=identity, draft_len=5), engine, out, version=version)
        found[f"{name} for {engine}"] = str(out)
    return found


def asked(engine: str, **words: Any) -> tuple[Resolved, ServePlan]:
    resolved = resolve(ENGINES[engine], ServeOptions(**{"target": "maker/target", **words}))
    return resolved, plan_of(ENGINES[engine], resolved.request)


def planned(engine: str, **words: Any) -> ServePlan:
    return asked(engine, **words)[1]


def the_file(plan: ServePlan) -> dict[str, Any]:
    (text,) = plan.files.values()
    settings = yaml.safe_load(text)
    assert list(file_problems(settings)) == []
    return settings


def published(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
