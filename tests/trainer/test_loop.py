"""The training loop over a small store."""

import json
import math
import os
import re
import shutil
import sys
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiddenstore.cli import main
from hiddenstore.data import TokenBatches
from hiddenstore.errors import CaptureError, ConfigError, ConflictError, InterruptError, StorageError
from hiddenstore.records import Sample, sample_id
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_samples, make_store
from tests.forked import Forked
from tests.tiny_world import tree
from tests.trainer.runs import ON_CPU, WORDS, store_of, tiny_store
from trainer.train import checkpoint
from trainer.train import step as step_module
from trainer.train.log import _norm_text, read_curves
from trainer.train.loop import train


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return tiny_store(tmp_path)


def lines(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_what_it_promises(store: Store, tmp_path: Path) -> None:
    report = train(store.path, tmp_path / "run", words=[*WORDS, "optim.lr=5e-3"])
    assert report.steps == 12
    found = lines(tmp_path / "run")
    steps = [line for line in found if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    needed = {"step", "loss", "losses", "acc", "lr", "grad_norm", "tokens_per_s", "data_wait_fraction"}
    assert all(needed <= set(line) for line in steps)
    assert [line["step"] for line in found if "validation" in line] == [6, 12]
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "snapshot.json", "metrics.jsonl", "vocab.safetensors", "checkpoints"} <= names
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["LATEST", "step-12", "step-8"]


def test_the_loss_falls(store: Store, tmp_path: Path) -> None:
    train(store.path, tmp_path / "run", words=[*WORDS, "train.max_steps=80", "train.validate_every=0"])
    losses = [float(line["loss"]) for line in lines(tmp_path / "run")]  # type: ignore[arg-type]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_samples_are_cut_and_taught_as_the_settings_say_and_a_resume_goes_on_so(store: Store, tmp_path: Path) -> None:
    words = [*WORDS, "data.pack_tokens=16", "data.max_tokens=16", "data.loss_on=last-turn", "optim.warmup_steps=2"]
    train(store.path, tmp_path / "run", words=[*words, "train.max_steps=4"])
    train(store.path, tmp_path / "run", words=["train.max_steps=6"], resume=True)
    train(store.path, tmp_path / "whole", words=[*words, "train.max_steps=6"])
    halves, whole = lines(tmp_path / "run"), lines(tmp_path / "whole")
    assert next(line["loss"] for line in halves if "loss" in line) == whole[0]["loss"]
    assert [line["step"] for line in halves if "loss" in line] == list(range(1, 7))
    assert whole[0]["lr"] == pytest.approx(whole[1]["lr"] / 2)  # type: ignore[operator]


def test_a_cut_that_leaves_nothing_to_teach_is_refused_before_the_first_step(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_tokens=2 .* leave no token") as caught:
        train(store.path, tmp_path / "run", words=[*WORDS, "data.max_tokens=2"])
    assert caught.value.kind == "mask-empty"
    assert not (tmp_path / "run").exists()


def test_a_store_without_a_training_split_is_refused_as_such_whatever_is_taught_of_it(tmp_path: Path) -> None:
    made = store_of(tmp_path, [replace(one, split="validation") for one in make_samples(6)])
    for words in (WORDS, [*WORDS, "data.loss_on=all"]):
        with pytest.raises(ConfigError, match="holds no samples, the validation split all 6") as caught:
            train(made.path, tmp_path / "run", words=words)
        assert caught.value.kind == "split-empty"
        assert "--val 10%" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()


def test_epochs_that_the_steps_of_a_run_overrule_are_refused_on_a_resume_with_the_words_that_do_it(
    store: Store, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(store.path, run, words=[*WORDS, "train.max_steps=2"])
    with pytest.raises(ConfigError, match=r"train.epochs=2 changes nothing: .* train.max_steps=2") as caught:
        train(store.path, run, words=["train.epochs=2"], resume=True)
    assert caught.value.kind == "resume-settings"
    words = str(caught.value.hint).rpartition("--resume ")[2].split()
    assert words == ["train.epochs=2", "train.max_steps=none"]
    report = train(store.path, run, words=words, resume=True)
    batches = TokenBatches(store, batch_tokens=160, pack_tokens=80)
    assert report.steps == batches.batches_per_epoch(0) + batches.batches_per_epoch(1)


def test_a_store_that_supervises_nothing_is_refused_instead_of_trained_on_for_nothing(tmp_path: Path) -> None:
    samples = []
    for one in make_samples(6):
        mask = np.zeros_like(one.loss_mask)
        samples.append(replace(one, id=sample_id(one.input_ids, mask), loss_mask=mask, split="train"))
    made = store_of(tmp_path, samples)
    with pytest.raises(ConfigError, match=r"no token of the training split of .* teaches") as caught:
        train(made.path, tmp_path / "run", words=WORDS)
    assert caught.value.kind == "mask-empty"
    assert not (tmp_path / "run").exists()


def test_a_validation_split_that_supervises_nothing_is_said_and_refused_where_a_run_waits_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = make_samples(6)
    mask = np.zeros_like(samples[-1].loss_mask)
    silent = replace(samples[-1], loss_mask=mask, id=sample_id(samples[-1].input_ids, mask), split="validation")
    made = store_of(tmp_path, [*(replace(one, split="train") for one in samples[:-1]), silent])
    words = [*WORDS, "train.max_steps=2", "train.validate_every=1"]
    with pytest.raises(ConfigError, match=r"no token of the validation split of .* teaches"):
        train(made.path, tmp_path / "run", words=[*words, "train.patience=1"])
    assert not (tmp_path / "run").exists()
    train(made.path, tmp_path / "run", words=words)
    assert "teaches: nothing is validated" in capsys.readouterr().err
    assert all("validation" not in line for line in lines(tmp_path / "run"))


SHORT = [word for word in ON_CPU if not word.startswith(("loss.", "drafter.vocab_size"))]
BLOCKS = ["drafter.mask_token_id=0", "drafter.num_layers=1"]


def answered(samples: list[Sample], *splits: str) -> list[Sample]:
    """The same with answers of one token, in the splits named, which an end token outside the mask follows."""
    short = []
    for one in samples:
        mask = np.zeros_like(one.loss_mask)
        mask[-2] = 1
        is_short = one.split in splits
        short.append(replace(one, id=sample_id(one.input_ids, mask), loss_mask=mask) if is_short else one)
    return short


@pytest.mark.parametrize(("drafter", "words"), [("dflash", BLOCKS), ("medusa", [])])
def test_answers_of_which_a_drafter_takes_no_token_are_refused_before_the_run_is_made(
    drafter: str, words: list[str], tmp_path: Path
) -> None:
    made = store_of(tmp_path, answered(make_samples(10), "train", "validation"))
    with pytest.raises(ConfigError, match=rf"no token of the training split of .* teaches {drafter}") as caught:
        train(made.path, tmp_path / "run", drafter=drafter, words=[*SHORT, *words])
    assert caught.value.kind == "mask-empty"
    assert not (tmp_path / "run").exists()


def test_a_block_longer_than_every_sample_is_refused_before_the_run_is_made(store: Store, tmp_path: Path) -> None:
    words = [*SHORT, *BLOCKS, "drafter.block_size=300", "loss.anchor_rule=whole"]
    with pytest.raises(ConfigError, match="teaches dflash under its loss") as caught:
        train(store.path, tmp_path / "run", drafter="dflash", words=words)
    assert "block_size" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()


def test_a_validation_of_which_a_drafter_takes_no_token_is_said_and_refused_where_a_run_waits_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = store_of(tmp_path, answered(make_samples(10), "validation"))
    words = [*SHORT, *BLOCKS, "train.max_steps=2", "train.validate_every=1"]
    with pytest.raises(ConfigError, match=r"no token of the validation split of .* teaches dflash"):
        train(made.path, tmp_path / "run", drafter="dflash", words=[*words, "train.patience=1"])
    train(made.path, tmp_path / "run", drafter="dflash", words=words)
    assert "nothing is validated" in capsys.readouterr().err


def test_a_step_that_teaches_nothing_changes_no_weight_and_its_loss_is_reported_for_none(tmp_path: Path) -> None:
    samples = []
    for index, one in enumerate(make_samples(40)):
        mask = one.loss_mask * (index % 4 == 0)
        samples.append(replace(one, id=sample_id(one.input_ids, mask), loss_mask=mask, split="train"))
    made, run = store_of(tmp_path, samples), tmp_path / "run"
    words = [*ON_CPU, "data.batch_tokens=40", "data.pack_tokens=40", "train.checkpoint_every=1", "train.keep=12"]
    report = train(made.path, run, words=[*words, "optim.kind=muon", "train.validate_every=0"])
    steps = [line for line in lines(run) if "loss" in line]
    drafters = [checkpoint.load(run / f"checkpoints/step-{step}").drafter for step in range(1, 13)]
    for line, (before, after) in zip(steps[1:], pairwise(drafters), strict=True):
        is_same = all(torch.equal(weight, after[name]) for name, weight in before.items())
        assert is_same is (line["taught"] == 0)
    taught = [line for line in steps if line["taught"]]
    assert 0 < len(taught) < 12
    assert not steps[-1]["taught"]
    assert (report.loss, report.acc) == (taught[-1]["loss"], taught[-1]["acc"])
    assert train(made.path, run, resume=True).loss == report.loss
    assert [row["step"] for row in read_curves(run).taught] == [line["step"] for line in taught]


def test_packs_accumulate_to_the_gradient_of_the_whole_batch(store: Store, tmp_path: Path) -> None:
    words = [*ON_CPU, "train.max_steps=3", "train.validate_every=0"]
    train(store.path, tmp_path / "packs", words=words)
    train(store.path, tmp_path / "one", words=[*words, "data.pack_tokens=160"])
    for a, b in zip(lines(tmp_path / "packs"), lines(tmp_path / "one"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_epochs_end_a_run_without_max_steps(store: Store, tmp_path: Path) -> None:
    words = [w for w in WORDS if not w.startswith("train.max_steps")]
    report = train(store.path, tmp_path / "run", words=[*words, "train.epochs=2"])
    batches = TokenBatches(store, batch_tokens=160, pack_tokens=80)
    assert report.steps == batches.batches_per_epoch(0) + batches.batches_per_epoch(1)


def test_an_existing_run_is_not_overwritten(store: Store, tmp_path: Path) -> None:
    train(store.path, tmp_path / "run", words=[*WORDS, "train.max_steps=1"])
    with pytest.raises(ConflictError, match=r"step-1 its newest.*another -o starts a new one") as caught:
        train(store.path, tmp_path / "run", words=WORDS)
    assert caught.value.hint == f"hiddenstore train {store.path} -o {tmp_path / 'run'} --resume"
    with pytest.raises(ConfigError, match=r"optim\.lr=1") as refused:
        train(store.path, tmp_path / "run", words=["optim.lr=1"], resume=True)
    assert refused.value.kind == "resume-settings"


def test_a_store_is_no_folder_for_a_run_which_no_command_would_find_there(store: Store) -> None:
    before = tree(Path(store.path))
    with pytest.raises(ConflictError, match="holds a store, and no run is looked for beside it") as caught:
        train(store.path, store.path, words=WORDS)
    assert caught.value.kind == "output-exists"
    assert tree(Path(store.path)) == before


def test_a_store_without_the_final_hidden_is_refused_with_the_command(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=3, layers=(1, 3, 4), final="none")
    with pytest.raises(ConfigError, match="lacks the final hidden") as caught:
        train(store.path, tmp_path / "run", words=WORDS)
    assert "hiddenstore collect" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()


def test_layers_the_store_lacks_are_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks aux layers \[6\]"):
        train(store.path, tmp_path / "run", words=[*WORDS, "drafter.aux_layers=1,3,6"])


def test_a_drafter_that_reads_no_layers_is_refused_before_the_run_is_made(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="aux_layers is empty"):
        train(store.path, tmp_path / "run", words=[*WORDS, "drafter.aux_layers=[]"])
    assert not (tmp_path / "run").exists()


def test_a_draft_vocabulary_larger_than_the_target_s_is_refused_before_the_run_is_made(
    store: Store, tmp_path: Path
) -> None:
    words = [*SHORT, *BLOCKS, "drafter.vocab_size=1000", "drafter.selector_top_k=500"]
    with pytest.raises(ConfigError, match=r"vocab_size=1000 is more than the 64 tokens of the target") as caught:
        train(store.path, tmp_path / "run", drafter="dflash2", words=words)
    assert (caught.value.kind, caught.value.hint) == ("drafter-shape", "drafter.vocab_size=64")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_and_names_the_samples(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TokenBatches.__iter__

    def poisoned(self: TokenBatches):  # type: ignore[no-untyped-def]
        for index, batch in enumerate(real(self)):
            if index == 2:
                packs = [replace(p, aux=torch.full_like(p.aux, math.nan)) for p in batch.packs]
                batch = replace(batch, packs=packs)
            yield batch

    monkeypatch.setattr(TokenBatches, "__iter__", poisoned)
    with pytest.raises(CaptureError) as caught:
        train(store.path, tmp_path / "run", words=[*WORDS, "train.checkpoint_every=2"])
    assert caught.value.kind == "loss-not-finite"
    assert any(sample in str(caught.value) for sample in store.sample_ids)
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").glob("step-*")) == ["step-2"]


def test_a_step_for_which_the_machine_has_no_memory_says_what_helps(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*ON_CPU, "train.max_steps=4", "train.checkpoint_every=2", "train.validate_every=0"]
    real, begun = step_module.Totals.add, []

    def grown(totals: Any, losses: Any) -> None:
        begun.append(totals)
        if len(begun) > 5:
            torch.empty(1 << 50)
        real(totals, losses)

    monkeypatch.setattr(step_module.Totals, "add", grown)
    with pytest.raises(
        StorageError, match=r"of step \d do not fit into the memory of cpu: .*DefaultCPUAllocator"
    ) as caught:
        train(store.path, tmp_path / "run", words=words)
    assert caught.value.kind == "out-of-memory"
    assert "data.pack_tokens" in str(caught.value.hint)
    monkeypatch.undo()
    assert train(store.path, tmp_path / "run", resume=True).steps == 4


def test_a_signal_saves_a_checkpoint_and_a_resume_finishes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import signal

    real = step_module.train_step
    calls = [0]

    def step(*args: object) -> object:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(step_module, "train_step", step)
    with pytest.raises(InterruptError) as caught:
        train(store.path, tmp_path / "run", words=WORDS)
    assert caught.value.exit_code == 75
    report = train(store.path, tmp_path / "run", resume=True)
    assert report.steps == 12
    train(store.path, tmp_path / "straight", words=WORDS)
    values = [[(line["step"], line.get("loss")) for line in lines(tmp_path / name)] for name in ("run", "straight")]
    assert values[0] == values[1]


def test_a_given_vocabulary_is_used(store: Store, tmp_path: Path) -> None:
    from trainer.vocab import DraftVocab

    torch.save(DraftVocab.of_ids(torch.arange(5, 50), 64).d2t, tmp_path / "d2t.pt")
    train(
        store.path, tmp_path / "run", words=[*WORDS, "train.max_steps=1", f"drafter.vocab_file={tmp_path / 'd2t.pt'}"]
    )
    assert DraftVocab.load(tmp_path / "run/vocab.safetensors", 64).target_ids.tolist() == list(range(5, 50))
    assert "\n  vocab_size: 45\n" in (tmp_path / "run/config.yaml").read_text()


def test_other_width_and_trainable_embeddings_train(store: Store, tmp_path: Path) -> None:
    words = [*WORDS, "drafter.hidden_size=24", "drafter.train_embeddings=true", "drafter.train_head=false"]
    report = train(store.path, tmp_path / "run", words=[*words, "train.max_steps=2"])
    from trainer.train import checkpoint

    saved = checkpoint.load(report.checkpoint)
    assert saved.drafter["embed_tokens.weight"].shape == (64, 24)
    assert not any("lm_head" in name for name in saved.optimizer)


def test_bfloat16_autocast_keeps_fp32_weights(store: Store, tmp_path: Path) -> None:
    report = train(store.path, tmp_path / "run", words=[*WORDS, "train.max_steps=2", "train.precision=bf16"])
    from trainer.train import checkpoint

    assert math.isfinite(report.loss)
    assert all(t.dtype == torch.float32 for t in checkpoint.load(report.checkpoint).drafter.values())


def test_command_answers_in_json(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["train", store.path, *WORDS, "train.max_steps=2", "-o", str(tmp_path / "run"), "--json"])
    assert done.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "hiddenstore.train/1"
    assert document["steps"] == 2
    with pytest.raises(SystemExit):
        main(["vocab", store.path, "--size", "20", "-o", str(tmp_path / "v.safetensors"), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["size"]) == ("hiddenstore.vocab/1", 20)


def test_a_finished_run_says_so_and_more_steps_continue_it(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = train(store.path, tmp_path / "run", words=[*WORDS, "train.max_steps=2"])
    assert done.validation["loss"] > 0
    with pytest.raises(SystemExit) as ended:
        main(["train", store.path, "-o", str(tmp_path / "run"), "--resume"])
    assert ended.value.code == 0
    assert "finished at step 2" in capsys.readouterr().err
    again = train(store.path, tmp_path / "run", resume=True)
    assert (again.was_finished, again.loss, again.acc, again.checkpoint) == (True, done.loss, done.acc, done.checkpoint)
    assert again.validation == done.validation
    more = train(store.path, tmp_path / "run", words=["train.max_steps=3"], resume=True)
    assert (more.was_finished, more.steps) == (False, 3)
    assert train(store.path, tmp_path / "run", resume=True).steps == 3


def test_a_setting_that_a_resume_refuses_is_not_kept_for_the_next_one(tmp_path: Path) -> None:
    made = make_store(tmp_path, samples=4, layers=(1, 3, 4))
    train(made.path, tmp_path / "run", words=[*WORDS, "train.max_steps=2"])
    settings = (tmp_path / "run/config.yaml").read_bytes()
    for refused in ("train.context_parallel=3", "train.patience=2"):
        with pytest.raises(ConfigError):
            train(made.path, tmp_path / "run", words=[refused, "train.max_steps=3"], resume=True)
        assert (tmp_path / "run/config.yaml").read_bytes() == settings
    train(made.path, tmp_path / "run", words=["train.max_steps=3"], resume=True)
    assert train(made.path, tmp_path / "run", resume=True).steps == 3


def test_a_resume_refuses_another_store_and_takes_a_copy(store: Store, tmp_path: Path) -> None:
    words = [*WORDS, "train.max_steps=2"]
    train(store.path, tmp_path / "run", words=words)
    for name, changes in {"recipe": {"codec": "bf16"}, "samples": {"seed": 7}}.items():
        (tmp_path / name).mkdir()
        other = make_store(tmp_path / name, **{"samples": 30, "layers": (1, 3, 4), **changes})
        with pytest.raises(ConflictError, match=f"is not the store .* was trained on \\({store.path}\\)") as caught:
            train(other.path, tmp_path / "run", words=["train.max_steps=3"], resume=True)
        assert caught.value.kind == "resume-store"
        assert store.path in str(caught.value.hint)
    shutil.copytree(store.path, tmp_path / "moved")
    assert train(tmp_path / "moved", tmp_path / "run", words=["train.max_steps=3"], resume=True).steps == 3


def test_c17_the_live_line_says_what_the_gradient_norm_is_clipped_to() -> None:
    assert _norm_text(0.5, 1.0) == "0.50"
    assert _norm_text(2.345, 1.0) == "2.35 (clip 1)"
    assert _norm_text(4236.4, 1.0) == "4,236 (clip 1)"


def test_tensorboard_gets_event_files_when_asked(store: Store, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(store.path, tmp_path / "without", words=[*WORDS, "train.max_steps=1"])
    assert not (tmp_path / "without/tensorboard").exists()
    train(store.path, tmp_path / "run", words=[*WORDS, "train.tensorboard=true"])
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {"train/loss", "train/lr", "train/grad_norm", "train/acc@1", "train/acc@3", "validation/loss@2"} <= names
    shown = [event.value for event in events.Scalars("train/loss")]
    assert shown == pytest.approx([float(line["loss"]) for line in lines(tmp_path / "run") if "loss" in line])  # type: ignore[arg-type]


def test_the_settings_that_follow_from_the_target_are_shown_before_the_first_step(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", store.path, "-o", str(tmp_path / "run"), *WORDS, "train.max_steps=1"])
    said = capsys.readouterr().err
    assert "1 step over 24 samples" in said
    shown = dict(re.findall(r"([a-z]+\.[a-z_]+) +(\S+(?: \*)?)", said))
    assert shown["data.batch_tokens"] == "160 *"
    assert shown["drafter.aux_layers"] == "1,3,4"
    assert shown["optim.lr"] == "0.02"


def test_an_unknown_setting_is_answered_with_the_one_that_was_meant(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", store.path, "-o", str(tmp_path / "run"), "traner.lr=1e-4", "loss.stepz=3", "optim.clip=fast"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    for part in ("[config-unknown-key]", "'traner.lr'", "did you mean optim.lr?", "did you mean loss.steps?", "'fast'"):
        assert part in said
    assert not (tmp_path / "run").exists()


def traced(store: str, run: Path, words: list[str]) -> None:
    """Train, and print every file of the store that was opened."""
    opened: list[str] = []

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(values[0], str | bytes):
            opened.append(os.fsdecode(values[0]))

    sys.addaudithook(hook)
    train(store, run, words=words)
    sys.stdout.write("\n".join(name for name in opened if name.startswith(store)))


def test_nothing_of_the_target_is_opened_but_config_and_head_bundle(store: Store, tmp_path: Path) -> None:
    """A folder of target weights lies beside the head bundle; the file trace must not name it."""
    (Path(store.path) / "target" / "model.safetensors").write_bytes(b"weights")
    words = [*WORDS, "train.max_steps=2"]
    process = Forked(traced, store.path, tmp_path / "run", words)
    printed, said = process.communicate(240)
    assert process.returncode == 0, said
    opened = {line.removeprefix(store.path).lstrip("/") for line in printed.splitlines()}
    of_target = {name for name in opened if name.startswith("target/")}
    assert of_target == {"target/head.safetensors", "target/config.json"}
    assert opened - of_target
    assert all(
        name.split("/")[0] in {"store.json", "commits", "segments", "snapshots"} for name in opened - of_target if name
    )


def test_the_packs_of_a_step_are_gone_when_the_next_ones_come(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Any]] = []
    real = step_module.inputs_of

    def inputs_of(state: Any, packs: Any) -> Any:
        assert all(one() is None for one in seen), "the step before keeps its states on the device"
        seen.extend(map(weakref.ref, packs))
        return real(state, packs)

    monkeypatch.setattr(step_module, "inputs_of", inputs_of)
    train(store.path, tmp_path / "run", words=[*WORDS, "train.max_steps=4", "train.validate_every=0"])
    assert len(seen) >= 4
