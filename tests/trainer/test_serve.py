"""What ``hiddenstore serve`` would run in each engine and form: commands, files and programs for real exports."""

import ast
import json
import shlex
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from hiddenstore.errors import ConfigError
from tests.trainer.serve_cases import asked, planned, published, the_file, write_exports
from trainer.serve import ENGINES
from trainer.serve.launch import script, shell_lines, smoke_test
from trainer.serve.vllm import speculative_config


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_exports(tmp_path_factory.mktemp("exports"))


@pytest.mark.parametrize(
    ("drafter", "method", "draft_len"),
    [
        ("eagle1", "eagle", 5),
        ("eagle3", "eagle3", 5),
        ("eagle3.1", "eagle3", 5),
        ("dflash", "dflash", 3),
        ("dflash2", "dflash", 3),
        ("medusa", "medusa", 3),
    ],
)
def test_vllm_serves_each_export_with_its_own_method_and_length(
    exports: dict[str, str], drafter: str, method: str, draft_len: int
) -> None:
    folder = exports[f"{drafter} for vllm"]
    command = planned("vllm", drafter=folder).command
    assert command[:4] == ("vllm", "serve", "maker/target", "--speculative-config")
    assert json.loads(command[4]) == {"method": method, "model": folder, "num_speculative_tokens": draft_len}


def test_a_p_eagle_is_served_as_an_eagle_3_that_drafts_in_parallel(exports: dict[str, str]) -> None:
    folder = exports["peagle for vllm"]
    assert json.loads(planned("vllm", drafter=folder).command[4]) == {
        "method": "eagle3",
        "model": folder,
        "num_speculative_tokens": 5,
        "parallel_drafting": True,
    }


def test_vllm_methods_without_training_have_their_published_settings() -> None:
    assert speculative_config("ngram", draft_len=4) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
    assert speculative_config("draft-target", "small", 2) == {
        "method": "draft_model",
        "model": "small",
        "num_speculative_tokens": 2,
    }
    assert speculative_config("suffix", draft_len=24) == {"method": "suffix", "num_speculative_tokens": 24}
    assert speculative_config("mtp", draft_len=1) == {"method": "mtp", "num_speculative_tokens": 1}
    assert speculative_config("none") == {}
    assert planned("vllm", method="none", flags=("--tensor-parallel-size", "2")).command == (
        *("vllm", "serve", "maker/target"),
        *("--tensor-parallel-size", "2"),
    )


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ({"drafter": "eagle3 for sglang"}, "EAGLE3 draft-model-path num-steps=5 eagle-topk=1 num-draft-tokens=6"),
        (
            {"drafter": "eagle1 for sglang", "draft_len": 2},
            "EAGLE draft-model-path num-steps=2 eagle-topk=1 num-draft-tokens=3",
        ),
        ({"drafter": "dflash for sglang"}, "DFLASH draft-model-path dflash-block-size=4"),
        ({"drafter": "dspark for sglang"}, "DSPARK draft-model-path dspark-block-size=4"),
        ({"drafter": "dspark for sglang", "draft_len": 2}, "DSPARK draft-model-path dspark-block-size=2"),
        ({"method": "ngram", "draft_len": 7}, "NGRAM num-draft-tokens=8"),
        ({"method": "mtp"}, "NEXTN num-steps=3 eagle-topk=1 num-draft-tokens=4"),
    ],
)
def test_sglang_flags_say_algorithm_and_lengths(exports: dict[str, str], words: dict[str, Any], flags: str) -> None:
    folder = exports.get(words.get("drafter", ""))
    command = list(planned("sglang", **{**words, **({"drafter": folder} if folder else {})}).command)
    assert command[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "maker/target"]
    algorithm, *rest = flags.split()
    expected = ["--speculative-algorithm", algorithm]
    for word in rest:
        name, _, value = word.partition("=")
        expected += [f"--speculative-{name}", value or str(folder)]
    assert command[5:] == expected


def test_sglang_takes_a_small_model_and_a_tree_whose_size_is_said() -> None:
    small = {"drafter": "maker/small", "method": "draft-target"}
    assert "STANDALONE" in planned("sglang", **small).command
    with pytest.raises(ConfigError, match="drafts a tree"):
        planned("sglang", **small, settings=("eagle-topk=4",))
    command = planned("sglang", **small, settings=("eagle_topk=4", "num-draft-tokens=16")).command
    assert command[-4:] == ("--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "16")


@pytest.mark.parametrize(
    ("flags", "is_said"), [((), True), (("--max-model-len", "8192"), True), (("--max-model-len=4096",), False)]
)
def test_vllm_says_that_it_turns_every_text_by_the_long_factors_of_longrope(
    flags: tuple[str, ...], is_said: bool, tmp_path: Path
) -> None:
    """``phi3_long_rope_scaled_rope.py`` of 0.32 chooses by ``max_model_len`` and not by a text's length."""
    for number, form in enumerate(("rope_parameters", "rope_scaling")):
        rope = {form: {"rope_type": "longrope"}, "original_max_position_embeddings": 4096}
        local = published(tmp_path / str(number), **rope)
        notes = planned("vllm", drafter="maker/drafter", method="eagle3", target=local, flags=flags).notes
        assert ["--max-model-len 4096" in note for note in notes] == [True] * is_said


@pytest.mark.parametrize(
    ("target", "blind"),
    [("LlamaForCausalLM", []), ("Qwen2ForCausalLM", ["DFLASH"]), ("GraniteForCausalLM", ["EAGLE3", "DFLASH"])],
)
def test_a_target_whose_class_in_sglang_hands_out_no_layers_is_named(
    target: str, blind: list[str], tmp_path: Path
) -> None:
    """``attention_backend_setup.py`` of 0.5.23 raises ValueError of a class without the method that it calls."""
    local = published(tmp_path / "target", architectures=[target])
    for method, algorithm in (("eagle3", "EAGLE3"), ("dflash", "DFLASH"), ("eagle1", "EAGLE")):
        notes = planned("sglang", drafter="maker/drafter", method=method, target=local).notes
        assert [target in note and algorithm in note for note in notes] == [True] * (algorithm in blind)


def test_settings_of_sglang_that_are_on_or_off_are_flags_without_a_value() -> None:
    """``store_true`` in 0.5.23's ``arg_utils.py``: a value behind one ends its parser."""
    small = {"drafter": "maker/small", "method": "draft-target"}
    words = ("use-rejection-sampling=true", "adaptive=false", "draft-sink-size=0", "draft-kv-cache-dtype=fp8_e4m3")
    command = planned("sglang", **small, settings=words).command
    assert command[-5:] == (
        *("--speculative-draft-kv-cache-dtype", "fp8_e4m3"),
        *("--speculative-draft-sink-size", "0", "--speculative-use-rejection-sampling"),
    )
    for value, flag in (("true", "--speculative-enable"), ("false", "--no-speculative-enable")):
        command = planned("sglang", **small, settings=(f"enable-w4a4-mxfp4-megamoe={value}",)).command
        assert [word for word in command if "megamoe" in word] == [f"{flag}-w4a4-mxfp4-megamoe"]


def test_sglang_looks_n_grams_up_on_any_device_without_a_word() -> None:
    """``_handle_ngram`` of 0.5.23's ``speculative_hook.py``: CUDA, CPU or XPU."""
    assert planned("sglang", method="ngram").notes == ()


def test_vllm_gets_the_later_settings_of_its_speculation() -> None:
    words = (
        *("num_speculative_tokens_per_batch_size=[[1, 8, 5], [9, 64, 1]]", "use_local_argmax_reduction=true"),
        *("rejection_sample_method=synthetic", "synthetic_acceptance_rates=0.8,0.5,0.1"),
    )
    config = json.loads(planned("vllm", method="ngram", settings=words).command[4])
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 8, 5], [9, 64, 1]]
    assert config["use_local_argmax_reduction"] is True
    assert config["synthetic_acceptance_rates"] == [0.8, 0.5, 0.1]


@pytest.mark.parametrize(
    ("engine", "word", "said"),
    [
        ("vllm", "prompt_lokup_max=5", "did you mean prompt_lookup_max?"),
        ("vllm", "prompt_lookup_max=0", "should be greater than 0"),
        ("sglang", "ngram-capcity=5", "did you mean ngram_capacity?"),
        ("sglang", "ngram-match-type=DFS", "should be 'BFS' or 'PROB', found 'DFS'"),
        ("trtllm", "num_nextn_predict_layers=2", "must match max_draft_len, 3: found 2"),
        ("trtllm", "speculative_config.max_draft_len=", "NGram needs how many tokens to draft"),
        ("trtllm", "is_public_pool", "should be key=value"),
        ("trtllm", "profile=fast", "there is latency, throughput"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_was_meant(engine: str, word: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        planned(engine, method="ngram", settings=(word,))
    assert said in raised.value.message


def test_the_python_forms_are_programs_with_the_same_settings(exports: dict[str, str]) -> None:
    folder = exports["eagle3 for trtllm"]
    calls = calls_of(planned("trtllm", drafter=folder, form="python").program)
    layers = {"eagle3_layers_to_capture": [1, 3, 4]}
    assert calls["Eagle3DecodingConfig"] == {"max_draft_len": 5, "speculative_model": folder, **layers}
    assert calls["KvCacheConfig"] == {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.9}
    assert calls["LLM"]["disable_overlap_scheduler"] is False
    assert calls_of(planned("trtllm", drafter=folder, form="python", version="1.1").program)["EagleDecodingConfig"] == {
        "max_draft_len": 5,
        "speculative_model_dir": folder,
        **layers,
    }
    calls = calls_of(planned("vllm", drafter=exports["dflash for vllm"], form="python").program)
    assert calls["LLM"]["model"] == "maker/target"
    assert calls["LLM"]["speculative_config"]["method"] == "dflash"


def calls_of(program: str) -> dict[str, dict[str, Any]]:
    """The keyword arguments that are plain values, by the name called."""
    found = {}
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            words = {}
            for keyword in node.keywords:
                try:
                    words[str(keyword.arg)] = ast.literal_eval(keyword.value)
                except ValueError:
                    continue
            found[node.func.id] = words
    return found


def test_a_user_s_own_drafter_class_is_pointed_at_in_python_only() -> None:
    own = {"drafter": "my.drafters:Mine", "method": "user-provided"}
    program = planned("trtllm", **own, form="python").program
    assert "from my.drafters import Mine" in program
    assert "UserProvidedDecodingConfig(max_draft_len=3, drafter=Mine())" in program
    ast.parse(program)
    words = ("resource_manager=my.pools:Pool", "speculative_config.max_concurrency=4")
    more = planned("trtllm", **own, form="python", settings=words).program
    assert "from my.pools import Pool" in more
    assert "resource_manager=Pool()" in more
    assert "max_concurrency=4" in more
    more = planned("trtllm", **own, form="python", settings=("enable_attention_dp=true", "profile=latency")).program
    assert "enable_attention_dp=True" in more
    assert "KvCacheConfig(" in more
    ast.parse(more)
    with pytest.raises(ConfigError, match="should be module:Class of a tensorrt_llm ResourceManager"):
        planned("trtllm", **own, form="python", settings=("resource_manager=pool",))
    with pytest.raises(ConfigError, match="no YAML file can hold") as raised:
        planned("trtllm", **own)
    assert (raised.value.kind, raised.value.hint) == ("serve-unsupported", "--form python")
    with pytest.raises(ConfigError, match="wants module:Class"):
        planned("trtllm", drafter="mine", method="user-provided", form="python")


def test_a_container_mounts_what_is_local_and_sees_only_its_own_paths(
    exports: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NGC_REGISTRY", "registry.example")
    plan = planned(
        "trtllm", drafter=exports["eagle3 for trtllm"], target=exports["target"], form="container", config_file="x.yaml"
    )
    command = list(plan.command)
    at = command.index("registry.example/nvidia/tensorrt-llm/release:1.3.0rc12")
    assert command[:2] == ["docker", "run"]
    assert command[at + 1 : at + 3] == ["trtllm-serve", "/models/target"]
    assert command[command.index("--config") + 1] == "/config/x.yaml"
    mounts = [command[i + 1] for i, word in enumerate(command) if word == "-v"][1:]
    assert mounts == [
        f"{exports['target']}:/models/target:ro",
        f"{exports['eagle3 for trtllm']}:/models/drafter:ro",
        f"{Path('x.yaml').absolute()}:/config/x.yaml:ro",
    ]
    assert list(plan.files) == ["x.yaml"]
    assert the_file(plan)["speculative_config"]["speculative_model"] == "/models/drafter"
    vllm = list(planned("vllm", method="ngram", form="container", flags=("--port", "9000")).command)
    image = vllm.index("vllm/vllm-openai:v0.32.0")
    assert vllm[image - 2 : image + 3] == ["--entrypoint", "vllm", "vllm/vllm-openai:v0.32.0", "serve", "maker/target"]
    assert "9000:9000" in vllm


def test_the_bench_form_measures_with_the_same_file() -> None:
    serve, bench = (planned("trtllm", method="mtp", form=form) for form in ("command", "bench"))
    assert serve.files == bench.files
    assert bench.command[:4] == ("trtllm-bench", "--model", "maker/target", "throughput")
    assert bench.command[-2:] == ("--config", "extra-llm-api-config.yml")
    with pytest.raises(ConfigError, match="has no form 'bench'"):
        planned("sglang", method="mtp", form="bench")


def test_every_engine_of_the_table_can_be_served_without_speculation() -> None:
    for name in ENGINES:
        assert ENGINES[name].name == name
        assert planned(name, method="none").command
    with pytest.raises(ConfigError, match="unknown engine 'ollama'"):
        ENGINES["ollama"]


def test_the_smoke_test_calls_the_port_and_name_that_flags_chose() -> None:
    plan = planned("sglang", method="mtp", flags=("--port", "31000", "--served-model-name=it's"))
    words = shlex.split("\n".join(shell_lines(smoke_test(plan))))
    assert words[1] == "http://localhost:31000/v1/completions"
    assert json.loads(words[-1])["model"] == "it's"
    assert planned("sglang", method="mtp").port == 30000


@pytest.mark.parametrize("engine", ["sglang", "trtllm", "vllm"])
def test_the_smoke_test_that_is_printed_reaches_the_server(engine: str) -> None:
    bodies: list[dict[str, Any]] = []

    class Completions(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))) | {"path": self.path})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"choices": [{"text": " Paris"}]}')

        def log_message(self, *_words: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Completions) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        resolved, plan = asked(engine, method="ngram", flags=("--port", str(server.server_port)))
        printed = script(resolved.request, plan).partition("# once it is up, from another terminal:\n")[2]
        command = "\n".join(line.removeprefix("# ") for line in printed.splitlines())
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        server.shutdown()
    assert json.loads(done.stdout)["choices"][0]["text"] == " Paris"
    (body,) = bodies
    assert (body["path"], body["model"]) == ("/v1/completions", "maker/target")


@pytest.mark.parametrize("engine", ["sglang", "trtllm", "vllm"])
def test_a_quantised_target_and_drafter_are_served_as_they_are_named(engine: str, tmp_path: Path) -> None:
    folder = published(tmp_path / "fp8", quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    for target in (folder, "nvidia/Llama-3.3-70B-Instruct-FP4"):
        small = "nvidia/Llama-3.1-8B-Instruct-FP4"
        resolved, plan = asked(engine, target=target, drafter=small, method="draft-target")
        assert resolved.warnings == []
        assert target in plan.command
        assert small in " ".join([*plan.command, *plan.files.values()])


def test_flags_of_the_engine_come_last_and_as_they_were_written() -> None:
    flags = ("--dtype", "bfloat16", "--tp-size", "2")
    assert planned("sglang", method="mtp", flags=flags).command[-4:] == flags


@pytest.mark.parametrize("engine", ["sglang", "trtllm", "vllm"])
def test_a_container_gets_the_token_of_the_hub_by_name_and_nothing_shows_it(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    resolved, plan = asked(engine, method="ngram", form="container")
    assert plan.command[plan.command.index("HF_TOKEN") - 1] == "-e"
    assert "hf_canary" not in script(resolved.request, plan)
