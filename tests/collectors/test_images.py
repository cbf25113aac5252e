"""Images in conversations: what is read, what tokens they take, and what the target makes of them."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from datasets import Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image

from collectors.checks.crosscheck import CrossCheck
from collectors.conversations.mix import open_sources
from collectors.engines import CaptureRequest, EngineOptions
from collectors.engines.hf import HfEngine
from collectors.targets.images import open_images
from collectors.targets.load import LoadedTarget, load_target
from collectors.tokenize.prepare import PrepareOptions, prepare
from hiddenstore.conversation import Conversation, Row, parse_row
from hiddenstore.errors import CaptureError, ConfigError, FormatError, Kind, StorageError
from hiddenstore.files import documents
from hiddenstore.files.documents import seal
from hiddenstore.inputs import PreparedInput
from hiddenstore.records import Sample, image_positions
from hiddenstore.targets.folder import open_target
from schemas.base import Format
from schemas.manifest import FileEntry, ImageEntry
from schemas.prepared import PreparedData
from tests.collectors.tiny import tiny_tokenizer
from tests.collectors.tiny_images import TOKEN, TOKEN_TEXT, about, data_uri, noise, openai_part, save_image_target
from tests.tiny_world import chat, write_rows

pytestmark = pytest.mark.skipif(transformers.__version__.startswith("4."), reason="the tiny config is spelled so in 5")
LAYERS = (-1, 0, 1, 2, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_target(str(save_image_target(tmp_path_factory.mktemp("images") / "target")), device="cpu")


def prepared(folder: Path, target: LoadedTarget, rows: list[Any], **options: Any) -> PreparedInput:
    """DATA of rows that lie beside ``a.png`` (3 x 5 tokens)."""
    (folder / "a.png").write_bytes(noise(24, 40, seed=1))
    settings = PrepareOptions(validation=0, **options)
    prepare([write_rows(folder / "rows.jsonl", rows)], folder / "data", target.folder.name, settings)
    return PreparedInput.open(folder / "data")


def reasons(data: PreparedInput) -> dict[str, int]:
    return {count.reason: count.rows for count in data.info.rejects}


def test_a_path_a_uri_and_a_part_of_hugging_face_give_the_tokens_of_the_target_s_own_processor(
    target: LoadedTarget, tmp_path: Path
) -> None:
    class Processor(transformers.Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, *_arguments: Any) -> None:
            """Its processor of videos needs torchvision."""

    tokenizer = tiny_tokenizer()
    tokenizer.image_token, tokenizer.image_token_id = TOKEN_TEXT, TOKEN
    tokenizer.video_token, tokenizer.video_token_id = "{", 94
    images = open_images(target.folder)
    assert images is not None
    processor = Processor(images._processor, tokenizer, None)
    other = noise(16, 16, seed=2)
    rows = [
        about(openai_part("a.png"), question="x"),
        about({"type": "image", "path": "a.png"}, {"type": "text", "text": " or "}, openai_part(data_uri(other))),
        about({"type": "image", "image": (tmp_path / "a.png").as_uri()}, answer="Noise."),
    ]
    samples = list(prepared(tmp_path, target, rows).samples())
    pictures = [Image.open(tmp_path / "a.png"), Image.open(io.BytesIO(other))]
    shown = [([0], "<s>z|yx>"), ([0, 1], "<s>z|y or z|yWhat is this?>"), ([0], "<s>z|yWhat is this?>")]
    for sample, (numbers, question) in zip(samples, shown, strict=True):
        made = processor(text=[question], images=[pictures[n] for n in numbers], return_tensors="np")
        ids = made["input_ids"][0]
        np.testing.assert_array_equal(sample.input_ids[: len(ids)], ids)
        assert not sample.loss_mask[: len(ids)].any()
        assert sample.loss_mask[len(ids) :].all()
        # The turns end where their tokens do, behind the images.
        assert sample.spans.tolist() == [[1, 0, len(ids) - 1], [2, len(ids), sample.tokens]]
        grids = made["image_grid_thw"] // [1, 2, 2]
        assert [(image.height, image.width) for image in sample.images] == [(h, w) for _, h, w in grids.tolist()]


def test_positions_are_those_of_transformers(target: LoadedTarget) -> None:
    ids = [1, 5, *[TOKEN] * 15, 6, 7, *[TOKEN] * 4, 8, 9, 10]
    images = [entry(2, 3, 5), entry(19, 2, 2)]
    tokens = torch.tensor([ids])
    expected, _ = target.model.model.get_rope_index(
        tokens, (tokens == TOKEN).int(), torch.tensor([[1, 6, 10], [1, 4, 4]])
    )
    np.testing.assert_array_equal(image_positions(len(ids), images), expected[:, 0].numpy())
    # A view that ends inside the second image sees the same places.
    np.testing.assert_array_equal(image_positions(20, images), expected[:, 0, :20].numpy())


def entry(start: int, height: int, width: int) -> ImageEntry:
    return ImageEntry(sha256="0" * 64, start=start, height=height, width=width)


@torch.no_grad()
def test_captured_states_equal_those_of_transformers_in_a_unit_of_images_and_text(
    target: LoadedTarget, tmp_path: Path
) -> None:
    uri = data_uri(noise(16, 24, seed=3))
    rows = [about(openai_part("a.png")), chat(3), about(openai_part("a.png"), openai_part(uri)), chat(11)]
    samples = list(prepared(tmp_path, target, rows).samples())
    assert [len(sample.images) for sample in samples] == [1, 0, 2, 0]
    requests = [request_of(sample) for sample in samples]
    captured = HfEngine(target, EngineOptions(LAYERS, 256)).capture(requests)
    images, start = open_images(target.folder), 0
    assert images is not None
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        more = {}
        if sample.images:
            read = [images.read(data) for data in sample.image_files]
            more = {
                "pixel_values": torch.from_numpy(np.concatenate([pixels.values for pixels in read])),
                "image_grid_thw": torch.from_numpy(np.concatenate([pixels.grid for pixels in read])),
                "mm_token_type_ids": (ids == TOKEN).int(),
            }
        output = target.model(input_ids=ids, output_hidden_states=True, use_cache=False, **more)
        states = captured.aux[:, start : start + sample.tokens].float()
        for layer in range(4):
            torch.testing.assert_close(states[layer], output.hidden_states[layer][0], rtol=2**-7, atol=1e-3)
        if sample.images:
            # Without its images a sample has other states: the comparison above would see it.
            blind = target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[2][0]
            assert (states[2] - blind).abs().max() > 0.1
        start += sample.tokens


def request_of(sample: Sample) -> CaptureRequest:
    rows = np.arange(sample.tokens, dtype=np.int32)
    return CaptureRequest(sample.input_ids, rows, images=tuple(zip(sample.images, sample.image_files, strict=True)))


def test_an_image_that_takes_other_tokens_than_prepare_counted_is_refused(target: LoadedTarget, tmp_path: Path) -> None:
    (sample,) = prepared(tmp_path, target, [about(openai_part("a.png"))]).samples()
    engine = HfEngine(target, EngineOptions(LAYERS, 256))
    for data, reason in (
        (noise(40, 24, seed=1), "it takes 5 x 3 tokens here, not 3 x 5"),
        (b"no image", "it is none of AVIF, BMP, GIF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "it is none of AVIF, BMP, GIF"),
    ):
        images = ((sample.images[0], data),)
        request = CaptureRequest(sample.input_ids, np.zeros(1, np.int32), sample.source, images)
        with pytest.raises(CaptureError, match=rf"rows\.jsonl:1: image .*{reason}") as caught:
            engine.capture([request])
        assert caught.value.kind == Kind.ENGINE_REQUEST


def test_images_that_cannot_be_read_reject_their_row_by_name(target: LoadedTarget, tmp_path: Path) -> None:
    (tmp_path / "torn.png").write_bytes(noise(24, 40, seed=1)[:300])
    rows = [
        about(openai_part("https://example.org/a.png")),
        about(openai_part("b.png")),
        about(openai_part("torn.png")),
        about(openai_part("data:image/png;base64,!!!")),
        about({"type": "image"}),
        about(openai_part("a.png"), question="what is z|y?"),
        {"messages": [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": [openai_part("a.png")]}]},
        about({"type": "video", "video": "a.mp4"}),
        chat(1),
        about(openai_part("rows.jsonl")),
        about(openai_part(data_uri(noise(1, 300, seed=1)))),
        {
            "image": "a.png",
            "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A."}],
        },
        {"images": ["a.png", "b.png"], **about(openai_part("a.png"))},
    ]
    data = prepared(tmp_path, target, rows)
    assert data.info.samples == 1
    assert reasons(data) == {
        "image-unreadable": 4,
        "image-missing": 4,
        "content-not-text": 2,
        "image-remote": 1,
        "image-placeholders": 1,
    }
    lines = (tmp_path / "data/rejects.jsonl").read_text().splitlines()
    details = [json.loads(line)["detail"] for line in lines]
    assert details[0] == "image 1, 'https://example.org/a.png': it is not fetched; download it, and name the file"
    assert details[8] == "image 1, 'rows.jsonl': it is none of AVIF, BMP, GIF, JPEG, JPEG2000, PNG, PPM, TIFF, WEBP"
    assert "aspect ratio" in details[9]
    assert details[10] == details[11] == "an image beside the messages, named by no part of them"


@pytest.mark.parametrize("refusal", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_a_disk_that_refuses_an_image_stops_prepare_and_rejects_no_row(
    refusal: int, target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "a.png":
            raise OSError(refusal, os.strerror(refusal), str(path))
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(StorageError, match=r"a\.png: "):
        prepared(tmp_path, target, [about(openai_part("a.png")), chat(1)])
    assert not (tmp_path / "data").exists()


def test_an_image_written_out_where_its_path_belongs_rejects_its_row(target: LoadedTarget, tmp_path: Path) -> None:
    data = prepared(tmp_path, target, [about(openai_part("iVBORw0KGgo" * 1000)), about(openai_part("a\0b")), chat(1)])
    assert {reject.reason: reject.rows for reject in data.info.rejects} == {"image-missing": 2}


def test_images_in_a_column_of_a_table_are_not_lost_with_it(target: LoadedTarget, tmp_path: Path) -> None:
    rows = [{**chat(number), "image": image} for number, image in enumerate([{"bytes": b"x", "path": None}, None])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    table = Dataset.from_list(rows)
    table.cast(Features({**table.features, "image": ImageFeature()})).save_to_disk(tmp_path / "saved")
    for source in (tmp_path / "rows.parquet", tmp_path / "saved"):
        (opened,) = open_sources([str(source)])
        for takes_images, reason in ((True, "image-missing"), (False, "content-not-text")):
            first, second = [parse_row(row, takes_images) for row in opened.rows()]
            assert first.reason == reason  # type: ignore[union-attr]
            assert isinstance(second, Conversation)


def test_the_bytes_of_an_image_win_over_the_path_where_it_once_lay() -> None:
    for part in (
        {"type": "image", "path": "gone.png", "bytes": b"png"},
        {"type": "image", "image": {"path": "gone.png", "bytes": b"png"}},
        {"type": "image", "image": {"path": "gone.png", "bytes": None}, "bytes": b"png"},
    ):
        conversation = parse_row(Row("x:1", about(part), 1), True)
        assert conversation.images == (b"png",)  # type: ignore[union-attr]
    (named,) = parse_row(Row("x:1", about({"type": "image", "path": "a.png", "bytes": "text"}), 1), True).images  # type: ignore[union-attr]
    assert named == "a.png"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_what_is_transparent_is_white_as_vllm_loads_it(target: LoadedTarget, mode: str) -> None:
    images = open_images(target.folder)
    assert images is not None
    made = Image.open(io.BytesIO(noise(16, 24, seed=4))).convert(mode)
    if mode in ("P", "RGB"):
        # One colour is said to be transparent.
        saved = stored(made, transparency=made.getpixel((3, 3)))
    else:
        made.putalpha(Image.fromarray(np.arange(16 * 24, dtype=np.uint8).reshape(16, 24)))
        saved = stored(made)
    alpha = np.asarray(Image.open(io.BytesIO(saved)).convert("RGBA"), dtype=float)
    share = alpha[..., 3:] / 255
    assert (share < 1).any()
    white = Image.fromarray(np.rint(alpha[..., :3] * share + 255 * (1 - share)).astype(np.uint8))
    # What is pasted is rounded by 1 of 255 at most.
    np.testing.assert_allclose(images.read(saved).values, images.read(stored(white)).values, rtol=0, atol=0.02)


def stored(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def test_a_processor_that_fails_on_every_image_is_blamed_and_not_the_images(tmp_path: Path) -> None:
    folder = save_image_target(tmp_path / "target")
    settings = folder / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"size": {"height": 8, "width": 8}}))
    rows = write_rows(tmp_path / "rows.jsonl", [about(openai_part(data_uri(noise(16, 16, 1))))])
    with pytest.raises(ConfigError, match="cannot read the image processor of target") as caught:
        prepare([rows], tmp_path / "data", str(folder))
    assert caught.value.kind == Kind.TARGET_UNREADABLE


def test_a_limit_inside_an_image_rejects_the_row_and_one_behind_it_cuts_the_answer(
    target: LoadedTarget, tmp_path: Path
) -> None:
    # Two tokens, 3 x 5 of the image, then a question of 14 and the answer.
    short = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    for limit, lengths in ((16, [10]), (35, [35, 10])):
        (folder := tmp_path / str(limit)).mkdir()
        data = prepared(folder, target, [about(openai_part("a.png")), short], max_tokens=limit)
        assert [sample.tokens for sample in data.samples()] == lengths
        assert reasons(data) == ({"image-cut": 1} if limit == 16 else {})


def test_a_limit_before_a_later_image_keeps_the_earlier_ones(target: LoadedTarget, tmp_path: Path) -> None:
    turns = [about(openai_part(data_uri(noise(24, 40, seed))))["messages"] for seed in (1, 2)]
    rows = [{"messages": turns[0] + turns[1]}]
    (tmp_path / "whole").mkdir()
    (whole,) = prepared(tmp_path / "whole", target, rows).samples()
    for more in (0, 1):
        (folder := tmp_path / str(more)).mkdir()
        data = prepared(folder, target, [*rows, chat(1)], max_tokens=whole.images[1].start + more)
        kept = [(sample.images, sample.image_files) for sample in data.samples()]
        assert kept == [*([] if more else [(whole.images[:1], whole.image_files[:1])]), ((), ())]
        assert reasons(data) == ({"image-cut": 1} if more else {})


def test_one_text_about_two_images_makes_two_samples_and_a_repeated_row_one(
    target: LoadedTarget, tmp_path: Path
) -> None:
    one, other = (openai_part(data_uri(noise(24, 40, seed))) for seed in (1, 2))
    data = prepared(tmp_path, target, [about(one), about(other), about(openai_part("a.png")), about(other)])
    assert (data.info.samples, data.info.duplicates) == (2, 2)
    first, second = data.samples()
    np.testing.assert_array_equal(first.input_ids, second.input_ids)
    assert first.id != second.id
    assert first.image_files[0] == (tmp_path / "a.png").read_bytes() != second.image_files[0]


def test_text_alone_is_prepared_as_for_any_target_and_images_as_a_later_format(
    target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = prepared(tmp_path, target, [chat(1)])
    document = json.loads((tmp_path / "data/data.json").read_text())
    assert document["format"] == 1
    assert "images" not in document
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["data.json", "part-00000.parquet"]
    assert plain.info.images is None
    (tmp_path / "other").mkdir()
    data = prepared(tmp_path / "other", target, [chat(1), about(openai_part("a.png"))])
    assert data.info.images is not None
    assert (data.info.images.samples, data.info.format) == (1, 2)
    monkeypatch.setattr(PreparedData.model_fields["format"], "annotation", Format)
    with pytest.raises(FormatError, match="has format 2; this version of hiddenstore reads a PreparedData up to 1"):
        PreparedInput.open(tmp_path / "other/data")


def test_images_of_data_that_were_exchanged_or_left_out_are_refused(target: LoadedTarget, tmp_path: Path) -> None:
    parts = [openai_part(data_uri(noise(24, 40, seed))) for seed in (1, 2)]
    data = prepared(tmp_path, target, [about(part) for part in parts])
    assert data.info.images is not None
    table = pq.read_table(tmp_path / "data/images-00000.parquet")
    swapped = table.set_column(5, "data", pa.array(table["data"].to_pylist()[::-1], pa.binary()))
    for wrong, reason in (
        (swapped, "an image does not have the sha256 that it is listed with"),
        (table.slice(1), "its id is not the digest of its tokens, mask and images"),
        (pa.concat_tables([table, table.slice(1)]), "its id is not the digest"),
        (table.take([1, 0]), "its id is not the digest"),
    ):
        pq.write_table(wrong, tmp_path / "data/images-00000.parquet")
        content = (tmp_path / "data/images-00000.parquet").read_bytes()
        file = FileEntry(path="images-00000.parquet", size=len(content), sha256=documents.sha256_hex(content))
        images = data.info.images.model_copy(update={"files": (file,)})
        (tmp_path / "data/data.json").write_bytes(seal(data.info.model_copy(update={"images": images})))
        with pytest.raises(FormatError, match=reason):
            list(PreparedInput.open(tmp_path / "data").samples())


def test_a_target_without_an_image_processor_says_so_at_the_first_image(target: LoadedTarget, tmp_path: Path) -> None:
    folder = save_image_target(tmp_path / "bare")
    (folder / "preprocessor_config.json").unlink()
    assert prepare([write_rows(tmp_path / "chats.jsonl", [chat(1)])], tmp_path / "text", str(folder)).samples == 1
    rows = write_rows(tmp_path / "rows.jsonl", [about(openai_part(data_uri(noise(16, 16, 1))))])
    with pytest.raises(ConfigError, match="has neither preprocessor_config") as caught:
        prepare([rows], tmp_path / "data", str(folder))
    assert caught.value.kind == Kind.TARGET_INCOMPLETE


def test_every_other_family_refuses_images_by_name(tmp_path: Path) -> None:
    folder = open_target(str(save_image_target(tmp_path / "gemma", "gemma3-vision")))
    assert open_images(folder) is None
    row = Row("x:1", about(openai_part("a.png")), 1)
    problem = parse_row(row, open_images(folder) is not None)
    assert problem.reason == "content-not-text"  # type: ignore[union-attr]
    assert "a part of type 'image_url'; only text can be used" in problem.detail  # type: ignore[union-attr]


def test_the_cross_check_runs_a_sample_with_its_images(target: LoadedTarget, tmp_path: Path) -> None:
    from collectors.checks.capture import CheckSpec

    samples = list(prepared(tmp_path, target, [about(openai_part("a.png")), chat(2)]).samples())
    requests = [request_of(sample) for sample in samples]
    captured = HfEngine(target, EngineOptions(LAYERS, 256)).capture(requests)
    spec = CheckSpec(LAYERS, "pre_norm")
    assert CrossCheck(target, spec, 4).unit(samples, requests, captured) == 2
    blind = [Sample(s.id, s.input_ids, s.loss_mask, s.spans, s.split) for s in samples]
    with pytest.raises(CaptureError, match="differs from Hugging Face's"):
        CrossCheck(target, spec, 4).unit(blind, requests, captured)
