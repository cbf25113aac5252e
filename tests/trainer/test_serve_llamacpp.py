"""``hiddenstore serve --engine llamacpp``: llama-server's command for a GGUF file, a folder with one, and without."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hiddenstore.cli import main
from hiddenstore.errors import ConfigError, FormatError, HiddenstoreError, Kind
from hiddenstore.testing.builders import make_store
from tests.trainer.export_cases import case
from tests.trainer.gguf_target import rewritten, write_target
from tests.trainer.serve_cases import planned
from trainer.export.write import export
from trainer.formats.gguf import ABOUT
from trainer.train.loop import train


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("files")
    found = {"target": write_target(root / "target.gguf"), "other": write_target(root / "other.gguf", layers=9)}
    for name, out in (("eagle3", root / "eagle3.gguf"), ("dflash", root / "dflash")):
        export(replace(case(name), target_name=found["target"], draft_len=5), "llamacpp", out)
        found[name] = str(out)
    found["qwen"] = write_target(root / "qwen.gguf", architecture="qwen35")
    found["mtp"] = str(root / "mtp.gguf")
    export(replace(case("mtp of Qwen3.5"), target_name=found["qwen"]), "llamacpp", Path(found["mtp"]))
    return found


def command(files: dict[str, str], **words: Any) -> str:
    line = " ".join(planned("llamacpp", **{"target": files["target"], **words}).command)
    return line.replace(str(Path(files["target"]).parent), "IN")


def test_each_drafter_is_served_by_its_own_type_and_length(files: dict[str, str]) -> None:
    start = "llama-server -m IN/target.gguf"
    assert command(files, drafter=files["eagle3"]) == (
        f"{start} -md IN/eagle3.gguf --spec-type draft-eagle3 --spec-draft-n-max 5 --metrics"
    )
    assert command(files, drafter=files["dflash"], flags=("-ngl", "99")) == (
        f"{start} -md IN/dflash/drafter.gguf --spec-type draft-dflash --spec-draft-n-max 3 --metrics -ngl 99"
    )
    assert command(files, drafter=files["mtp"], target=files["qwen"]) == (
        "llama-server -m IN/qwen.gguf -md IN/mtp.gguf --spec-type draft-mtp --spec-draft-n-max 3 --metrics"
    )
    assert command(files, method="none") == f"{start} --metrics"
    assert command(files, method="draft-target", drafter=files["other"]) == (
        f"{start} -md IN/other.gguf --spec-type draft-simple --spec-draft-n-max 3 --metrics"
    )
    assert command(files, method="mtp", target="maker/model:Q8_0", draft_len=2) == (
        "llama-server -hf maker/model:Q8_0 --spec-type draft-mtp --spec-draft-n-max 2 --metrics"
    )


def test_settings_are_llama_cpp_s_own_and_a_wrong_one_is_refused(files: dict[str, str]) -> None:
    found = command(files, method="ngram", draft_len=4, settings=("ngram-simple-min-hits=2",))
    assert found.endswith(
        "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 4 "
        "--spec-ngram-simple-min-hits 2 --metrics"
    )
    with pytest.raises(ConfigError, match="draft_p_mix") as said:
        command(files, method="ngram", settings=("draft-p-mix=0.5",))
    assert said.value.kind is Kind.SERVE_SETTING


def test_the_plan_calls_the_port_and_name_that_flags_chose(files: dict[str, str]) -> None:
    plan = planned("llamacpp", target=files["target"], method="none", flags=("--port", "9001", "-a", "mine"))
    assert (plan.port, plan.served_as) == (9001, "mine")
    assert planned("llamacpp", target=files["target"], method="none").served_as == "target.gguf"


def test_another_target_another_engine_s_drafter_and_what_is_no_gguf_are_refused(
    files: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    export(case("eagle3"), "vllm", tmp_path / "vllm")
    for words, kind, text in (
        ({"drafter": files["eagle3"], "target": files["other"]}, Kind.TARGET_MISMATCH, "8 expected, 9 found"),
        ({"drafter": str(tmp_path / "vllm")}, Kind.SERVE_ENGINE, "exported for vllm"),
        ({"method": "none", "target": str(tmp_path / "folder")}, Kind.SERVE_SETTING, "reads GGUF files"),
        ({"drafter": files["dflash"], "draft_len": 4}, Kind.SERVE_SETTING, "at most 3 tokens"),
        ({"drafter": files["target"]}, Kind.DRAFTER_UNFIT, "is llama; drafters are"),
    ):
        with pytest.raises(HiddenstoreError, match=text) as said:
            command(files, **words)
        assert said.value.kind is kind
    with pytest.raises(FormatError, match="exported for llamacpp"):
        planned("vllm", drafter=files["eagle3"])


def test_a_published_file_is_told_by_its_fields_and_its_target_by_width_and_vocabulary(
    files: dict[str, str], tmp_path: Path
) -> None:
    published = str(rewritten(Path(files["eagle3"]), tmp_path / "theirs.gguf", {}, without=ABOUT))
    assert "--spec-type draft-eagle3 --spec-draft-n-max 3" in command(files, drafter=published)
    wide = write_target(tmp_path / "wide.gguf", width=64)
    with pytest.raises(FormatError, match="hidden_size: 32 expected, 64 found"):
        command(files, drafter=published, target=wide)


def test_a_run_is_exported_with_the_target_it_is_served_with(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=6, layers=(1, 3, 5))
    target = store.capture.target
    small = ["data.batch_tokens=160", "data.pack_tokens=80", "train.max_steps=1", "train.validate_every=0"]
    run = str(tmp_path / "run")
    train(store.path, run, words=[*small, "loss.steps=2"])
    file = write_target(tmp_path / "t.gguf", target.num_layers, target.hidden_size, target.vocab_size)
    words = ["serve", run, "--engine", "llamacpp", "--target", file, "--json"]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["command"][:4] == ["llama-server", "-m", file, "-md"]
    drafter = Path(said["command"][4])
    assert drafter.relative_to(Path(run) / "exports").name == "drafter.gguf"
    assert drafter.is_file()
