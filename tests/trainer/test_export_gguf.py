"""Drafters as llama.cpp's GGUF files: written whole, read back alike, and refused where they differ."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader

from hiddenstore.errors import ConfigError, ConflictError, FormatError, HiddenstoreError, Kind, StorageError
from tests.trainer.export_cases import IDENTITY, KINDS, LAYERS, U, case, make
from tests.trainer.gguf_target import rewritten, write_target
from trainer.export.published import read_published
from trainer.export.write import export
from trainer.formats import gguf
from trainer.formats.base import Checkpoint
from trainer.serve.drafter import read_drafter

TAKEN = [
    name
    for name, (drafter, _, flags) in KINDS.items()
    if drafter in ("eagle3", "dflash", "dspark", "dflash2")
    and not flags.keys() & {"fc_norm", "num_layers", "sliding_window", "layer_types"}
]
SCALINGS = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 30.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 128},
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_target(tmp_path_factory.mktemp("target") / "target.gguf")


def written(checkpoint: Checkpoint, out: Path, target: str | None, dtype: str = "float32") -> Path:
    export(replace(checkpoint, target_name=target), "llamacpp", out, dtype)
    return out


def fields(path: Path | str) -> dict[str, object]:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


@pytest.mark.parametrize("name", TAKEN)
def test_the_file_holds_the_drafter_bit_for_bit_in_its_dtype(name: str, target: str, tmp_path: Path) -> None:
    done = export(replace(case(name), target_name=target), "llamacpp", tmp_path / "drafter.gguf")
    assert (done.dtype, done.layer_ids, done.bytes) == ("bfloat16", [2, 4, 5], done.path.stat().st_size)
    kinds = {tensor.name: tensor.tensor_type for tensor in GGUFReader(done.path).tensors}
    assert kinds["fc.weight"] == GGMLQuantizationType.BF16
    assert kinds["output_norm.weight"] == kinds["blk.0.attn_norm.weight"] == GGMLQuantizationType.F32
    assert kinds.get("d2t", GGMLQuantizationType.I64) == GGMLQuantizationType.I64


def test_a_causal_block_is_told_to_llama_cpp_and_read_back(target: str, tmp_path: Path) -> None:
    """b11434 reads ``dflash.attention.causal``, and takes a file without it for a block that sees all."""
    files = {name: written(case(name), tmp_path / f"{name}.gguf", target) for name in ("dflash", "jetspec")}
    assert fields(files["jetspec"])["dflash.attention.causal"] is True
    assert "dflash.attention.causal" not in fields(files["dflash"])
    for name, file in files.items():
        assert read_published(file, case(name).head, LAYERS).config.causal is (name == "jetspec")


def test_every_slot_of_a_dspark_proposes_where_its_file_does_not_say(target: str, tmp_path: Path) -> None:
    """b11434 tells a DSpark by its Markov head (``dflash.cpp``)."""
    checkpoint = make("dspark")
    out = written(checkpoint, tmp_path / "a.gguf", target)
    silent = rewritten(out, tmp_path / "b.gguf", {gguf.ABOUT: "{}"}, without="dflash.sample_from_anchor")
    assert read_published(silent, checkpoint.head, LAYERS).config.sample_from_anchor
    served = read_drafter(silent)
    assert (served.method, served.longest) == ("dspark", checkpoint.config.block_size)


@pytest.mark.parametrize("rope", SCALINGS, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("drafter", ["eagle3", "dflash"])
def test_stretched_rope_comes_back_as_it_was(
    drafter: str, rope: dict[str, object], target: str, tmp_path: Path
) -> None:
    out = written(make(drafter, rope_scaling=rope), tmp_path / "a.gguf", target)
    config, _ = gguf.read(out)
    assert config["rope_scaling"] == rope
    factors = [tensor.data for tensor in GGUFReader(out).tensors if tensor.name == "rope_freqs.weight"]
    assert len(factors) == (rope["rope_type"] == "llama3")
    if factors:
        assert factors[0][0] == 1
        assert factors[0][-1] == pytest.approx(8)


def test_neighbouring_channels_of_a_head_are_its_halves_interleaved(target: str, tmp_path: Path) -> None:
    checkpoint = case("eagle3")
    out = written(checkpoint, tmp_path / "a.gguf", target)
    rows = next(tensor.data for tensor in GGUFReader(out).tensors if tensor.name == "blk.0.attn_q.weight")
    plain = checkpoint.model.state_dict()["midlayer.self_attn.q_proj.weight"]
    assert torch.equal(torch.from_numpy(rows[:4].copy()), plain[[0, 8, 1, 9]])


def test_the_vocabulary_is_the_target_s_field_by_field_and_d2t_names_its_tokens(target: str, tmp_path: Path) -> None:
    out = written(case("eagle3"), tmp_path / "a.gguf", target)
    own, other = fields(out), fields(target)
    names = [name for name in other if name.startswith("tokenizer.")]
    assert len(names) > 6
    assert {name: own[name] for name in names} == {name: other[name] for name in names}
    ids = next(tensor.data for tensor in GGUFReader(out).tensors if tensor.name == "d2t")
    assert ids.tolist() == case("eagle3").vocab.target_ids.tolist()


def test_a_folder_holds_the_file_and_either_is_read(target: str, tmp_path: Path) -> None:
    folder = written(case("dflash"), tmp_path / "folder", target)
    assert [file.name for file in folder.iterdir()] == ["drafter.gguf"]
    for place in (folder, folder / "drafter.gguf"):
        found = read_published(place, case("dflash").head, LAYERS)
        assert (found.config.name, found.config.mask_token_id, found.config.block_size) == ("dflash", 7, 4)
        assert tuple(found.config.aux_layers) == (1, 3, 4)


def test_a_quantised_file_is_read_as_what_it_multiplies_by(target: str, tmp_path: Path) -> None:
    """As llama-quantize leaves a drafter: its matrices in Q8_0, everything else as it was."""
    out = written(case("eagle3"), tmp_path / "a.gguf", target)
    small = rewritten(out, tmp_path / "small.gguf", {}, quantised="ffn_up.weight")
    exact, rounded = (gguf.read(file)[1]["midlayer.mlp.up_proj.weight"] for file in (out, small))
    assert 0 < (exact - rounded).abs().max() < 0.02


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"num_layers": 2}, "has one layer"),
        ({"fc_norm": True}, "which no weights make up for"),
        ({"aux_layers": (1, 3, 7)}, "nothing enters one after the last"),
        ({"aux_layers": (1, 3)}, "three aux layers"),
        ({"rope_scaling": {**SCALINGS[1], "attention_factor": 1.5}}, "its own attention factor"),
    ],
)
def test_what_llama_cpp_has_no_place_for_is_refused_with_the_reason(
    flags: dict[str, object], reason: str, target: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason) as said:
        written(make("eagle3", U, **flags), tmp_path / "a.gguf", target)
    assert said.value.kind is Kind.EXPORT_UNSUPPORTED
    assert not list(tmp_path.iterdir())


def test_a_target_that_is_missing_no_gguf_or_another_is_refused(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file that happens to lie in the current folder is nobody's word.
    monkeypatch.chdir(Path(target).parent)
    other = write_target(tmp_path / "other.gguf", layers=9)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(target).read_bytes()[:200])
    for named, kind, text in (
        (None, Kind.OPTION_INVALID, "--target names none"),
        ("maker/target", Kind.OPTION_INVALID, "--target names none"),
        (str(tmp_path / "no.gguf"), Kind.PATH_MISSING, "does not exist"),
        (str(broken), Kind.DRAFTER_UNFIT, "no whole GGUF file"),
        (other, Kind.TARGET_MISMATCH, "num_layers: 8 expected, 9 found"),
    ):
        with pytest.raises(HiddenstoreError, match=text) as said:
            written(case("eagle3"), tmp_path / "out.gguf", named)
        assert said.value.kind is kind
    assert sorted(file.name for file in tmp_path.iterdir()) == ["broken.gguf", "other.gguf"]


def test_a_name_that_is_taken_stays_what_it_was(target: str, tmp_path: Path) -> None:
    out = tmp_path / "drafter.gguf"
    out.write_text("mine")
    with pytest.raises(ConflictError):
        written(case("eagle3"), out, target)
    assert out.read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == ["drafter.gguf"]


def test_what_a_killed_export_left_beside_its_file_goes_with_the_next(target: str, tmp_path: Path) -> None:
    left = tmp_path / "out" / ".a.gguf.writing-0123abcd"
    left.mkdir(parents=True)
    (left / "drafter.gguf").write_bytes(b"half")
    out = written(case("eagle3"), tmp_path / "out" / "a.gguf", target)
    assert [file.name for file in out.parent.iterdir()] == ["a.gguf"]


def test_a_folder_that_cannot_be_made_is_a_storage_error_and_leaves_nothing(target: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"/file: File exists"):
        written(case("eagle3"), tmp_path / "file" / "drafter.gguf", target)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_part_of_the_target_lies_among_the_target_s_own_fields_and_tables(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target.gguf", architecture="qwen35")
    out = written(case("mtp of Qwen3.5"), tmp_path / "a.gguf", target)
    own, other = fields(out), fields(target)
    changed = {name for name, value in own.items() if name.startswith("qwen35.") and value != other.get(name)}
    assert {name: own[name] for name in changed} == {
        "qwen35.block_count": LAYERS + 1,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.attention.recurrent_layers": [True, True, True, False] * 2 + [False],
    }
    tables, theirs = ({tensor.name: tensor for tensor in GGUFReader(file).tensors} for file in (out, target))
    assert tables["token_embd.weight"].tensor_type == GGMLQuantizationType.Q8_0
    assert (tables["token_embd.weight"].data == theirs["token_embd.weight"].data).all()
    assert {name.split(".")[1] for name in tables if name.startswith("blk.")} == {str(LAYERS)}
    # A target's file that has the layer itself says the same.
    inside = {"qwen35.block_count": LAYERS + 1, "qwen35.nextn_predict_layers": 1}
    with_one = rewritten(Path(target), tmp_path / "with.gguf", inside, without="qwen35.attention.recurrent_layers")
    again = fields(written(case("mtp of Qwen3.5"), tmp_path / "b.gguf", str(with_one)))
    assert {name: again[name] for name in inside} == inside
    # And one that has two of them.
    deep = write_target(tmp_path / "deep.gguf", layers=LAYERS + 2, architecture="qwen35")
    with_two = rewritten(Path(deep), tmp_path / "two.gguf", {"qwen35.nextn_predict_layers": 2})
    third = fields(written(case("mtp of Qwen3.5"), tmp_path / "c.gguf", str(with_two)))
    assert third["qwen35.attention.recurrent_layers"] == [True, True, True, False] * 2 + [False]


def test_an_mtp_layer_of_another_family_or_of_several_is_refused(target: str, tmp_path: Path) -> None:
    qwen = write_target(tmp_path / "qwen.gguf", architecture="qwen35")
    with pytest.raises(FormatError, match="is llama, and the MTP layer is one of qwen35") as said:
        written(case("mtp of Qwen3.5"), tmp_path / "a.gguf", target)
    assert said.value.kind is Kind.TARGET_MISMATCH
    with pytest.raises(ConfigError, match=r"only with Qwen3\.5's") as unsupported:
        written(case("mtp"), tmp_path / "a.gguf", qwen)
    assert unsupported.value.kind is Kind.EXPORT_UNSUPPORTED
    split = tmp_path / "split.gguf"
    split.write_bytes(Path(qwen).read_bytes().replace(b"token_embd.weight", b"token_othr.weight"))
    with pytest.raises(ConfigError, match=r"no token_embd\.weight, .* one file of several") as lacking:
        written(case("mtp of Qwen3.5"), tmp_path / "a.gguf", str(split))
    assert lacking.value.kind is Kind.OPTION_INVALID
    assert not (tmp_path / "a.gguf").exists()
    out = written(case("mtp of Qwen3.5"), tmp_path / "b.gguf", qwen)
    _refused(rewritten(out, tmp_path / "c.gguf", {"qwen35.nextn_predict_layers": 2}), "nextn_predict_layers is 2")


def _refused(path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as said:
        read_published(path, case("eagle3").head, LAYERS)
    assert said.value.kind is Kind.DRAFTER_UNFIT


def test_a_file_of_another_kind_or_with_more_than_a_drafter_here_has_is_refused(target: str, tmp_path: Path) -> None:
    _refused(Path(target), "is llama; drafters are eagle3, dflash, qwen35")
    for name, field, text in (
        ("eagle3", "norm_before_fc", "norms all layers as one"),
        ("dflash", "attention.sliding_window", "which DFlash here has not"),
    ):
        out = written(case(name), tmp_path / f"{name}.gguf", target)
        changed = rewritten(out, tmp_path / f"{name}-changed.gguf", {f"{name}.{field}": True})
        _refused(changed, text)


def test_kernels_of_convolutions_are_fp32_and_a_selector_s_sizes_are_fields(target: str, tmp_path: Path) -> None:
    out = written(case("dflash2"), tmp_path / "a.gguf", target, "bfloat16")
    kinds = {tensor.name: tensor.tensor_type for tensor in GGUFReader(out).tensors}
    # llama.cpp adds the kernel to fp32, and gathers the rows of a codebook.
    assert kinds["blk.1.attn_conv_base"] == kinds["blk.0.ffn_conv_base"] == GGMLQuantizationType.F32
    assert kinds["blk.0.ffn_conv_proj.weight"] == kinds["selector_successor.weight"] == GGMLQuantizationType.BF16
    said = fields(out)
    sizes = {name: said[f"dflash.{name}"] for name in ("conv_kernel_size", "conv_group_size")}
    assert sizes == {"conv_kernel_size": 2, "conv_group_size": 8}
    assert (said["dflash.selector_rank"], said["dflash.selector_top_k"]) == (6, 5)


def test_a_selector_that_scales_logits_or_asks_for_too_wide_a_row_is_refused(target: str, tmp_path: Path) -> None:
    out = written(case("dflash2"), tmp_path / "a.gguf", target)
    _refused(rewritten(out, tmp_path / "b.gguf", {"dflash.logit_scale": 0.5}), "output_multiplier is 0.5")
    _refused(rewritten(out, tmp_path / "c.gguf", {}, without="dflash.selector_top_k"), "lack 'selector_top_k'")
    with pytest.raises(ConfigError, match="one row as wide as the drafter") as said:
        written(make("dflash2", selector_top_k=6), tmp_path / "d.gguf", target)
    assert "smaller drafter.selector_top_k" in str(said.value.hint)


@pytest.mark.parametrize("field", [gguf.MASK, "dflash.block_count"])
def test_a_field_that_is_missing_is_named_in_full(field: str, target: str, tmp_path: Path) -> None:
    out = written(case("dflash"), tmp_path / "a.gguf", target)
    _refused(rewritten(out, tmp_path / "b.gguf", {}, without=field), f"lacks the field {field}")


def test_a_field_of_another_kind_or_size_than_a_drafter_has_is_refused(target: str, tmp_path: Path) -> None:
    qwen = write_target(tmp_path / "qwen.gguf", architecture="qwen35")
    eagle, mtp = (
        written(case(name), tmp_path / f"{number}.gguf", of)
        for number, (name, of) in enumerate((("eagle3", target), ("mtp of Qwen3.5", qwen)))
    )
    changes: list[tuple[Path, str, str | int | float, str]] = [
        (eagle, "tokenizer.ggml.tokens", 1.5, "cannot be had here"),
        (eagle, "eagle3.attention.head_count", "x", "which are no 'x' heads"),
        (eagle, "eagle3.attention.head_count_kv", 4_000_000_000, "16 rows in .*, which are no 4000000000 heads"),
        (mtp, "qwen35.attention.key_length", "x", "cannot be had here"),
    ]
    for number, (out, field, value, text) in enumerate(changes):
        _refused(rewritten(out, tmp_path / f"changed-{number}.gguf", {field: value}), text)


def test_more_layers_than_tensors_are_refused_before_their_names_are_made(target: str, tmp_path: Path) -> None:
    out = written(case("dflash"), tmp_path / "a.gguf", target)
    changed = rewritten(out, tmp_path / "b.gguf", {"dflash.block_count": 40_000})
    _refused(changed, "names 40000 layers, and holds")


def test_what_a_file_says_of_itself_is_checked_as_beside_a_folder(target: str, tmp_path: Path) -> None:
    out = written(case("dflash"), tmp_path / "a.gguf", target)
    _refused(rewritten(out, tmp_path / "b.gguf", {gguf.ABOUT: "[1]"}), "is no JSON object")
    for name, said in (("c", '{"draft_len": "3"}'), ("d", '{"target": [1]}')):
        with pytest.raises(ConfigError, match="expected a whole number above 0 and an object") as caught:
            read_drafter(rewritten(out, tmp_path / f"{name}.gguf", {gguf.ABOUT: said}))
        assert caught.value.kind is Kind.SERVE_SETTING


def test_frequencies_stretched_by_a_rule_the_file_does_not_name_are_refused(target: str, tmp_path: Path) -> None:
    out = written(make("eagle3", rope_scaling=SCALINGS[2]), tmp_path / "a.gguf", target)
    reader = GGUFReader(out, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight").data[:] *= 2
    reader.data.flush()
    _refused(out, "does not name the rule")


def test_the_file_says_for_whom_it_was_written(target: str, tmp_path: Path) -> None:
    out = written(replace(case("eagle3"), draft_len=5), tmp_path / "a.gguf", target)
    _, about = gguf.about_file(out)
    assert (about["drafter"], about["engine"], about["draft_len"]) == ("eagle3", "llamacpp", 5)
    assert about["target"] == json.loads(IDENTITY.model_dump_json())
    with pytest.raises(FormatError, match="num_layers"):
        written(case("eagle3"), tmp_path / "b.gguf", write_target(tmp_path / "other.gguf", layers=7))
