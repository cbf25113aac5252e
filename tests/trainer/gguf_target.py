"""The target of the export cases as a GGUF file (its dimensions, a vocabulary, and of Qwen3.5 its tables), and files
changed."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType, quantize

from tests.trainer.export_cases import LAYERS, D, E, F, G, N, V


def write_target(
    path: Path, layers: int = LAYERS, width: int = D, vocabulary: int = V, architecture: str = "llama"
) -> str:
    """The path of the file."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_embedding_length(width)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{i}>" for i in range(vocabulary)])
    writer.add_token_types([TokenType.CONTROL if i < 2 else TokenType.NORMAL for i in range(vocabulary)])
    writer.add_token_merges(["a b", "ä ö"])
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    if architecture == "qwen35":
        _add_qwen(writer, layers)
    finish(writer)
    return str(path)


def _add_qwen(writer: GGUFWriter, layers: int) -> None:
    writer.add_context_length(777)
    writer.add_feed_forward_length(F)
    writer.add_head_count(N)
    writer.add_head_count_kv(G)
    writer.add_key_length(E)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(E // 2)
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    writer.add_array("qwen35.attention.recurrent_layers", [i % 4 != 3 for i in range(layers)])
    table = quantize(np.random.default_rng(0).standard_normal((V, D), np.float32), GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", table, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(D, np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(D, np.float32))


def rewritten(
    source: Path, out: Path, fields: dict[str, bool | int | float | str], quantised: str = " ", without: str = " "
) -> Path:
    """A copy of a drafter's file with some fields set and one left out, and the tensors whose names end with
    ``quantised`` in Q8_0."""
    reader = GGUFReader(source)
    kinds = {name: field.types for name, field in reader.fields.items()}
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")) and name not in (*fields, without):
            sub_type = kinds[name][-1] if len(kinds[name]) > 1 else None
            writer.add_key_value(name, field.contents(), kinds[name][0], sub_type)
    for name, value in fields.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, float: writer.add_float32}[
            type(value)
        ]
        add(name, value)
    for tensor in reader.tensors:
        if tensor.name.endswith(quantised):
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, quantize(tensor.data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return out


def finish(writer: GGUFWriter) -> None:
    """Write the file out."""
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
