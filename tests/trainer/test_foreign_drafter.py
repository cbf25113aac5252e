"""A drafter of another package: its kind alone tells export, import and serve everything they know of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hiddenstore.errors import ConfigError
from tests.trainer.export_cases import LAYERS, make
from tests.trainer.serve_cases import planned
from trainer.drafters import DRAFTERS, drafter_kind
from trainer.drafters.eagle1 import EAGLE1, Eagle1, Eagle1Config
from trainer.export.published import read_published
from trainer.export.support import drafter_export, matrix, support, words
from trainer.export.write import export
from trainer.formats.base import Checkpoint, Quirks, Reads


class NextConfig(Eagle1Config):
    name: str = "next"


@pytest.fixture(autouse=True)
def _foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE-1 under another name, as a package that is not ours would bring it."""
    reads = Reads("NextDraftModel", "next", "next.py", ran="0.32", since="0.32", quirks=Quirks(fc_bias=True))
    outside = replace(
        EAGLE1.export,
        drafter="next",
        titles={"next": "a Next drafter"},
        word=lambda flags: "next",
        rows={("vllm", "next"): reads.preceded_by("Next came with 0.32", "--engine-version 0.32")},
        architectures="NextDraftModel",
    )
    kind = type("NextKind", (type(EAGLE1),), {"name": "next", "config": NextConfig, "export": outside})()
    monkeypatch.setattr(DRAFTERS, "rows", {**DRAFTERS.rows, "next": kind})
    monkeypatch.setattr(DRAFTERS, "_loaded", {})


def test_it_is_written_proved_recognised_and_served_as_its_kind_says(tmp_path: Path) -> None:
    eagle1 = make("eagle1")
    model = Eagle1.build(NextConfig(**{**eagle1.config.model_dump(), "name": "next"}), eagle1.head, 0)
    checkpoint = Checkpoint(model.eval(), eagle1.vocab, eagle1.head, eagle1.identity)
    done = export(checkpoint, "vllm", tmp_path / "out", "float32")
    assert (done.drafter, done.tensors["fc.bias"][0]) == ("next", "float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["NextDraftModel"]
    found = read_published(tmp_path / "out", eagle1.head, LAYERS)
    assert found.config.name == "next"
    assert torch.equal(found.weights["fc.weight"], model.state_dict()["fc.weight"])
    command = planned("vllm", drafter=str(tmp_path / "out")).command
    assert json.loads(command[-1])["method"] == "next"
    (tmp_path / "out" / "hiddenstore.json").unlink()
    assert json.loads(planned("vllm", drafter=str(tmp_path / "out")).command[-1])["method"] == "next"


def test_engines_it_does_not_name_have_no_loader_of_it_and_the_table_has_its_column() -> None:
    assert support("vllm", None, "next").proof == "ran"
    assert support("vllm", "0.31", "next").nearest == "--engine-version 0.32"
    answer = support("sglang", None, "next")
    assert (answer.ok, answer.reason, answer.nearest) == (
        False,
        "SGLang 0.5.23 has no loader for next",
        "--engine vllm",
    )
    assert {row.drafter for row in matrix()} == set(words())
    with pytest.raises(ConfigError, match="does not serve a Next drafter") as refused:
        planned("sglang", method="next", drafter="maker/next")
    assert refused.value.kind == "serve-unsupported"


@pytest.mark.parametrize("drafter", ["eagle1", "eagle3", "dflash", "medusa"])
def test_what_is_read_without_torch_is_what_the_kind_carries(drafter: str) -> None:
    assert drafter_export(drafter) is drafter_kind(drafter).export
    assert drafter_export(drafter).drafter == drafter
