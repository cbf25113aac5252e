"""What a real vLLM writes for somebody who never heard of us is imported as the store that collect makes."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine_world import hiddenstore
from vllm_engine import loaded

from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations
from hiddenstore.inputs import PreparedInput
from hiddenstore.store import Store

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

CONVERSATIONS = 40
SHORT = 800
"""Characters, which are fewer than the 512 tokens that ``loaded`` has room for."""
ASKED_IDS = [8, 2, 5, 4]
"""In no order: vLLM writes their columns ascending. 8 is the target's number of layers."""
NEW_TOKENS = 12
ONE_STEP = 2.0**-7
"""Of bf16, which both stores hold: see ``test_three_engines.py``."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    short = (line for line in map(json.dumps, conversations()) if len(line) < SHORT)
    rows = list(islice(short, CONVERSATIONS))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    hiddenstore("prepare", str(folder / "rows.jsonl"), "-o", str(folder / "data"), "--target", str(TARGET_DIR))
    return str(folder / "data")


@pytest.fixture(scope="module")
def dumps(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``prompts``: the states of conversations. ``answers``: those of prompts and of what the target then says.

    Only the copy off the device is ours (vLLM's own needs CUDA); file, names and locks are the stock connector's.
    """
    folder = tmp_path_factory.mktemp("dumps")
    prompts = [sample.input_ids.tolist() for sample in PreparedInput.open(data).samples()]
    with extracting(folder / "prompts") as llm:
        answer(llm, prompts, max_tokens=1)
    with extracting(folder / "answers") as llm:
        with_answers = {"kv_transfer_params": {"include_output_tokens": True}}
        answer(llm, [ids[:20] for ids in prompts], max_tokens=NEW_TOKENS, extra_args=with_answers)
    return folder


def extracting(folder: Path) -> Any:
    """A vLLM that writes hidden states, as its documentation says to start it."""
    return loaded(
        str(TARGET_DIR),
        {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ASKED_IDS}},
        },
        kv_transfer_config={
            "kv_connector": "CpuHiddenStatesConnector",
            "kv_connector_module_path": "collectors.engines.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    )


def answer(llm: Any, prompts: list[list[int]], **sampling: Any) -> None:
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

    asked = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(asked, SamplingParams(temperature=0, ignore_eos=True, **sampling), use_tqdm=False)
    # A core in this process writes the last files in the step after; one of its own goes on by itself.
    llm.llm_engine.step()
    for output in outputs:
        load_hidden_states(output.kv_transfer_params["hidden_states_path"])


def imported(dump: Path, store: Path, *words: str) -> dict[str, Any]:
    how = ("--from", "vllm-extract", "--target", str(TARGET_DIR), "--recipe", "lossless", "--check", "hf")
    return hiddenstore("import", str(dump), "-o", str(store), *how, *words)


def test_an_imported_dump_is_the_store_that_collect_makes(data: str, dumps: Path, tmp_path: Path) -> None:
    asked = ",".join(map(str, ASKED_IDS))
    imported(dumps / "prompts", tmp_path / "imported", "--peer-layers", asked, "--tokens-from", data)
    how = ("--target", str(TARGET_DIR), "--engine", "vllm", "--dtype", "fp32", "--layers", "1,3,4")
    hiddenstore("collect", data, "-o", str(tmp_path / "own"), *how, "--recipe", "lossless")
    stores = str(tmp_path / "own"), str(tmp_path / "imported")
    found = hiddenstore("diff", *stores, "--samples", "0", "--tolerance", str(ONE_STEP))
    assert found["beyond_tolerance"] == []
    assert found["coverage"] == {"only_a": 0, "both": CONVERSATIONS, "only_b": 0}
    assert {field["field"] for field in found["fields"]} == {"layer_1", "layer_3", "layer_4", "final"}
    assert hiddenstore("verify", stores[1], "--meaning")["ok"]


def test_states_of_generated_tokens_are_those_of_a_prefill(dumps: Path, tmp_path: Path) -> None:
    imported(dumps / "answers", tmp_path / "store", "--loss-on", "all")
    store = Store.open(tmp_path / "store")
    lengths = [len(store[sample_id].sample.input_ids) for sample_id in store.sample_ids]
    assert max(lengths) == 20 + NEW_TOKENS - 1
    assert hiddenstore("verify", str(tmp_path / "store"), "--meaning")["ok"]
