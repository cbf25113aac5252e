"""A GGUF target is the checkpoint it was written from, and what its reader would drop is refused by name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import decoders, normalizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GenerationConfig, Lfm2Config

from collectors.demo import TARGET_DIR
from hiddenstore.errors import ConfigError, NotFoundError, StorageError
from hiddenstore.targets import gguf as module
from hiddenstore.targets.folder import open_target
from hiddenstore.targets.gguf import RECORD_FILE, target_folder

LFM2 = Lfm2Config()
TEXTS = ["What does `json.dumps` do?\n\n  It's 12345 times.", "naïve café 漢字 🙂\t<|user|>hi"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIDDENSTORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_gguf(
    path: Path,
    form: str = "BF16",
    pre: str = "gpt-2",
    without: str = "",
    scaling: str = "",
    biases: tuple[str, ...] = (),
    **fields: Any,
) -> Path:
    """The bundled target as llama.cpp's converter writes a Llama: pairs of rotary channels side by side."""
    config, tokenizer = AutoConfig.from_pretrained(TARGET_DIR), AutoTokenizer.from_pretrained(TARGET_DIR)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].__getitem__))
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    writer.add_token_types([3 if token in special else 1 for token in range(config.vocab_size)])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, value in fields.items():
        writer.add_uint32(f"llama.{name.replace('__', '.')}", value)
    if scaling:
        writer.add_string("llama.rope.scaling.type", scaling)
        writer.add_tensor("rope_freqs.weight", np.ones(16, dtype=np.float32))
    for name in biases:
        writer.add_tensor(name, np.ones(config.hidden_size, dtype=np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in load_file(TARGET_DIR / "model.safetensors").items():
        weight = tensor.float()
        if count := next((count for part, count in heads.items() if part in name), None):
            weight = weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        short = names.get_name(name, try_suffixes=(".weight",))
        if short == without:
            continue
        kind = gguf.GGMLQuantizationType[form if weight.ndim > 1 else "F32"]
        writer.add_tensor(short, gguf.quants.quantize(weight.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_bf16_file_is_the_checkpoint_it_was_written_from(tmp_path: Path) -> None:
    folder = target_folder(str(write_gguf(tmp_path / "small.gguf")))
    written, expected = (load_file(Path(at) / "model.safetensors") for at in (folder, TARGET_DIR))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    one, other = (AutoTokenizer.from_pretrained(at) for at in (folder, TARGET_DIR))
    assert one(TEXTS, add_special_tokens=False).input_ids == other(TEXTS, add_special_tokens=False).input_ids
    assert (one.bos_token, one.eos_token) == (other.bos_token, other.eos_token)
    assert one.chat_template == other.chat_template
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2
    # transformers computes the same with it, rotary order included.
    ids = torch.tensor([one(TEXTS[0]).input_ids])
    logits = [AutoModelForCausalLM.from_pretrained(at)(ids).logits for at in (folder, TARGET_DIR)]
    assert torch.equal(*logits)


def test_a_quantised_file_is_what_its_codes_say(tmp_path: Path) -> None:
    folder = Path(target_folder(str(write_gguf(tmp_path / "small.gguf", "Q8_0"))))
    name = "model.layers.3.mlp.down_proj.weight"
    weight = load_file(TARGET_DIR / "model.safetensors")[name].float().numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    codes = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    written = load_file(folder / "model.safetensors")[name]
    assert written.dtype is torch.bfloat16
    assert np.array_equal(written.float().numpy(), torch.from_numpy(codes).bfloat16().float().numpy())
    assert json.loads((folder / RECORD_FILE).read_text())["tensors"]["Q8_0"] == 57


def test_a_file_is_converted_once_and_another_one_anew(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf")
    first = target_folder(str(path))
    weights = Path(first) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert (target_folder(str(path)), weights.stat().st_mtime_ns) == (first, written)
    assert target_folder(str(write_gguf(path, "F16"))) != first
    assert len(list((cache / "gguf").iterdir())) == 2


def test_the_quantisation_is_said_each_time_a_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module.output(), "note", said.append)
    path = str(write_gguf(tmp_path / "small.gguf", "Q8_0"))
    folder = target_folder(path)
    target_folder(path)
    assert [line.split(" ", 1)[0] for line in said] == ["converting", "small.gguf"]
    assert all("57 Q8_0" in line and folder in line for line in said)


@pytest.mark.parametrize(("form", "bytes_of_256"), [("Q8_K", 292), ("F64", 2048)])
def test_a_quantisation_that_the_reader_cannot_undo_is_refused_with_those_it_can(
    tmp_path: Path, cache: Path, form: str, bytes_of_256: int
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    codes = np.zeros((2, bytes_of_256), dtype=np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", codes, raw_dtype=gguf.GGMLQuantizationType[form])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=f"holds {form}, which nothing here dequantises") as caught:
        target_folder(str(tmp_path / "odd.gguf"))
    assert caught.value.kind == "target-unreadable"
    assert "Q4_K_M" in str(caught.value.hint)
    assert not cache.exists()


def test_two_processes_that_convert_one_file_both_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, convert = write_gguf(tmp_path / "small.gguf"), module._write_model

    def while_another_does(*words: Any) -> None:
        monkeypatch.setattr(module, "_write_model", convert)
        assert target_folder(str(path))
        convert(*words)

    monkeypatch.setattr(module, "_write_model", while_another_does)
    assert (Path(target_folder(str(path))) / RECORD_FILE).is_file()


def test_a_cache_that_cannot_be_written_is_said_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HIDDENSTORE_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError) as caught:
        target_folder(str(write_gguf(tmp_path / "small.gguf")))
    assert "HIDDENSTORE_CACHE" in str(caught.value.hint)


def test_a_folder_with_one_file_is_that_file_and_with_two_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    write_gguf(folder / "small.gguf")
    assert open_target(str(folder)).label == "small"
    (folder / "second.gguf").write_bytes((folder / "small.gguf").read_bytes())
    with pytest.raises(ConfigError, match=r"several GGUF files: second.gguf, small.gguf") as caught:
        target_folder(str(folder))
    assert caught.value.hint == f"--target '{folder}/second.gguf'"


def test_the_ending_of_a_file_may_be_in_capitals(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "SMALL.GGUF")
    assert open_target(str(path)).label == open_target(str(tmp_path)).label == "SMALL"


def test_a_tokenizer_that_cannot_be_read_is_said_before_any_weight_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "small.gguf")
    (tmp_path / "tokenizer.json").write_text("{")
    monkeypatch.setattr(module, "_write_model", lambda *_: pytest.fail("weights were converted"))
    with pytest.raises(ConfigError, match=r"small\.gguf has a tokenizer\.json beside it that transformers cannot read"):
        target_folder(str(path))
    (tmp_path / "tokenizer.json").unlink()
    reader = gguf.GGUFReader(path, "r+")
    # A vocabulary of a kind that nobody knows, as in files of a later release.
    reader.fields["tokenizer.ggml.model"].parts[-1][:] = np.frombuffer(b"gpt9", dtype=np.uint8)
    reader.data.flush()
    with pytest.raises(ConfigError, match=r"small\.gguf has a tokenizer that transformers cannot read: ") as caught:
        target_folder(str(path))
    assert caught.value.kind == "target-unreadable"


def test_folders_and_hub_ids_stay_what_they_are(tmp_path: Path) -> None:
    assert target_folder(str(TARGET_DIR)) == str(TARGET_DIR)
    assert target_folder("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    with pytest.raises(NotFoundError, match=r"nope\.gguf does not exist"):
        target_folder(str(tmp_path / "nope.gguf"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "poro-chat"}, "splits text by the rule 'poro-chat'"),
        ({"without": "blk.2.ffn_up.weight"}, r"lacks model\.layers\.2\.mlp\.up_proj\.weight"),
        ({"rope__scaling__factor": 8}, r"stretches its rotary frequencies \(llama\.rope\.scaling\.factor\)"),
        ({"scaling": "none"}, r"stretches its rotary frequencies \(rope_freqs\.weight\)"),
        (
            {"biases": ("blk.1.attn_q.bias", "blk.3.attn_q.bias")},
            r"holds blk\.1\.attn_q\.bias, blk\.3\.attn_q\.bias \(384 values in all\), which transformers' reader drops",
        ),
        ({"attention__sliding_window": 512}, r"says llama\.attention\.sliding_window=512"),
        ({"attention__key_length": 64}, r"says llama\.attention\.key_length=64"),
    ],
)
def test_what_the_reader_would_drop_is_refused_by_name(
    tmp_path: Path, cache: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        target_folder(str(write_gguf(tmp_path / "small.gguf", **fields)))
    assert not list(cache.rglob("model.safetensors"))


def test_a_field_that_says_what_the_config_says_is_no_loss(tmp_path: Path) -> None:
    assert Path(target_folder(str(write_gguf(tmp_path / "small.gguf", attention__key_length=32)))).is_dir()


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["a", "Ġ", "1", "2", "0", "Ġit", "'s", "ĠaB"]),
        # A capital within a word begins another.
        ("tekken", ["a", "Ġ", "1", "2", "0", "Ġit", "'s", "Ġa", "B"]),
    ],
)
def test_the_rule_of_another_family_splits_as_its_own_tokenizer(tmp_path: Path, pre: str, expected: list[str]) -> None:
    folder = target_folder(str(write_gguf(tmp_path / "small.gguf", pre=pre)))
    pieces = AutoTokenizer.from_pretrained(folder).backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 120 it's aB")
    assert [piece for piece, _ in pieces] == expected


@pytest.mark.parametrize(
    ("config", "architecture", "fields", "lost"),
    [
        (Gemma2Config(), "gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, None),
        (Gemma2Config(), "gemma2", {"final_logit_softcapping": 20.0}, "final_logit_softcapping=20.0"),
        (
            LFM2,
            "lfm2",
            {"attention.head_count_kv": [0, 8], "shortconv.l_cache": 3, "vocab_size": LFM2.vocab_size},
            None,
        ),
        (LFM2, "lfm2", {"attention.head_count_kv": [0, 8], "attention.scale": 0.5}, "attention.scale=0.5"),
    ],
)
def test_fields_are_lost_where_neither_the_reader_nor_its_config_knows_them(
    config: Any, architecture: str, fields: dict[str, Any], lost: str | None
) -> None:
    values = {"general.architecture": architecture} | {f"{architecture}.{name}": fields[name] for name in fields}
    reader: Any = SimpleNamespace(fields={name: Mock(**{"contents.return_value": values[name]}) for name in values})
    if lost is None:
        module._require_same(Path("a.gguf"), reader, config)
    else:
        with pytest.raises(ConfigError, match=rf"says {architecture}\.{lost}, which"):
            module._require_same(Path("a.gguf"), reader, config)


def test_the_rules_of_a_tokenizer_are_of_the_file_and_not_of_the_release_that_read_it(tmp_path: Path) -> None:
    folder = target_folder(str(write_gguf(tmp_path / "small.gguf", pre="smollm")))
    backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    rules = backend.to_str()
    # As transformers 5.17 converts.
    backend.normalizer = normalizers.Sequence([])
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()])
    backend.model.unk_token, backend.model.fuse_unk, backend.model.byte_fallback = "<|endoftext|>", True, True
    assert backend.to_str() != rules
    module._settle(backend)
    assert backend.to_str() == rules


def test_a_tokenizer_beside_the_file_wins(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", pre="poro-chat")
    (tmp_path / "tokenizer.json").write_bytes((TARGET_DIR / "tokenizer.json").read_bytes())
    one, other = (AutoTokenizer.from_pretrained(at) for at in (target_folder(str(path)), TARGET_DIR))
    assert one(TEXTS).input_ids == other(TEXTS).input_ids
    assert (one.eos_token_id, one.chat_template) == (other.eos_token_id, other.chat_template)


@pytest.mark.parametrize("keep", [0, 3, 100, 20_000, -5000])
def test_a_file_cut_anywhere_is_named(tmp_path: Path, keep: int) -> None:
    path = write_gguf(tmp_path / "small.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"small\.gguf is no whole GGUF file"):
        target_folder(str(path))
