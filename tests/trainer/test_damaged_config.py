"""A drafter's ``config.json`` or ``hiddenstore.json`` with another thing where a number, a list or an object belongs:
refused in words, or read, by import and by serve alike."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hiddenstore.errors import ConfigError, HiddenstoreError
from tests.trainer.export_cases import LAYERS, case
from tests.trainer.serve_cases import planned
from trainer.drafters import drafter_kind
from trainer.export.published import read_published
from trainer.export.write import export
from trainer.losses.teacher import TargetInterface
from trainer.train.run_folder import load_weights


def changed(document: dict[str, Any], value: Any) -> Iterator[None]:
    """The document with the value in the place of each member, one after the other, those of its objects too."""
    for name, kept in list(document.items()):
        if isinstance(kept, dict):
            yield from changed(kept, value)
        document[name] = value
        yield
        document[name] = kept


def read(folder: Path, name: str) -> None:
    checkpoint = case(name)
    found = read_published(folder, checkpoint.head, LAYERS)
    model = drafter_kind(found.config.name).build(found.config, TargetInterface(checkpoint.head, found.vocab), 0)
    load_weights(model, found.weights, str(folder))


@pytest.mark.parametrize("value", ["x", [None], float("inf"), 10**12])
@pytest.mark.parametrize("name", ["eagle3", "dflash", "dflash2", "peagle"])
def test_no_value_of_any_member_is_a_crash(name: str, value: Any, tmp_path: Path) -> None:
    out, tried = tmp_path / "out", 0
    export(case(name), "vllm", out, "float32")
    for file in ("config.json", "hiddenstore.json"):
        document = json.loads((out / file).read_text())
        for _ in changed(document, value):
            (out / file).write_text(json.dumps(document))
            with suppress(HiddenstoreError):
                read(out, name)
            with suppress(HiddenstoreError):
                planned("vllm", drafter=str(out))
            tried += 1
        (out / file).write_text(json.dumps(document))
    read(out, name)
    assert tried > 30


def test_sizes_that_the_weights_do_not_have_are_refused_before_anything_of_them_is_built(tmp_path: Path) -> None:
    export(case("eagle3"), "vllm", tmp_path / "out", "float32")
    file = tmp_path / "out" / "config.json"
    document = json.loads(file.read_text())
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size"):
        file.write_text(json.dumps(document | {name: 40_000}))
        with pytest.raises(ConfigError, match=r"(layers|size) 40,000, for which its weights are too small") as caught:
            read(tmp_path / "out", "eagle3")
        assert caught.value.kind == "drafter-unfit"


def test_an_export_of_a_drafter_that_is_not_known_here_says_so(tmp_path: Path) -> None:
    export(case("eagle3"), "vllm", tmp_path / "out", "float32")
    file = tmp_path / "out" / "hiddenstore.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"drafter": "eagle9"}))
    with pytest.raises(ConfigError, match="is 'eagle9'; known here are eagle1, eagle3, ") as caught:
        planned("vllm", drafter=str(tmp_path / "out"))
    assert caught.value.kind == "serve-setting"
