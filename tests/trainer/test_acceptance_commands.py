"""`train`, `eval`, `decode`, `export` and `export-data` as a user types them, on a store of a tiny live target."""

import json
import random
import shlex
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny_target import save_target

from hiddenstore.cli import main
from hiddenstore.console.progress import Progress
from hiddenstore.files import layout
from hiddenstore.records import Record, Sample, final_row_positions, sample_id
from hiddenstore.store import Store
from hiddenstore.targets.folder import open_target
from hiddenstore.testing.builders import ENGINE, make_store, memory_input
from hiddenstore.verify.profile import PROFILE_PATH, make_profile, write_profile
from hiddenstore.writer import create_store, register_input, write_unit
from schemas.capture import CaptureSpec, Codecs, HeadSpec, TargetIdentity
from trainer.cli.evaluate import _show_simulated, positions_text
from trainer.evaluate.cost import keep
from trainer.evaluate.speculate import plain
from trainer.evaluate.target import LiveTarget, bundle_of, identity_of

LAYERS = (0, 1, 2)
NEW_TOKENS = 32


def live_target(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    identity = identity_of(open_target(folder), model)
    return LiveTarget(model, tokenizer, identity, LAYERS)


def record_of(target, final, prompt, answer, split):
    ids = np.array([*prompt, *answer], dtype=np.int32)
    mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
    spans = np.array([[1, 0, len(prompt)], [2, len(prompt), len(ids)]], dtype=np.int32)
    final.clear()
    aux = target.forward(ids.tolist(), target.new_cache()).aux
    rows = final_row_positions(mask, "supervised")
    sample = Sample(sample_id(ids, mask), ids, mask, spans, split, "made")
    return Record(sample, aux, final[0][torch.from_numpy(rows).long()].bfloat16(), rows)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target, a store of its greedy answers and a short run."""
    place = tmp_path_factory.mktemp("made")
    target = live_target(save_target(place / "target"))
    final = []
    target.model.model.norm.register_forward_pre_hook(lambda _m, args: final.append(args[0][0]))
    records = []
    for number in range(24):
        dice = random.Random(number)
        prompt = [dice.randrange(5, 99) for _ in range(8)]
        answer = plain(target, prompt, NEW_TOKENS).tokens
        records.append(record_of(target, final, prompt, answer, "validation" if number % 3 == 2 else "train"))
    capture = CaptureSpec(
        target=target.identity,
        aux_layers=LAYERS,
        final="supervised",
        final_norm="pre_norm",
        codecs=Codecs(aux="bf16", final="bf16"),
    )
    spec = HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False)
    files = {
        layout.HEAD_NAME: bundle_of(target.model, spec).save_bytes(),
        "config.json": (place / "target" / "config.json").read_bytes(),
    }
    store = create_store(place / "store", capture, spec, "raw", files)
    prepared = memory_input(3)
    digest = register_input(store, prepared)
    write_unit(store, layout.unit_name(prepared.info.digest, 0), digest, records, (), ENGINE)
    every_layer = LiveTarget(target.model, target.tokenizer, target.identity, range(-1, 4))
    ids = records[0].sample.input_ids
    write_profile(
        store.fs,
        make_profile(records[0].sample.id, ids, every_layer.forward(ids.tolist(), every_layer.new_cache()).aux),
    )
    words = ["train.max_steps=25", "train.validate_every=0", "loss.steps=3", "drafter.vocab_size=60"]
    run(["train", str(place / "store"), "-o", str(place / "run"), *words])
    return place


def run(words, code=0):
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def document(words, code=0):
    return json.loads(run([*words, "--json"], code).stdout)


def test_the_next_commands_of_a_drafter_of_two_tokens_draft_two(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["drafter.medusa_heads=2", "train.max_steps=2", "train.validate_every=2"]
    said = run(["train", str(made / "store"), "-o", "run", "--drafter", "medusa", *words])
    assert "on validation, chains of 2\n" in said.stdout
    for command, short in (("eval", ()), ("decode", ("-n", "1", "--max-new-tokens", "8"))):
        words = shlex.split(said.stderr.rpartition("next: hiddenstore ")[2].replace("TARGET", str(made / "target")))
        assert words[0] == command
        said = run([*words, *short])
        assert "drafts of 2, bonus token counted\n" in said.stdout
    assert "proposes at most 2 tokens" in run(["eval", "run", str(made / "store"), "--draft-len", "3"], 2).stderr


def test_eval_answers_with_every_promised_field(made):
    found = document(["eval", str(made / "run"), str(made / "store"), "--untrained"])
    assert found["schema"] == "hiddenstore.eval/1"
    assert found["samples"] == 8
    assert found["accepted_length"] == pytest.approx(found["tokens"] / found["drafts"])
    assert len(found["per_position"]) == found["draft_len"] == 3
    assert found["per_position"] == sorted(found["per_position"], reverse=True)
    assert found["slot_accepted_length"] >= 1.0
    assert found["ngram_accepted_length"] == max(found["ngram_per_order"])
    training = [entry.tokens for _, entry in Store.open(made / "store").entries if entry.split == "train"]
    assert found["ngram_training_tokens"] == sum(training)
    assert found["untrained_accepted_length"] >= 1.0


def test_c7_a_drafter_below_the_n_gram_floor_is_told_so_with_the_command_that_trains_on(made, tmp_path):
    lazy = str(tmp_path / "lazy")
    run(["train", str(made / "store"), "-o", lazy, "train.max_steps=1", "optim.lr=1e-9", "drafter.vocab_size=60"])
    for words in (["eval", lazy, str(made / "store")], decode_words(made, "-n", "3")):
        words[1] = lazy
        said = " ".join(run(words).stderr.split())
        assert "does not beat the n-gram floor" in said
        assert "--resume train.max_steps=100" in said
    assert "n-gram floor of" not in run([*words, "--temperature", "0.8"]).stderr


def test_draft_lengths_are_walked_in_ascending_order_however_they_are_given(made):
    found = document(["eval", str(made / "run"), str(made / "store"), "--draft-len", "3,5x4,1"])
    assert [(row["draft_len"], row["tree_width"]) for row in found["sweep"]] == [(1, 1), (3, 1), (5, 4)]
    examples = run(["eval", "--help"]).output
    assert "--draft-len 1,3,7,5x4" in examples
    run(["eval", str(made / "run"), str(made / "store"), "--draft-len", "1,3,7,5x4", "--json"])


@pytest.mark.parametrize(
    ("words", "reason"), [("3,3", "twice"), ("5x1000", "64 wide"), ("100000000", "256 levels"), ("0", "should be")]
)
def test_draft_lengths_that_mean_nothing_are_refused_before_anything_is_loaded(words, reason):
    assert reason in run(["eval", "nowhere", "nowhere", "--draft-len", words], 2).output


def test_the_positions_of_a_long_draft_that_were_never_accepted_are_counted():
    assert positions_text([0.5, 0.25]) == "0.500  0.250"
    assert positions_text([0.5, *[0.0] * 99]) == "0.500" + 7 * "  0.000" + "  0 at 92 more"
    assert positions_text([0.5] * 10) == "  ".join(["0.500"] * 10)


def decode_words(made, *more):
    words = ["decode", str(made / "run"), "--target", str(made / "target"), "--prompts", str(made / "store")]
    return [*words, "--max-new-tokens", str(NEW_TOKENS), *more]


def without_a_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_a_tensor_left_over(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.adapter.weight"] = torch.ones(4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def in_fp8_of_modelopt(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (folder / "config.json").write_text(json.dumps(config))


def never_fetched(folder):
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 9\n")


def test_a_folder_of_answers_that_is_not_there_is_said_before_anything_is_decoded(made, tmp_path):
    words = decode_words(made, "--answers", str(tmp_path / "none" / "answers.jsonl"))
    assert f"there is no folder {tmp_path / 'none'}" in run(words, 2).stderr


def test_drafts_that_would_be_drawn_at_temperature_0_are_refused_with_what_draws_them(made):
    said = run(decode_words(made, "--draft-sample-method", "probabilistic"), 2).stderr
    assert "at temperature 0 nothing is drawn" in said
    assert "--temperature 0.8" in said


def test_drafts_that_are_drawn_are_said_to_be(made):
    words = decode_words(made, "-n", "2", "--temperature", "0.8", "--draft-sample-method", "probabilistic")
    assert "sampled at temperature 0.8, drafts probabilistic" in run(words).stdout


@pytest.mark.parametrize(
    ("change", "kind", "words", "fix"),
    [
        (without_a_tensor, "target-incomplete", "lacks model.layers.2.mlp.down_proj.weight", "hf download"),
        (with_a_tensor_left_over, "target-incomplete", "reads its model.layers.0.mlp.adapter.weight", "hf download"),
        (in_fp8_of_modelopt, "quantisation-unsupported", "modelopt FP8", "hiddenstore serve"),
        (never_fetched, "target-damaged", "a Git LFS pointer", "git lfs pull"),
    ],
)
def test_decode_refuses_weights_that_are_not_the_checkpoint_s(made, tmp_path, change, kind, words, fix):
    """Findings A6, A7 and A13."""
    change(shutil.copytree(made / "target", tmp_path / "target"))
    error = json.loads(run(decode_words(made, "--target", str(tmp_path / "target"), "--json"), 2).stderr)
    assert error["kind"] == kind
    assert words in error["message"]
    assert fix in error["fix"]


@pytest.mark.parametrize("layer", [0, 3])
def test_a5_decode_refuses_a_target_that_differs_in_its_decoder_blocks_alone(made, tmp_path, layer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(made / "target")
    dice = torch.Generator().manual_seed(0)
    weight = model.model.layers[layer].mlp.down_proj.weight.data
    update = torch.randn(weight.shape[0], 4, generator=dice) @ torch.randn(4, weight.shape[1], generator=dice)
    weight += update * (0.5 * weight.norm() / update.norm())
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(made / "target").save_pretrained(tmp_path / "other")
    words = decode_words(made, "--json")
    words[words.index("--target") + 1] = str(tmp_path / "other")
    for more, difference in (([], "checkpoint_sha256"), (["--same-target"], f"states of layer {layer}")):
        error = json.loads(run([*words, *more], 4).stderr)
        assert error["kind"] == "target-mismatch"
        assert difference in error["message"]


def test_a5_an_export_that_names_another_target_is_refused(made, tmp_path):
    other = save_target(tmp_path / "other", layers=5)
    words = ["export", str(made / "run"), "--engine", "speculators", "-o", str(tmp_path / "out"), "--target"]
    error = json.loads(run([*words, other, "--json"], 4).stderr)
    assert error["kind"] == "target-mismatch"
    assert "num_layers: 4 expected, 5 found" in error["message"]
    assert document([*words, str(made / "target")])["verified"]


def test_a5_a_target_without_safetensors_is_compared_by_the_layer_profile_and_without_one_that_is_said(made, tmp_path):
    asked = run([*decode_words(made, "-n", "1", "--dtype", "bfloat16")]).stderr
    assert "layer profile" not in asked
    assert "the target runs in" not in asked
    torch_files = shutil.copytree(made / "target", tmp_path / "torch_files")
    torch.save(load_file(torch_files / "model.safetensors"), torch_files / "pytorch_model.bin")
    (torch_files / "model.safetensors").unlink()
    words = decode_words(made, "-n", "1", "--target", str(torch_files))
    assert "without checkpoint_sha256" in (warned := run(words).stderr)
    assert "head and the layer profile" in " ".join(warned.split())
    (made / "store" / PROFILE_PATH).rename(tmp_path / "profile.json")
    try:
        assert "other blocks go unseen" in " ".join(run(words).stderr.split())
    finally:
        (tmp_path / "profile.json").rename(made / "store" / PROFILE_PATH)


def test_decode_of_a_store_s_prompts_gives_the_figures_of_eval_on_the_same_text(made):
    simulated = document(["eval", str(made / "run"), str(made / "store")])
    found = document(decode_words(made, "--untrained"))
    assert found["schema"] == "hiddenstore.decode/1"
    assert found["identical_to_greedy"] is True
    assert found["differences"] == []
    assert found["target_forwards"] == found["drafts"] + found["prefills"]
    assert found["prompts"] == found["prefills"] == 8
    assert (found["drafts"], found["tokens"]) == (simulated["drafts"], simulated["tokens"])
    assert found["per_position"] == simulated["per_position"]
    assert found["simulated_accepted_length"] == found["accepted_length"]
    assert found["ngram_accepted_length"] == simulated["ngram_accepted_length"]
    assert found["tokens_per_s"] > 0
    assert found["baseline_tokens_per_s"] > 0
    assert found["break_even_length"] > 0
    assert found["untrained_accepted_length"] >= 1.0


def test_decode_reads_messages_and_writes_conversations_back(made, tmp_path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cut off"}]},
        {"conversations": [{"from": "human", "value": "hello"}], "enable_thinking": False},
        {"prompt": "plain"},
    ]
    prompts.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    words = ["decode", str(made / "run"), "--target", str(made / "target"), "--prompts", str(prompts)]
    found = document([*words, "-n", "2", "--max-new-tokens", "12", "--answers", str(answers)])
    assert found["prompts"] == 2
    written = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["messages"][0]["content"] for row in written] == ["abc", "hello"]
    assert [row["messages"][-1]["role"] for row in written] == ["assistant", "assistant"]
    assert [len(row["messages"]) for row in written] == [2, 2]
    assert [row.get("chat_template_kwargs") for row in written] == [None, {"enable_thinking": False}]
    assert all(len(row["answer_ids"]) <= 12 for row in written)
    cut = [row for row in written if row["messages"][-1].get("finish_reason") == "length"]
    assert {len(row["answer_ids"]) for row in cut} == {12}, "prepare does not teach the end of what was cut"


def test_people_see_the_same_figures_and_the_next_command(made, tmp_path):
    shown = run(["eval", str(made / "run"), str(made / "store")])
    assert "accepted length" in shown.stdout
    assert "n-gram floor" in shown.stdout
    assert "hiddenstore decode" in shown.stderr
    one = run(decode_words(made, "-n", "1", "--device", "cpu"))
    assert "+ 1 prefill, for " in one.stdout
    shown = run(decode_words(made, "-n", "3", "--device", "cpu"))
    assert "3 of 3 answers" in shown.stdout
    assert "drafts + 3 prefills" in shown.stdout
    assert "the target runs in float32: the checkpoint is float32" in shown.stderr
    assert "hiddenstore export" in shown.stderr


def test_decode_refuses_another_target_and_eval_another_store(made, tmp_path):
    other = save_target(tmp_path / "other", seed=5)
    words = ["decode", str(made / "run"), "--target", other, "--prompts", str(made / "store"), "--json"]
    error = json.loads(run(words, 4).stderr.strip().splitlines()[-1])
    assert error["kind"] == "target-mismatch"
    assert "weights_sha256" in error["message"]


def test_decode_counts_and_names_the_bad_lines_of_a_prompt_file(made, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"nothing": 1}\n{"prompt": "ab"}\n{"prompt": "cd"}\n')
    words = ["decode", str(made / "run"), "--target", str(made / "target"), "--prompts", str(prompts), "-n", "1"]
    shown = run([*words, "--json"])
    assert json.loads(shown.stdout)["prompts_unusable"] == 1
    assert "prompts.jsonl:1: expected one of" in " ".join(shown.stderr.split())


def test_fewer_prompts_than_usual_are_all_there_is_and_only_a_count_that_was_given_is_missed(
    made, tmp_path, monkeypatch
):
    prompts, totals = tmp_path / "prompts.jsonl", []

    class Recorded(Progress):
        def __init__(self, label, total, unit):
            totals.append(total)
            super().__init__(label, total, unit)

    monkeypatch.setattr("trainer.cli.decode.Progress", Recorded)
    prompts.write_text('{"prompt": "ab"}\n{"prompt": "cd"}\n')
    words = ["decode", str(made / "run"), "--target", str(made / "target"), "--prompts", str(prompts)]
    words += ["--max-new-tokens", str(NEW_TOKENS)]
    assert "were asked for" not in run(words).stderr
    assert "only 2 prompts to decode, 3 were asked for" in " ".join(run([*words, "-n", "3"]).stderr.split())
    run([*words, "-n", "1"])
    assert totals == [2, 2, 1]


def test_a_run_whose_training_store_is_gone_still_decodes_and_says_that_it_has_no_floor(made):
    store, moved = made / "store", made / "moved"
    store.rename(moved)
    try:
        words = ["decode", str(made / "run"), "--target", str(made / "target"), "--prompts", str(moved), "-n", "2"]
        result = run([*words, "--max-new-tokens", str(NEW_TOKENS), "--json"])
        assert json.loads(result.stdout)["ngram_accepted_length"] is None
        assert "no n-gram floor" in result.stderr
        assert document(["eval", str(made / "run"), str(moved)])["ngram_accepted_length"] >= 1.0
    finally:
        moved.rename(store)


def test_export_writes_a_folder_and_prints_how_to_serve_it(made, tmp_path):
    found = document(["export", str(made / "run"), "--engine", "vllm", "-o", str(tmp_path / "drafter")])
    assert found["schema"] == "hiddenstore.export/1"
    assert found["layer_ids"] == [1, 2, 3]
    assert found["tensors"]["d2t"] == {"dtype": "int64", "shape": [60]}
    assert found["serve"][:2] == ["hiddenstore", "serve"]
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["draft_vocab_size"] == 60
    error = json.loads(
        run(["export", str(made / "run"), "--engine", "sglang9", "-o", "x", "--json"], 2)
        .stderr.strip()
        .splitlines()[-1]
    )
    assert "vllm" in error["message"]


def test_eval_says_which_draft_length_pays_on_this_machine_and_export_takes_it(made, tmp_path, capsys):
    def drafts_of(name, *more):
        return document(["export", str(made / "run"), "--engine", "vllm", "-o", str(tmp_path / name), *more])[
            "draft_len"
        ]

    assert (drafts_of("usual"), drafts_of("told", "--draft-len", "2")) == (3, 2)
    words = ["eval", str(made / "run"), str(made / "store"), "--draft-len", "1,2,4,2x2", "--costs"]
    assert "--target" in run(words, 2).stderr
    words += ["--target", str(made / "target")]
    unpinned = [*words[:-1], "maker/target", "--trust-remote-code", "--json"]
    assert json.loads(run(unpinned, 2).stderr)["kind"] == "code-unpinned"
    # An earlier choice, which goes where none pays.
    keep(made / "run", 25, {"best_draft_len": 7, "speedup": 1.5}, "float32")
    said, chosen = run([*words, "--json"]), made / "run" / "draft-length.json"
    found = json.loads(said.stdout)
    try:
        chains = [row for row in found["sweep"] if row["tree_width"] == 1]
        assert [row["draft_len"] for row in chains] == [1, 2, 4]
        for row in chains:
            assert row["speedup"] == pytest.approx(row["accepted_length"] * found["token_s"] / row["draft_s"])
        _show_simulated(found)
        shown = " ".join(capsys.readouterr().out.split())
        assert f"drafts of {found['best_draft_len']}: {found['speedup']:.2f}x of plain decoding" in shown
        assert "ms a draft" in shown
        assert ("no draft length pays" in said.stderr) == (found["speedup"] <= 1)
        assert "speedup" not in next(row for row in found["sweep"] if row["tree_width"] == 2)
        best = max(chains, key=lambda row: row["speedup"])
        assert (found["best_draft_len"], found["speedup"]) == (best["draft_len"], best["speedup"])
        # A length that does not pay is no choice.
        assert chosen.is_file() == (found["speedup"] > 1)
        assert drafts_of("measured") == (best["draft_len"] if found["speedup"] > 1 else 3)
        best = {"best_draft_len": 2, "speedup": 1.5}
        keep(made / "run", 25, best, "float32")
        assert drafts_of("kept") == 2
        # Nor which length pays beside a target in another dtype.
        keep(made / "run", 25, best, "bfloat16")
        assert drafts_of("other") == 3
        assert drafts_of("half", "--dtype", "bfloat16") == 2
        # Of another checkpoint's drafter nothing is known.
        stale = chosen.read_bytes()
        keep(made / "run", 24, {**best, "best_draft_len": 7}, "float32")
        assert drafts_of("stale") == 3
        chosen.write_bytes(stale.replace(b"draft_len", b"draft_lem"))
        words = ["export", str(made / "run"), "--engine", "vllm", "-o", str(tmp_path / "damaged")]
        assert str(chosen) in run(words, 3).stderr
    finally:
        chosen.unlink(missing_ok=True)


def test_serve_of_a_run_takes_the_length_that_was_measured_after_its_export(made):
    words = ["serve", str(made / "run"), "--target", str(made / "target"), "--engine", "vllm", "--print-only"]
    assert document(words)["draft_len"] == 3
    keep(made / "run", 25, {"best_draft_len": 2, "speedup": 1.5}, "float32")
    try:
        assert document(words)["draft_len"] == 2
        assert document([*words, "--draft-len", "1"])["draft_len"] == 1
    finally:
        (made / "run" / "draft-length.json").unlink()


def test_export_data_refuses_or_fills_as_asked(made, tmp_path):
    words = ["export-data", str(made / "store"), "--to", "speculators", "-o", str(tmp_path / "data")]
    error = json.loads(run([*words, "--json"], 4).stderr.strip().splitlines()[-1])
    assert error["kind"] == "final-missing"
    assert "--final all" in error["fix"]
    found = document([*words, "--missing-final", "zeros"])
    assert found["schema"] == "hiddenstore.export-data/1"
    assert found["samples"] == 24
    assert found["layer_ids"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "is_in_order"), [("modelopt-hf", False), ("specforge-dflash", False), ("deepspec", True)]
)
def test_export_data_says_where_the_split_stands_of_a_trainer_that_reads_another_order(name, is_in_order, tmp_path):
    store = make_store(tmp_path / "store", layers=(1, 3, 5), codec="bf16", final="all")
    said = run(["export-data", str(store.path), "--to", name, "-o", str(tmp_path / "data")]).stdout
    rows = pq.read_table(tmp_path / "data" / "hiddenstore-samples.parquet").to_pylist()
    count = sum(row["split"] == "validation" for row in rows)
    assert count > 0
    assert (f"the last {count} samples" in said) == is_in_order
    assert (f"{count} samples: hiddenstore-samples.parquet lists them" in said) != is_in_order


def test_export_data_says_what_modelopt_masks_its_loss_by(made, tmp_path):
    word = "training.answer_only_loss=true"
    words = ["export-data", str(made / "store"), "--to", "modelopt-hf", "-o", str(tmp_path / "data")]
    assert word in run(words, 4).stderr
    assert f"teaches them unless it is told {word}" in run([*words, "--missing-final", "zeros"]).stderr
    every = make_store(tmp_path / "every", layers=(1, 3, 5), codec="bf16", final="all")
    words = ["export-data", str(every.path), "--to", "modelopt-hf", "-o", str(tmp_path / "all")]
    assert f"teaches every token, questions too, unless it is told {word}" in run(words).stderr


def test_the_identity_of_a_target_is_that_of_capture(made):
    """Decode and capture load targets on their own; this holds their fingerprints together."""
    from collectors.targets.load import load_target

    captured = load_target(str(made / "target"), device="cpu").identity
    assert isinstance(captured, TargetIdentity)
    mine = Store.open(made / "store").capture.target
    assert captured.model_dump(exclude={"name"}) == mine.model_dump(exclude={"name"})
