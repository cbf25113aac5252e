"""Conversations with images through the commands: prepared, collected, repaired, trained on, and refused where they do
not fit."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import hiddenstore
from hiddenstore.data.packed import Buffers
from hiddenstore.data.read import DecodedFiller, EncodedFiller, SampleSlot, packed_samples
from hiddenstore.data.samples import pack
from hiddenstore.data.view import SampleView
from hiddenstore.records import image_positions, is_text
from hiddenstore.store import Store
from tests.accepting import repair_words
from tests.collectors.tiny_images import about, data_uri, noise, openai_part, save_image_target
from tests.tiny_world import LAYERS, World, chat, error_of, run, tree, write_rows
from trainer.evaluate.prompts import read_prompts

pytestmark = pytest.mark.skipif(transformers.__version__.startswith("4."), reason="the tiny config is spelled so in 5")
TRAIN = (
    *(
        "loss.kind=kl",
        "loss.steps=2",
        "data.batch_tokens=256",
        "data.pack_tokens=256",
        "train.epochs=100",
        "train.max_steps=8",
    ),
    *("train.epochs=100", "train.checkpoint_every=4", "train.validate_every=0"),
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A target, DATA and a store of four conversations with images and four without, and a run on it."""
    root = tmp_path_factory.mktemp("images")
    world = World(root)
    save_image_target(root / "target")
    (root / "a.png").write_bytes(noise(24, 40, seed=1))
    uris = [openai_part(data_uri(noise(16, 16, seed))) for seed in (2, 3)]
    rows = [about(openai_part("a.png"), question=q) for q in ("What?", "And what is this?")]
    rows += [about(*uris, answer="Two."), about(openai_part("a.png"), uris[0]), *map(chat, range(4))]
    write_rows(root / "rows.jsonl", rows)
    for words in (
        ("prepare", world / "rows.jsonl", "-o", world / "data", "--target", world / "target", "--val", "0"),
        collect(world, "store"),
        ("train", world / "store", "-o", world / "run", *TRAIN),
    ):
        assert run(*words, "-q") == 0, words
    return world


def collect(images: World, store: str, *more: str) -> tuple[str, ...]:
    return ("collect", images / "data", "-o", images / store, "--target", images / "target", "--layers", LAYERS, *more)


def refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run(*words) == 2
    return error_of(capsys.readouterr().err)[0]


def test_packs_of_every_reader_turn_by_the_places_in_time_of_their_tokens(images: World) -> None:
    store = Store.open(images / "store")
    entries = [entry for _, entry in store.entries]
    expected = np.concatenate([image_positions(entry.tokens, entry.images)[0] for entry in entries])
    assert sum(bool(entry.images) for entry in entries) == 4
    # 3 x 5 tokens of an image stand at one time, and what follows 5 further on.
    assert expected[:20].tolist() == [0, 1, *[2] * 15, 7, 8, 9]
    slots = [SampleSlot(entry.id, entry.tokens, entry.final_rows) for entry in entries]
    for filler in (DecodedFiller(store, (0, 1, 2), True), EncodedFiller(store, (0, 1, 2), True)):
        made = filler.empty(slots, Buffers(1 << 24))
        filler.fill_many(made, packed_samples(slots))
        np.testing.assert_array_equal(made.to("cpu").positions.numpy(), expected)
    np.testing.assert_array_equal(pack([store.read(slot.id) for slot in slots]).positions.numpy(), expected)


def test_a_drafter_learns_from_text_and_images_and_goes_on_bit_for_bit(images: World, tmp_path: Path) -> None:
    losses = [json.loads(line)["loss"] for line in (Path(images / "run") / "metrics.jsonl").read_text().splitlines()]
    assert np.mean(losses[-2:]) < 0.6 * np.mean(losses[:2])
    again = tmp_path / "run"
    shutil.copytree(images / "run", again)
    shutil.rmtree(again / "checkpoints/step-8")
    assert run("train", images / "store", "-o", str(again), "--resume", "-q") == 0
    weights = "checkpoints/step-8/drafter.safetensors"
    assert (again / weights).read_bytes() == (Path(images / "run") / weights).read_bytes()


def test_samples_that_were_lost_come_back_with_their_images(images: World, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(images / "store", store)
    first = hiddenstore.open(store)
    before = {name: first.read(name) for name in first.sample_ids}
    (record,) = (json.loads(path.read_bytes()) for path in (store / "commits").iterdir())
    layer = max((file for file in record["files"] if "layer_1" in file["path"]), key=lambda file: file["size"])
    shard = store / record["segment"] / layer["path"]
    content = bytearray(shard.read_bytes())
    content[8] ^= 1
    shard.write_bytes(bytes(content))
    assert run(*repair_words(store), "-q") == 0
    lost = set(before) - set(hiddenstore.open(store).sample_ids)
    assert any(before[name].sample.images for name in lost)
    # The record of the repair is damaged too: the older one knows the images of what the segment still proves.
    spoil(*(path for path in (store / "commits").iterdir() if ".r1" in path.name))
    assert run(*repair_words(store), "-q") == 0
    assert set(before) - set(hiddenstore.open(store).sample_ids) == lost
    assert run("collect", images / "data", "-o", str(store), *collect(images, "store")[4:], "-q") == 0
    again = hiddenstore.open(store)
    assert sorted(again.sample_ids) == sorted(before)
    for name, record in before.items():
        assert again.read(name).sample.images == record.sample.images
        torch.testing.assert_close(again.read(name).aux, record.aux, rtol=0, atol=0)


def test_text_is_proved_where_the_only_record_of_images_is_damaged(images: World, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(images / "store", store)
    opened = hiddenstore.open(store)
    text = {name: opened.read(name) for name in opened.sample_ids if not opened.sample(name).images}
    spoil(*(store / "commits").iterdir())
    assert run(*repair_words(store), "-q") == 0
    again = hiddenstore.open(store)
    assert set(again.sample_ids) == set(text)
    for name, record in text.items():
        torch.testing.assert_close(again.read(name).final, record.final, rtol=0, atol=0)


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_no_token_of_an_image_is_taught_where_everything_is(
    images: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, store = str(tmp_path / "data"), str(tmp_path / "store")
    words = ("prepare", images / "rows.jsonl", "-o", data, "--target", images / "target", "--loss-on", "all")
    assert run(*words, "--val", "0", "-q") == 0
    assert run("collect", data, "-o", store, *collect(images, "store")[4:], "-q") == 0
    # A random target is found to be untrained; its mask is found to be right.
    run("verify", store, "--meaning")
    assert "mask-outside" not in capsys.readouterr().out
    for name in hiddenstore.open(store).sample_ids:
        sample = hiddenstore.open(store).sample(name)
        text = is_text(sample.tokens, sample.images)
        np.testing.assert_array_equal(sample.loss_mask, text)
        turns = SampleView(loss_on="all").mask(replace(sample, loss_mask=np.zeros_like(sample.loss_mask)))
        assert turns.any()
        assert not turns[~text].any()


def test_info_and_show_say_where_images_are_and_what_was_captured_means_what_the_store_says(
    images: World, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first sample, of whose text the layer profile is, holds an image.
    assert run("verify", images / "store", "--meaning") == 0
    assert run("info", images / "store") == 0
    assert "4 with images" in capsys.readouterr().out
    assert run("show", images / "store", "0") == 0
    assert "3 × 5 from token 2" in capsys.readouterr().out


def test_a_copy_keeps_images_and_text_joins_their_store_but_not_the_other_way(
    images: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = str(tmp_path / "copy")
    assert run("copy", images / "store", copied, "--recipe", "compact", "-q") == 0
    one, other = (
        {entry.id: entry.images for _, entry in Store.open(path).entries} for path in (images / "store", copied)
    )
    assert one == other
    assert Store.open(copied).manifest.format == 2
    text = World(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [chat(9)])
    target = ("--target", images / "target")
    assert run("prepare", text / "rows.jsonl", "-o", text / "data", *target, "--val", "0", "-q") == 0
    assert run("collect", text / "data", "-o", copied, *target, "--layers", LAYERS, "--recipe", "compact", "-q") == 0
    assert run("collect", text / "data", "-o", text / "store", *target, "--layers", LAYERS, "-q") == 0
    assert b"images" not in b"".join(content or b"" for content in tree(tmp_path / "store").values())
    words = ("collect", images / "data", "-o", text / "store", *target, "--layers", LAYERS)
    assert run(*words) == 6
    assert "capture.images" in error_of(capsys.readouterr().err)[0]


def test_what_has_no_place_for_images_refuses_them_by_name(
    images: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert run("export", images / "run", "--engine", "vllm", "-o", str(tmp_path / "vllm"), "-q") == 0
    for words, reason in (
        (("export", images / "run", "--engine", "sglang", "-o", out), "it is not known to give a drafter at images"),
        (("export", images / "run", "--engine", "trtllm", "-o", out), "it is not known to give a drafter at images"),
        (("train", images / "store", "-o", out, "--drafter", "dflash"), "samples of .* hold images"),
        (("export-data", images / "store", "-o", out, "--to", "speculators"), "samples of .* hold images"),
        (collect(images, "other", "--engine", "vllm"), "engine vllm runs token ids alone, and 4 samples"),
        (collect(images, "other", "--recipe", "rebuilt"), "from tokens alone, and samples hold images"),
    ):
        assert re.search(reason, refused(words, capsys)), words
    shutil.copytree(images / "target", tmp_path / "target")
    settings = tmp_path / "target/preprocessor_config.json"
    settings.write_text(settings.read_text().replace("1024", "2048"))
    words = ("collect", images / "data", "-o", out, "--target", str(tmp_path / "target"), "--layers", LAYERS)
    assert run(*words) == 4
    assert "image processor" in error_of(capsys.readouterr().err)[0]


def test_a_drafter_is_walked_over_images_and_prompts_are_those_of_text_alone(
    images: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", images / "run", images / "store", "--split", "train", "--json") == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 8
    unusable: list[str] = []
    store = Store.open(images / "store")
    prompts = list(read_prompts(images / "store", None, store.capture.target, "train", unusable))
    assert len(prompts) == len(unusable) == 4
    assert all("holds images, and prompts are decoded from tokens alone" in line for line in unusable)
