"""The TensorRT-LLM engine against a double of its documentation, which runs Hugging Face in a process of its own, and
files written here by hand, to its documentation, whole, half and wrong."""

import json
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from collectors.capture.job import CollectReport, collect
from collectors.capture.options import CollectOptions
from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations
from collectors.engines import CaptureRequest, EngineOptions, open_engine, trtllm
from collectors.engines.trtllm import (
    AHEAD,
    FIXED_ARGUMENTS,
    NEEDED,
    SavedFolder,
    TrtllmEngine,
    missing_parts,
    read_entry,
)
from collectors.targets.load import EngineTarget
from hiddenstore.cli import main
from hiddenstore.errors import CaptureError, ConfigError, HiddenstoreError, InterruptError
from hiddenstore.inspect.compare import compare
from hiddenstore.process import Rank
from hiddenstore.store import Store
from hiddenstore.targets.folder import open_target
from tests.collectors.prepared import data_for_tiny, segment_bytes
from tests.collectors.tiny import save_target

DOUBLE = Path(__file__).with_name("double_trtllm")
WIDTH = 8
TOKENS = 5
WHERE = Path("states_7.pt")


@pytest.fixture(scope="module", autouse=True)
def double() -> Iterator[None]:
    """``import tensorrt_llm`` finds the double; its worker process lives as long as this file's tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOUBLE))
        import tensorrt_llm

        assert Path(tensorrt_llm.__file__).is_relative_to(DOUBLE)
        yield
        for worker in tensorrt_llm.llmapi._workers:
            worker.stop()
        for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def options(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> CollectOptions:
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", 160)
    data = data_for_tiny(tmp_path / "data")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return CollectOptions(
        data, tmp_path / "store", str(target), engine="trtllm", recipe="raw", layers="-1,1,3", scratch=scratch
    )


@pytest.fixture(scope="module")
def hf_store(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Store:
    folder = tmp_path_factory.mktemp("hf")
    data = data_for_tiny(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hiddenstore.inputs.UNIT_TOKENS", 160)
        run(CollectOptions(data, folder / "store", str(target), recipe="raw", layers="-1,1,3"))
    return Store.open(folder / "store")


def run(options: CollectOptions) -> CollectReport:
    return collect(options, note=lambda _text: None)


def trap(monkeypatch: pytest.MonkeyPatch, traps: dict[str, object]) -> None:
    """The double's worker does as ``traps`` say; one unit holds every sample, an even number, for those about pairs."""
    monkeypatch.setenv("DOUBLE_TRAPS", json.dumps(traps))
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", 10**6)


def assert_equals_hf(options: CollectOptions, hf_store: Store) -> None:
    found = compare(hf_store, Store.open(options.store))
    assert len(found.both) == 12
    assert [item["field"] for item in found.schema] == ["capture.final_norm"]
    assert found.top1_share == 1.0
    for field in found.document()["fields"]:
        assert field["nonfinite_rows"] == 0, field
        assert field["relative"] < 0.004, field


def test_the_store_is_that_of_hugging_face_with_the_final_hidden_after_the_norm(
    options: CollectOptions, hf_store: Store
) -> None:
    report = run(options)
    assert (report.samples, report.pending_units, report.rejects) == (12, 0, {})
    store = Store.open(options.store)
    assert store.capture.final_norm == "post_norm"
    assert_equals_hf(options, hf_store)
    engine = store.commits()[0].engine
    assert (engine.name, engine.version, engine.settings["tensor_parallel_size"]) == ("trtllm", "1.2.1", "1")
    for sample_id in store.sample_ids:
        assert np.array_equal(store[sample_id].sample.loss_mask, hf_store[sample_id].sample.loss_mask)


@pytest.mark.parametrize(
    "traps",
    [
        {"key": "hidden_state_features"},
        {"repeat": False},
        {"first": True},
        {"reverse": 2},
        {"write_interval": 2, "reverse": 2},
        {"halves": 0.02},
        {"late": 0.02},
        {"noise": True},
    ],
    ids=str,
)
def test_what_versions_and_timing_do_to_the_files_changes_nothing_in_the_store(
    options: CollectOptions, hf_store: Store, monkeypatch: pytest.MonkeyPatch, traps: dict[str, object]
) -> None:
    trap(monkeypatch, traps)
    run(options)
    assert_equals_hf(options, hf_store)
    assert list(Path(options.scratch).iterdir()) == []


@pytest.mark.parametrize(
    ("traps", "kind", "says"),
    [
        (
            {"write_interval": 20},
            "engine-file",
            r"request 1 of the unit \(\d+ tokens\) was answered .*write_interval",
        ),
        ({"torn": True}, "engine-file", r"states_\d\.pt \(\d+ bytes\) is no whole torch file"),
        ({"object": True}, "engine-file", "cannot read TensorRT-LLM's file"),
        ({"missing": True}, "engine-layers", "64 of it hidden_state once more, but 2 layers of 64 make 128"),
        ({"missing": True, "repeat": False}, "engine-layers", "64 wide, but 2 layers of 64 make 128"),
        ({"dtype": "int32"}, "engine-file", "torch.int32, which is no state"),
        ({"cut": 9}, "engine-tokens", r"states of 9 tokens that nobody sent; request \d .* begins alike"),
        ({"pre_norm": True}, "norm-state", "misses the unit scale of the final norm"),
        ({"zero": True}, "norm-state", "misses the unit scale of the final norm by 100.0%"),
        ({"shift": True}, "cross-check", "layer_1 of sample .* differs from Hugging Face's"),
        ({"roll": True}, "cross-check", "final of sample .* differs from Hugging Face's"),
        ({"swap": 2}, "cross-check", "differs from Hugging Face's"),
        ({"batch": 2}, "cross-check", "differs from Hugging Face's"),
        ({"reuse": 4}, "cross-check", "differs from Hugging Face's"),
        ({"fail": True}, "engine-request", r"failed on request \d of the unit \(\d+ tokens\): CUDA out of memory"),
    ],
    ids=str,
)
def test_states_that_are_not_those_of_the_request_never_reach_the_store(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch, traps: dict[str, object], kind: str, says: str
) -> None:
    trap(monkeypatch, traps)
    if kind == "engine-file" or "torn" in traps:
        monkeypatch.setattr(trtllm, "PATIENCE_S", 0.1)
    with pytest.raises(CaptureError, match=says) as caught:
        run(replace(options, layers="1,2", check="hf=12"))
    assert caught.value.kind == kind
    assert len(Store.open(options.store)) == 0
    assert list(Path(options.scratch).iterdir()) == []


@pytest.mark.parametrize("traps", [{"batch": 2}, {"reuse": 4}, {"roll": True}], ids=str)
def test_final_rows_of_another_token_are_rejected_even_where_hugging_face_is_not_asked(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch, traps: dict[str, object]
) -> None:
    trap(monkeypatch, traps)
    with pytest.raises(CaptureError, match="wrong-next-token"):
        run(replace(options, final="all", check="none"))


def test_a_run_through_tensorrt_llm_resumes_to_the_same_bytes(options: CollectOptions) -> None:
    straight = replace(options, store=Path(options.store).with_name("straight"))
    run(straight)
    commits = len(Store.open(straight.store).commits())
    assert commits > 1
    for rank in range(2):
        collect(options, Rank(rank, 2), note=lambda _text: None)
    assert segment_bytes(options.store) == segment_bytes(straight.store)
    assert run(options).units == 0


def engine_of(target: Path, **asked: object) -> TrtllmEngine:
    options = EngineOptions((1, 3), 4096, **asked)  # type: ignore[arg-type]
    engine = open_engine("trtllm", EngineTarget(open_target(str(target)), None), options)
    assert isinstance(engine, TrtllmEngine)
    return engine


def requests_of_length(tokens: int, count: int) -> list[CaptureRequest]:
    ids = np.random.default_rng(0).integers(3, 96, (count, tokens), dtype=np.int32)
    return [CaptureRequest(row, np.arange(tokens, dtype=np.int32)) for row in ids]


def test_the_folder_holds_no_more_files_than_requests_under_way(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(target, scratch=tmp_path)
    bytes_seen, list_files = [], SavedFolder._files

    def measure(folder: SavedFolder) -> list[Path]:
        files = list_files(folder)
        bytes_seen.append(sum(path.stat().st_size for path in files))
        return files

    monkeypatch.setattr(SavedFolder, "_files", measure)
    captured = engine.capture(requests_of_length(64, 40))
    one_file = 64 * (2 + 2) * 64 * 4
    assert captured.aux.shape == (2, 40 * 64, 64)
    assert one_file < max(bytes_seen) < AHEAD * (one_file + 4096)
    assert max(bytes_seen) < 40 * one_file / 10
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_every_row_and_its_next_token_arrive_in_request_order(target: Path, tmp_path: Path) -> None:
    engine = engine_of(target, scratch=tmp_path)
    requests = [*requests_of_length(7, 3), *requests_of_length(7, 1)]
    captured = engine.capture(requests)
    engine.close()
    assert np.array_equal(captured.token_ids, np.concatenate([request.input_ids for request in requests]))
    assert torch.equal(captured.aux[:, :7], captured.aux[:, 21:])
    assert captured.next_rows.tolist() == [6, 13, 20, 27]
    logits = engine.target.head.logits(captured.final[captured.next_rows], norm_state="post_norm")
    assert torch.equal(logits.argmax(-1), captured.next_tokens)


def test_a_stop_ends_the_unit_and_leaves_no_file(target: Path, tmp_path: Path) -> None:
    engine = engine_of(target, scratch=tmp_path)
    with pytest.raises(InterruptError):
        engine.capture(requests_of_length(16, 10), lambda: True)
    engine.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FIXED_ARGUMENTS)
def test_an_argument_that_would_spoil_the_states_is_refused_with_its_reason(options: CollectOptions, name: str) -> None:
    with pytest.raises(ConfigError, match=FIXED_ARGUMENTS[name]) as caught:
        run(replace(options, extra={name: 16}))
    assert caught.value.kind == "engine-arg"
    assert not Path(options.store).exists()


def test_other_arguments_reach_tensorrt_llm(target: Path, tmp_path: Path) -> None:
    extra = {
        "moe_expert_parallel_size": 4,
        "max_num_tokens": 99,
        "kv_cache_config.free_gpu_memory_fraction": 0.5,
        "kv_cache_config": {"tokens_per_block": 64},
    }
    engine = engine_of(target, tensor_parallel=4, scratch=tmp_path, extra=extra)
    arguments = engine._llm.args
    engine.close()
    assert (arguments.tensor_parallel_size, arguments.moe_expert_parallel_size) == (4, 4)
    cache = arguments.kv_cache_config
    assert (cache.free_gpu_memory_fraction, cache.tokens_per_block, cache.enable_block_reuse) == (0.5, 64, False)
    assert (arguments.max_batch_size, arguments.enable_chunked_prefill) == (1, False)
    assert arguments.speculative_config.eagle3_layers_to_capture == {-1, 1, 3}
    assert engine.describe().settings["moe_expert_parallel_size"] == "4"


@pytest.mark.parametrize(
    ("asked", "kind", "says", "hint"),
    [
        ({"extra": {"max_seqlen": 5}}, "engine-arg", "refuses its arguments: .*max_seqlen", None),
        ({"extra": {"kv_cache_config.fraction": 1}}, "engine-arg", "refuses its arguments: .*fraction", None),
        ({"extra": {"max_num_tokens": None}}, "engine-arg", "max_num_tokens is a number", None),
        ({"server": "http://localhost:1"}, "engine-arg", "takes no --server", None),
        ({"device": "cpu"}, "device-unavailable", "NVIDIA GPUs only", "--engine hf --device cpu"),
        (
            {"device": "cuda:3"},
            "device-unavailable",
            "takes the first GPUs",
            "CUDA_VISIBLE_DEVICES=3 hiddenstore collect …",
        ),
        ({"longest": 10**9}, "scratch-invalid", "MB free", None),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_the_target_is_loaded(
    target: Path, tmp_path: Path, asked: dict[str, object], kind: str, says: str, hint: str | None
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}") as caught:
        engine_of(target, **({"scratch": tmp_path} | asked))
    assert caught.value.kind == kind
    assert hint is None or caught.value.hint == hint
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_does_not_start_is_an_error_and_leaves_nothing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap(monkeypatch, {"no_start": True})
    with pytest.raises(ConfigError, match=r"does not start for target .*: RuntimeError: a worker ended") as caught:
        engine_of(target, scratch=tmp_path)
    assert caught.value.kind == "engine-start"
    assert list(tmp_path.iterdir()) == []


def test_a_sample_longer_than_the_engine_was_started_for_is_refused_with_the_argument(
    target: Path, tmp_path: Path
) -> None:
    engine = engine_of(target, scratch=tmp_path, extra={"max_num_tokens": 21})
    with pytest.raises(ConfigError, match="20 tokens, but TensorRT-LLM was started for max_num_tokens 21") as caught:
        engine.capture(requests_of_length(20, 1))
    engine.close()
    assert (caught.value.kind, caught.value.hint) == ("request-too-long", "--engine-arg max_num_tokens=22")


def test_a_sample_as_long_as_the_targets_context_is_captured(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_ALLOW_LONG_MAX_MODEL_LEN", "0")
    context = open_target(str(target)).config.max_position_embeddings
    engine = engine_of(target, scratch=tmp_path, longest=context)
    captured = engine.capture(requests_of_length(context, 2))
    engine.close()
    assert captured.token_ids.shape == (2 * context,)


def test_a_request_that_tensorrt_llm_refuses_is_named(target: Path, tmp_path: Path) -> None:
    engine = engine_of(target, scratch=tmp_path, extra={"max_seq_len": 12})
    with pytest.raises(
        CaptureError, match=r"refuses request 2 of the unit \(12 tokens\): .*max_seq_len \(12\)"
    ) as caught:
        engine.capture([*requests_of_length(9, 1), *requests_of_length(12, 1)])
    engine.close()
    assert caught.value.kind == "engine-request"


def test_without_tensorrt_llm_the_error_says_where_it_is(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(HiddenstoreError, match="TensorRT-LLM cannot be imported") as caught:
        run(options)
    assert caught.value.kind == "not-installed"
    assert "release container of NGC: docs/tensorrt-llm.md" in str(caught.value.hint)
    assert not Path(options.store).exists()


@pytest.mark.parametrize(
    ("module", "attribute", "used"), [(module, attribute, used[0]) for module, attribute, used in NEEDED], ids=str
)
def test_an_installation_that_lacks_what_is_used_is_refused_by_name(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, attribute: str, used: str
) -> None:
    assert missing_parts() == []
    stub = type(attribute, (), {})
    monkeypatch.setattr(sys.modules[module], attribute, stub)
    with pytest.raises(ConfigError, match=f"TensorRT-LLM 1.2.1 lacks .*{module}.{attribute}.{used}") as caught:
        engine_of(target, scratch=tmp_path)
    assert caught.value.kind == "engine-version"


def hiddenstore(*words: str) -> str:
    result = CliRunner().invoke(main, list(words), prog_name="hiddenstore", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_real_text_captured_by_command_means_what_it_says(tmp_path: Path) -> None:
    texts = [json.dumps(row) for row in conversations(Path(json.__file__).parent)]
    (tmp_path / "chats.jsonl").write_text("\n".join(texts), encoding="utf-8")
    data, store, target = str(tmp_path / "data"), str(tmp_path / "store"), str(TARGET_DIR)
    hiddenstore("prepare", str(tmp_path / "chats.jsonl"), "-o", data, "--target", target, "--val", "0")
    hiddenstore("collect", data, "-o", store, "--target", target, "--engine", "trtllm")
    document = json.loads(hiddenstore("verify", store, "--meaning", "--json"))
    assert document["ok"] is True
    assert document["findings"] == []


def entry(layers: int = 2, *, repeat: str = "last", dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Random states of one request; layer k holds values around 10·k, the final hidden around -5."""
    states = [torch.randn(TOKENS, WIDTH) + 10 * k for k in range(1, layers + 1)]
    final = torch.randn(TOKENS, WIDTH) - 5
    blocks = {"last": [*states, final], "first": [final, *states], "no": states}[repeat]
    return {
        "id": 7,
        "input_ids": torch.arange(3, 3 + TOKENS),
        "hidden_state": final.to(dtype),
        "aux_hidden_states": torch.cat(blocks, dim=-1).to(dtype),
    }


def folder_at(path: Path) -> SavedFolder:
    return SavedFolder(path, layers=2, width=WIDTH)


@pytest.mark.parametrize("repeat", ["last", "first", "no"])
@pytest.mark.parametrize("key", ["aux_hidden_states", "hidden_state_features"])
def test_layers_come_out_in_order_however_the_final_hidden_is_repeated_among_them(repeat: str, key: str) -> None:
    saved = entry(repeat=repeat)
    saved[key] = saved.pop("aux_hidden_states")
    states = read_entry(saved, 2, WIDTH, WHERE)
    assert states.aux.shape == (2, TOKENS, WIDTH)
    assert [round(float(layer.float().mean()) / 10) for layer in states.aux] == [1, 2]
    assert torch.equal(states.final, saved["hidden_state"])
    assert states.token_ids.tolist() == [3, 4, 5, 6, 7]


def test_only_the_final_hidden_needs_no_layers() -> None:
    saved = entry()
    del saved["aux_hidden_states"]
    assert read_entry(saved, 0, WIDTH, WHERE).aux.shape == (0, TOKENS, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_float_the_engine_computes_in_is_taken(dtype: torch.dtype) -> None:
    assert read_entry(entry(dtype=dtype), 2, WIDTH, WHERE).aux.dtype == dtype


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"aux_hidden_states": None}, "engine-layers", "no aux_hidden_states nor hidden_state_features, but 2 layers"),
        ({"hidden_state": None}, "engine-file", "it has no tensor hidden_state, only aux_hidden_states, id, input_ids"),
        ({"input_ids": "text"}, "engine-file", "no tensor input_ids"),
        ({"aux_hidden_states": torch.zeros(5, 12)}, "engine-layers", "12 wide, but 2 layers of 8 make 16"),
        ({"aux_hidden_states": torch.zeros(4, 16)}, "engine-file", r"shape \[4, 16\], but the request has 5 tokens"),
        ({"hidden_state": torch.zeros(5, 6)}, "engine-layers", "hidden_state of request 1 of states_7.pt is 6 wide"),
        ({"hidden_state": torch.zeros(3, 8)}, "engine-file", "a reused prefix or a chunked prefill"),
        ({"aux_hidden_states": torch.zeros(5, 16, dtype=torch.int8)}, "engine-file", "torch.int8"),
    ],
)
def test_states_of_other_layers_rows_or_kind_are_refused(change: dict[str, object], kind: str, says: str) -> None:
    saved = {key: value for key, value in (entry() | change).items() if value is not None}
    with pytest.raises(CaptureError, match=says) as caught:
        read_entry(saved, 2, WIDTH, WHERE)
    assert caught.value.kind == kind


@pytest.mark.parametrize("repeat", ["last", "first"])
def test_a_layer_that_is_missing_is_seen_although_the_repeated_final_hidden_fills_its_place(repeat: str) -> None:
    saved = entry(layers=1, repeat=repeat)
    assert saved["aux_hidden_states"].shape[1] == 2 * WIDTH
    with pytest.raises(CaptureError, match="16 wide, 8 of it hidden_state once more, but 2 layers"):
        read_entry(saved, 2, WIDTH, WHERE)


def test_a_file_is_taken_once_and_removed_when_its_last_request_is_done(tmp_path: Path) -> None:
    torch.save([entry(), entry()], tmp_path / "states_2.pt")
    folder = folder_at(tmp_path)
    first, second = folder.take()
    assert list(folder.take()) == []
    folder.done(second)
    assert (tmp_path / "states_2.pt").exists()
    folder.done(first)
    assert list(tmp_path.iterdir()) == []


def test_a_half_written_file_is_left_until_it_is_whole(tmp_path: Path) -> None:
    torch.save([entry()], tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    folder, path = folder_at(tmp_path), tmp_path / "states_1.pt"
    for end in (0, 3, 40, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        assert list(folder.take()) == [], end
        assert folder.unfinished() == [f"states_1.pt ({end} bytes)"]
    path.write_bytes(data)
    assert len(list(folder.take())) == 1


class Planted:
    """What a pickle may do: call anything."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (Path("planted"),)


def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save([Planted()], tmp_path / "states_1.pt")
    with pytest.raises(CaptureError, match=r"cannot read TensorRT-LLM's file states_1\.pt") as caught:
        list(folder_at(tmp_path).take())
    assert caught.value.kind == "engine-file"
    assert not (tmp_path / "planted").exists()


def test_a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "states_1.pt", "w") as archive:
        archive.writestr("notes.txt", "nothing")
    with pytest.raises(CaptureError, match="cannot read"):
        list(folder_at(tmp_path).take())


def test_what_lies_in_the_folder_before_the_first_request_is_cleared(tmp_path: Path) -> None:
    torch.save([entry()], tmp_path / "states_0.pt")
    (tmp_path / ".owner").touch()
    folder_at(tmp_path).clear()
    assert [path.name for path in tmp_path.iterdir()] == [".owner"]


@pytest.mark.parametrize(("visible", "device"), [(1, "cuda:0"), (8, "cuda:3"), (8, "cuda")])
def test_a_rank_takes_the_gpu_that_is_its_own_however_many_it_sees(
    visible: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(trtllm, "choose_devices", lambda _options: None)
    options = EngineOptions((1, 3), 64, device=device, local_rank=3)
    trtllm._require_gpus(options)
    with pytest.raises(ConfigError, match="takes the first GPUs that its process sees"):
        trtllm._require_gpus(replace(options, device="cuda:5"))
