"""The vLLM engine against a stand-in server: states, files, refusals. A real vLLM runs in tests/engines."""

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from collectors.capture.job import collect
from collectors.capture.options import CollectOptions
from collectors.engines import CaptureRequest, EngineOptions, open_engine
from collectors.engines.hf import HfEngine
from collectors.engines.resources import major_minor
from collectors.engines.unit_memory import PLACE, UnitMemory
from collectors.engines.vllm import FIXED_ARGUMENTS, VllmProcess, _Flow, _require_memory
from collectors.engines.vllm_server import (
    _PROBE,
    LayerIds,
    StateFile,
    VllmServer,
    kv_transfer_config,
    server_command,
    speculative_config,
)
from collectors.targets.load import EngineTarget, LoadedTarget, load_target
from hiddenstore.errors import CaptureError, ConfigError, FormatError, HiddenstoreError, InterruptError, Kind
from hiddenstore.store import Store
from tests.collectors.prepared import data_for_tiny
from tests.collectors.tiny import LAYERS, VOCAB, save_target
from tests.collectors.vllm_double import VllmDouble

AUX = (-1, 1, 3)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_target(str(save_target(tmp_path_factory.mktemp("target"))))


@pytest.fixture
def double(loaded: LoadedTarget, tmp_path: Path) -> Iterator[VllmDouble]:
    (tmp_path / "states").mkdir()
    server = VllmDouble(loaded.model, loaded.tokenizer, loaded.folder.name, tmp_path / "states", [0, 2, LAYERS])
    yield server
    server.close()


@pytest.fixture
def options(double: VllmDouble) -> EngineOptions:
    return EngineOptions(AUX, 64, longest=40, server=double.url, extra={"concurrency": 4})


@pytest.fixture
def target(loaded: LoadedTarget) -> EngineTarget:
    return EngineTarget(loaded.folder, None)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenstore.servers.http.FIRST_WAIT_S", 0.001)


def requests(lengths: tuple[int, ...] = (1, 2, 9, 30, 30, 17, 40, 5)) -> list[CaptureRequest]:
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, VOCAB, length).astype(np.int32) for length in lengths]
    return [CaptureRequest(ids, np.arange(len(ids) // 2, len(ids), dtype=np.int32)) for ids in rows]


def test_a_server_gives_what_hugging_face_computes(
    loaded: LoadedTarget, target: EngineTarget, double: VllmDouble, options: EngineOptions
) -> None:
    double.delay_s = 0.01
    engine, asked = open_engine("vllm", target, options), requests()
    came: list[int] = []
    found = engine.capture(asked, lambda: False, came.append)
    assert sorted(came) == sorted(len(request.input_ids) for request in asked)
    expected = HfEngine(loaded, EngineOptions(AUX, 64)).capture(asked)
    torch.testing.assert_close(found.aux.float(), expected.aux.float(), rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(found.final.float(), expected.final.float(), rtol=2**-7, atol=1e-4)
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert torch.equal(loaded.head.logits(found.final[found.next_rows]).argmax(-1), found.next_tokens)
    assert len(found.next_tokens) == len(asked)
    assert engine.describe().name == "vllm"


def test_files_are_removed_while_requests_run(target: EngineTarget, double: VllmDouble, options: EngineOptions) -> None:
    VllmServer(target, options).capture(requests((20,) * 40))
    assert double.most_files <= 4
    assert list(double.folder.iterdir()) == []


def test_the_last_layer_is_the_final_hidden_and_is_asked_for_once() -> None:
    assert LayerIds.of((-1, 1, 3), 4) == LayerIds((0, 2, 4), 3)
    assert LayerIds.of((1,), 4) == LayerIds((2, 4), 1)
    assert LayerIds.of((), 4) == LayerIds((4,), 0)


def test_a_server_that_fails_for_a_moment_is_asked_again(
    target: EngineTarget, double: VllmDouble, options: EngineOptions
) -> None:
    double.refusals = [500, 503, 429]
    assert len(VllmServer(target, options).capture(requests((5,))).token_ids) == 5


@pytest.mark.parametrize(
    ("refusals", "kind"), [([500] * 9, "server-failing"), ([400], "server-refused"), ([401], "server-refused")]
)
def test_a_server_that_refuses_stops_the_run(
    target: EngineTarget, double: VllmDouble, options: EngineOptions, refusals: list[int], kind: str
) -> None:
    double.refusals = refusals
    with pytest.raises(HiddenstoreError) as caught:
        VllmServer(target, options).capture(requests((5,)))
    assert caught.value.kind == kind
    if refusals == [401]:
        assert "--engine-arg api_key_env=NAME" in str(caught.value.hint)


def test_a_key_is_sent_only_from_the_variable_that_is_named(
    target: EngineTarget, double: VllmDouble, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for-another-server")
    monkeypatch.setenv("VLLM_KEY", "for-this-one")
    VllmServer(target, options).close()
    assert double.keys == {None}
    VllmServer(target, replace(options, extra={"api_key_env": "VLLM_KEY"})).close()
    assert double.keys == {None, "Bearer for-this-one"}


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda states, tokens: (states[4:], tokens), "engine-shape"),
        (lambda states, tokens: (states[4:], tokens[4:]), "engine-tokens"),
        (lambda states, tokens: (states, tokens[::-1]), "engine-tokens"),
        (lambda states, tokens: (states[:, :2], tokens), "server-unfit"),
        (lambda states, tokens: (states[..., :8], tokens), "engine-shape"),
    ],
    ids=["prefix-cache", "cut", "other-tokens", "fewer-layers", "narrower"],
)
def test_states_of_something_else_are_refused_and_their_files_removed_unless_they_are_of_other_tokens(
    target: EngineTarget, double: VllmDouble, options: EngineOptions, damage: object, kind: str
) -> None:
    double.damage = damage  # type: ignore[assignment]
    with pytest.raises(HiddenstoreError) as caught:
        VllmServer(target, options).capture(requests((9,)))
    assert caught.value.kind == kind
    assert bool(list(double.folder.iterdir())) == (kind == "engine-tokens")


@pytest.mark.parametrize(
    ("tensors", "kind"),
    [
        ({"weight": torch.zeros(3)}, "engine-file"),
        ({"token_ids": torch.arange(5)}, "engine-file"),
        ({"token_ids": torch.arange(5), "hidden_states": torch.zeros(5, 3, 64)}, "engine-tokens"),
    ],
    ids=["weights", "half-of-it", "states-of-other-tokens"],
)
def test_a_file_that_a_server_calls_its_own_and_is_not_stays(
    target: EngineTarget,
    double: VllmDouble,
    options: EngineOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tensors: dict[str, torch.Tensor],
    kind: str,
) -> None:
    files = tmp_path / "model.safetensors", tmp_path / "model.safetensors.lock"
    save_file(tensors, files[0])
    files[1].touch()
    answer_with(monkeypatch, double, files[0])
    with pytest.raises(HiddenstoreError) as caught:
        VllmServer(target, options).capture(requests((9,)))
    assert caught.value.kind == kind
    assert all(file.exists() for file in files)


def test_a_server_that_names_a_second_folder_is_refused_and_nothing_there_removed(
    target: EngineTarget, double: VllmDouble, options: EngineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = VllmServer(target, options)
    engine.capture(requests((9,)))
    mine = tmp_path / "mine.safetensors"
    mine.write_bytes(b"mine")
    answer_with(monkeypatch, double, mine)
    with pytest.raises(ConfigError, match=r"states are in .* and .*, expected one folder") as caught:
        engine.capture(requests((9,)))
    assert caught.value.kind == "server-unfit"
    assert mine.read_bytes() == b"mine"


def answer_with(monkeypatch: pytest.MonkeyPatch, double: VllmDouble, file: Path) -> None:
    """The server says of every request that its states are in ``file``."""
    complete, params = double.complete, {"kv_transfer_params": {"hidden_states_path": str(file)}}
    monkeypatch.setattr(double, "complete", lambda asked: complete(asked) | params)


def test_a_stop_leaves_no_file(target: EngineTarget, double: VllmDouble, options: EngineOptions) -> None:
    asked = iter(range(100))
    with pytest.raises(InterruptError):
        VllmServer(target, options).capture(requests((20,) * 30), lambda: next(asked) >= 2)
    assert list(double.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"extra": {"concurrency": "many"}}, "engine-arg"),
        ({"extra": {"concurrency": 0}}, "engine-arg"),
        ({"extra": {"timeout_s": None}}, "engine-arg"),
        ({"extra": {"timeout_s": float("nan")}}, "engine-arg"),
        ({"extra": {"api_key_env": 3}}, "api-key-missing"),
        ({"extra": {"model": "other"}}, "server-unfit"),
        ({"longest": 256}, "server-unfit"),
        ({"extra": {"concurency": 3}}, "engine-arg"),
        ({"server": "http://127.0.0.1:9"}, "server-unreachable"),
    ],
)
def test_a_server_that_cannot_serve_the_job_is_refused_first(
    target: EngineTarget, options: EngineOptions, change: dict[str, object], kind: str
) -> None:
    with pytest.raises(HiddenstoreError) as caught:
        VllmServer(target, replace(options, **change))  # type: ignore[arg-type]
    assert caught.value.kind == kind


def test_a_server_of_another_vocabulary_is_refused(
    target: EngineTarget, double: VllmDouble, options: EngineOptions
) -> None:
    class Other:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [len(text)]

    double.tokenizer = Other()
    with pytest.raises(ConfigError, match="tokenizer reads a text as"):
        VllmServer(target, options)


def test_a18_a_server_whose_tokenizer_lacks_one_merge_is_refused(
    loaded: LoadedTarget, double: VllmDouble, options: EngineOptions
) -> None:
    import json

    from tiny_templates import tiny_tokenizer as merging_tokenizer
    from tokenizers import Tokenizer

    own, other = merging_tokenizer(), merging_tokenizer()
    target = EngineTarget(replace(loaded.folder, tokenizer=own), None)
    double.tokenizer = other
    VllmServer(target, options).close()
    document = json.loads(other.backend_tokenizer.to_str())
    removed = next(pair for pair in document["model"]["merges"] if "".join(pair) == "Ġassistant")
    document["model"]["merges"].remove(removed)
    other._tokenizer = Tokenizer.from_str(json.dumps(document))
    assert other.encode(_PROBE) == own.encode(_PROBE), "a usual text does not tell them apart"
    with pytest.raises(ConfigError, match="tokenizer reads a text as"):
        VllmServer(target, options)


def test_a_folder_that_is_mounted_elsewhere_is_found_there(
    target: EngineTarget, double: VllmDouble, options: EngineOptions, tmp_path: Path
) -> None:
    seen_here = tmp_path / "mount"
    seen_here.symlink_to(double.folder)
    double.folder = seen_here
    VllmServer(target, replace(options, scratch=tmp_path / "states")).capture(requests((5,)))
    with pytest.raises(ConfigError, match="cannot be reached from here"):
        VllmServer(target, replace(options, scratch=tmp_path / "nowhere")).capture(requests((5,)))


def test_a_file_that_never_comes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectors.engines.vllm_server.LATE_S", 0.0)
    with pytest.raises(CaptureError, match="is not there after") as caught:
        StateFile(tmp_path / "x.safetensors").read()
    assert caught.value.kind == "states-late"


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CaptureError, match="cannot read") as caught:
        StateFile(tmp_path / "x.safetensors").read()
    assert caught.value.kind == "engine-file"
    save_file({"other": torch.zeros(1)}, tmp_path / "y.safetensors")
    with pytest.raises(CaptureError, match="cannot read"):
        StateFile(tmp_path / "y.safetensors").read()


def test_collect_from_a_server_compares_with_hugging_face_and_writes_the_profile(
    double: VllmDouble, loaded: LoadedTarget, tmp_path: Path
) -> None:
    data, said = data_for_tiny(tmp_path / "data"), []
    options = CollectOptions(
        data, tmp_path / "store", loaded.folder.name, engine="vllm", layers="-1,1,3", server=double.url
    )
    report = collect(options, note=said.append)
    assert (report.samples, report.compared_samples) == (12, 4)
    assert 0 < report.compare_s <= report.seconds - report.forward_s
    assert any("compared with Hugging Face on cpu" in line for line in said)
    (commit, *_) = Store.open(options.store).commits()
    assert (commit.engine.name, commit.engine.version) == ("vllm", "0.32.0")
    assert (Path(options.store) / "calibration" / "profile.json").exists()


def test_a_target_that_ships_a_repetition_penalty_loses_no_sample_of_a_server(
    double: VllmDouble, loaded: LoadedTarget, tmp_path: Path
) -> None:
    double.penalty = 8.0
    options = CollectOptions(
        data_for_tiny(tmp_path / "data"), tmp_path / "store", loaded.folder.name, engine="vllm", server=double.url
    )
    report = collect(replace(options, layers="-1,1,3", check="none"), note=lambda _text: None)
    assert (report.samples, dict(report.rejects)) == (12, {})


def test_a5_a_server_that_runs_another_checkpoint_than_the_folder_is_refused_by_its_states(
    double: VllmDouble, loaded: LoadedTarget, tmp_path: Path
) -> None:
    data, more = data_for_tiny(tmp_path / "data"), data_for_tiny(tmp_path / "more", samples=5, seed=9)
    options = CollectOptions(
        data, tmp_path / "store", loaded.folder.name, engine="vllm", layers="-1,1,3", server=double.url
    )
    collect(options, note=lambda _text: None)
    double.model = copy.deepcopy(loaded.model)
    weight = double.model.model.layers[1].mlp.down_proj.weight
    weight += torch.randn(weight.shape[0], 4) @ torch.randn(4, weight.shape[1]) * weight.std() / 2
    with pytest.raises(FormatError, match="states of layer 1") as caught:
        collect(replace(options, data=more, check="none"), note=lambda _text: None)
    assert caught.value.kind == "target-mismatch"
    assert len(Store.open(options.store)) == 12
    double.model = loaded.model
    assert collect(replace(options, data=more, check="none"), note=lambda _text: None).samples == 5


def test_layers_one_off_from_a_server_are_refused(double: VllmDouble, loaded: LoadedTarget, tmp_path: Path) -> None:
    double.ids = [1, 3, LAYERS]
    data = data_for_tiny(tmp_path / "data")
    options = CollectOptions(
        data, tmp_path / "store", loaded.folder.name, engine="vllm", layers="-1,1,3", server=double.url
    )
    with pytest.raises(CaptureError, match=r"layer ids are off by \+1"):
        collect(options, note=lambda _text: None)
    assert len(Store.open(options.store)) == 0


def test_what_vllm_is_told_is_json_and_says_its_own_connector() -> None:
    asked = LayerIds.of((1, 3), 8)
    assert speculative_config(asked)["draft_model_config"]["hf_config"] == {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 8]
    }
    assert kv_transfer_config("/x")["kv_connector"] == "ExampleHiddenStatesConnector"
    on_cpu = kv_transfer_config("/x", on_cpu=True)
    assert on_cpu["kv_connector_module_path"] == "collectors.engines.vllm_connector"


def test_a_vllm_whose_connector_is_another_is_refused_with_the_server_as_the_way_out() -> None:
    _require_memory("0.32.0+cpu")
    with pytest.raises(ConfigError, match=r"vLLM 0\.31\.2 .* expected Linux and vLLM 0\.32 or later") as caught:
        _require_memory("0.31.2")
    assert caught.value.kind == "engine-start"
    assert "--server URL" in str(caught.value.hint)


@pytest.fixture
def long_rope(target: EngineTarget) -> EngineTarget:
    """The target with other rotary frequencies for samples of more than 64 tokens, as Phi-3 has them above 4096."""
    config = copy.copy(target.config)
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    return EngineTarget(replace(target.folder, config=config), None)


@pytest.mark.parametrize(
    ("longest", "given", "fix"),
    [
        (63, {}, None),
        (64, {}, "--max-tokens 63"),
        (150, {}, "--max-tokens 63"),
        (40, {"max_model_len": 256}, "--engine-arg max_model_len=64"),
        (40, {"max_model_len": -1}, "--engine-arg max_model_len=64"),
        (40, {"max_model_len": 64}, None),
    ],
)
def test_vllm_is_not_started_where_it_would_turn_short_samples_by_the_factors_of_long_ones(
    longest: int, given: dict[str, int], fix: str | None, long_rope: EngineTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, object] = {}
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0", LLM=told.update))
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    engine = object.__new__(VllmProcess)
    engine.target, engine._layer_ids = long_rope, LayerIds.of(AUX, LAYERS)
    options = EngineOptions(AUX, 64, longest=longest, extra=given)
    if fix is None:
        engine._start(options)
        assert told["max_model_len"] <= 64  # type: ignore[operator]
        return
    with pytest.raises(ConfigError, match="samples of more than 64 tokens") as caught:
        engine._start(options)
    assert (caught.value.kind, told) == ("rope-scaling", {})
    assert fix in str(caught.value.hint)
    assert "--engine hf" in str(caught.value.hint)


def test_a_server_that_would_turn_short_samples_by_the_factors_of_long_ones_is_refused(
    long_rope: EngineTarget, double: VllmDouble, options: EngineOptions
) -> None:
    for longest, fix in ((40, "--max-model-len 64"), (64, "--max-tokens 63")):
        with pytest.raises(ConfigError, match="max_model_len of 256") as caught:
            VllmServer(long_rope, replace(options, longest=longest))
        assert caught.value.kind == "rope-scaling"
        assert fix in str(caught.value.hint)
    assert server_command(long_rope, LayerIds.of(AUX, LAYERS)).endswith(" --max-model-len 64")
    double.room = 64
    VllmServer(long_rope, replace(options, longest=63)).close()


@pytest.mark.parametrize("name", FIXED_ARGUMENTS)
def test_what_vllm_is_told_by_collect_itself_is_no_setting(name: str, target: EngineTarget) -> None:
    with pytest.raises(ConfigError, match=f"--engine-arg {name} is set by collect itself") as caught:
        open_engine("vllm", target, EngineOptions(AUX, 64, extra={name: 2}))
    assert caught.value.kind == "engine-arg"


def test_states_that_never_come_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectors.engines.vllm.LATE_S", -1.0)
    (wanted,) = requests((5,))
    memory = UnitMemory.create([wanted], layers=2, columns=3, width=8)
    monkeypatch.setattr(_Flow, "_send", lambda flow, index, _request: flow._running.update({"a": index}))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=SimpleNamespace(VLLM_ENABLE_V1_MULTIPROCESSING=0)))
    place = {PLACE: str(memory.place(0))}
    answer = SimpleNamespace(
        request_id="a", finished=True, kv_transfer_params=place, outputs=[SimpleNamespace(token_ids=[7])]
    )
    steps = iter([[answer], []])
    flow = _Flow(SimpleNamespace(step=lambda: next(steps)), memory)
    flow.send([wanted])
    flow.step()
    with pytest.raises(CaptureError, match="request 0, but its states are not there after") as caught:
        flow.step()
    assert caught.value.kind == "states-late"


def test_a_sample_that_vllm_refuses_ends_the_requests_before_it(
    target: EngineTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def add(name: str, prompt: dict[str, list[int]], _sampling: object) -> None:
        if len(prompt["prompt_token_ids"]) > 8:
            raise ValueError("too long")

    vllm = SimpleNamespace(envs=SimpleNamespace(VLLM_ENABLE_V1_MULTIPROCESSING=0), SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    engine = object.__new__(VllmProcess)
    engine.target, engine._layer_ids = target, LayerIds.of(AUX, LAYERS)
    engine._llm = SimpleNamespace(llm_engine=SimpleNamespace(add_request=add, abort_request=ended.extend))
    with pytest.raises(CaptureError, match="vLLM refuses a sample of 9 tokens: too long"):
        engine.capture(requests((5, 9)))
    assert [name.rpartition("-")[2] for name in ended] == ["0"]


@pytest.mark.parametrize(("during", "under_way"), [("step", 2), ("add_request", 0)])
def test_a_vllm_that_dies_is_named_with_what_it_said(
    during: str, under_way: int, target: EngineTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("layer -1 is out of range\nsecond line")

    vllm = SimpleNamespace(envs=SimpleNamespace(VLLM_ENABLE_V1_MULTIPROCESSING=0), SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    engine = object.__new__(VllmProcess)
    engine.target, engine._layer_ids = target, LayerIds.of(AUX, LAYERS)
    works = {"add_request": lambda *_: None, "step": list}
    engine._llm = SimpleNamespace(llm_engine=SimpleNamespace(**(works | {during: fail}), abort_request=fail))
    said = rf"{under_way} requests of a unit under way: IndexError: layer -1 is out of range$"
    with pytest.raises(CaptureError, match=said) as caught:
        engine.capture(requests((5, 9)))
    assert caught.value.kind == "engine-request"


def test_versions_are_compared_by_their_numbers() -> None:
    assert major_minor("0.9.2") < major_minor("0.22.0rc1") < major_minor("0.32.0+cpu") < major_minor("1.0")


def test_scratch_that_a_vllm_of_this_process_would_not_use_is_refused(target: EngineTarget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no --scratch") as caught:
        open_engine("vllm", target, EngineOptions(AUX, 64, scratch=tmp_path))
    assert caught.value.kind == "engine-arg"


def test_without_vllm_the_package_is_named(target: EngineTarget) -> None:
    with pytest.raises(ConfigError, match="vLLM is not installed here") as caught:
        open_engine("vllm", target, EngineOptions(AUX, 64))
    assert "pip install vllm" in str(caught.value.hint)


def test_a_signal_that_ended_vllm_as_well_is_an_interrupt_and_no_fault_of_the_engine(
    target: EngineTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        def __init__(self, *_: object) -> None:
            pass

        def send(self, _requests: object) -> None:
            raise CaptureError("vLLM failed with 1 requests of a unit under way", kind=Kind.ENGINE_REQUEST)

        def abandon(self) -> None:
            pass

    monkeypatch.setattr("collectors.engines.vllm._Flow", Ended)
    engine = object.__new__(VllmProcess)
    engine.target, engine._layer_ids = target, LayerIds.of(AUX, LAYERS)
    engine._llm = SimpleNamespace(llm_engine=None)
    with pytest.raises(InterruptError):
        engine.capture(requests((5,)), lambda: True)
    with pytest.raises(CaptureError, match="vLLM failed"):
        engine.capture(requests((5,)), lambda: False)
