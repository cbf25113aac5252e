"""The program printed in ``docs/format.md`` reads a real store with stock tools only."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from tests.golden.reading import STORES

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.mark.parametrize("codec", ["q8", "q4", "q4q3", "q3", "aux=klt,final=q8", "lossless"])
def test_the_stock_reader_of_the_format_page_gives_the_states_the_store_gives(tmp_path: Path, codec: str) -> None:
    store = make_store(tmp_path, codec=codec, width=40)
    wanted = max(store.sample_ids, key=lambda name: int(store.sample(name).loss_mask.argmax()))
    assert_the_program_reads(store, wanted, 3, tmp_path)


@pytest.mark.parametrize("name", ["compact-zarr-shared", "q4q3-zarr-shared"])
def test_it_gives_rows_that_stand_with_another_sample(tmp_path: Path, name: str) -> None:
    store = Store.open(STORES / name)
    (record,) = store.commits()
    shared = store.zarr(record.unit)["shared_rows"][:, 1]
    assert_the_program_reads(store, record.samples[int(shared.argmax())].id, 1, tmp_path)


def assert_the_program_reads(store: Store, wanted: str, layer: int, tmp_path: Path) -> None:
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    program = tmp_path / "reader.py"
    program.write_text(match[1], encoding="utf-8")
    out = tmp_path / "states.npy"
    command = [sys.executable, "-P", str(program), store.path, wanted, str(layer), str(out)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=60)
    found = torch.from_numpy(np.load(out)).bfloat16()
    assert torch.equal(found.view(torch.int16), store.read(wanted, layers=[layer]).aux[0].view(torch.int16))
