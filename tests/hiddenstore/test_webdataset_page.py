"""The programs printed in ``docs/webdataset.md`` decode a real store with webdataset and numpy only."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, make_samples, make_store, random_records
from hiddenstore.writer import write_unit

PAGE = Path(__file__).parents[2] / "docs" / "webdataset.md"
FIELDS = (("aux", "layer_1", 0), ("aux", "layer_3", 1), ("final", "final", 0))

# webdataset 1.0 leaves the file it iterates to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "reader.py"
    path.write_text("".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)))
    return path


@pytest.fixture
def page(program: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("reader", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def states_of(store: Store, sample_id: str) -> list[torch.Tensor]:
    record = store[sample_id]
    return [*record.aux, record.final]


@pytest.mark.parametrize("codec", ["bf16", "q8"])
def test_the_decoder_of_the_page_gives_the_states_the_store_gives(tmp_path: Path, page: ModuleType, codec: str) -> None:
    store = make_store(tmp_path, codec=codec, container="webdataset")
    seen = []
    for sample in page.samples(store.path):
        seen.append(sample["__key__"])
        for (group, field, slot), wanted in zip(FIELDS, states_of(store, sample["__key__"]), strict=True):
            found = torch.from_numpy(page.states(sample, group, field, slot)).bfloat16()
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), field
    assert seen == store.sample_ids


def test_the_page_takes_the_highest_revision_of_a_unit(tmp_path: Path, page: ModuleType) -> None:
    store = make_store(tmp_path, samples=3, container="webdataset")
    commit, *others = sorted((Path(store.path) / "commits").glob("*.json"))
    record = json.loads(commit.read_bytes())
    for revision in (2, 10):
        changed = {**record, "segment": f"segments/of-revision-{revision}"}
        commit.with_name(f"{commit.stem}.r{revision}.json").write_text(json.dumps(changed), encoding="utf-8")
    assert f"{store.path}/segments/of-revision-10/samples.tar" in page.tars(store.path)
    assert len(page.tars(store.path)) == 1 + len(others)


def test_a_sample_of_two_units_comes_once_with_the_states_of_the_unit_first_by_name(
    tmp_path: Path, page: ModuleType
) -> None:
    store = make_store(tmp_path, container="webdataset")
    write_unit(store, "zz", "1" * 64, random_records(make_samples(6)[1:4], store.capture, seed=9), (), ENGINE)
    store = Store.open(store.path)
    assert store.duplicates == 3
    for samples in (list(page.samples(store.path)), list(store.webdataset())):
        assert [sample["__key__"] for sample in samples] == store.sample_ids
        for sample in samples:
            states = torch.from_numpy(page.states(sample, "aux", "layer_3", 1)).bfloat16()
            assert torch.equal(states, store.read(sample["__key__"], layers=[3]).aux[0])


def test_the_page_unpacks_lossless_members(tmp_path: Path, page: ModuleType) -> None:
    store = make_store(tmp_path, codec="lossless", container="webdataset")
    for sample in page.samples(store.path):
        for (_, field, _), wanted in zip(FIELDS, states_of(store, sample["__key__"]), strict=True):
            found = torch.from_numpy(page.unblosc(sample[f"{field}.blosc"], 32).copy())
            assert torch.equal(found, wanted.view(torch.uint16))


def test_the_page_runs_as_a_program(tmp_path: Path, program: Path) -> None:
    store = make_store(tmp_path, samples=3, container="webdataset")
    command = [sys.executable, "-P", str(program), store.path]
    result = subprocess.run(command, check=True, cwd=tmp_path, timeout=60, capture_output=True, text=True)
    tokens = [store[name].sample.tokens for name in store.sample_ids]
    wanted = [f"{name} ({n},) (2, {n}, 32)" for name, n in zip(store.sample_ids, tokens, strict=True)]
    assert result.stdout.splitlines() == wanted
