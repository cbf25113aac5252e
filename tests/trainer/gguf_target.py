"""The target of the export cases as a GGUF file: its dimensions and a vocabulary, and no tensors."""

from pathlib import Path

from gguf import GGUFWriter, TokenType

from tests.trainer.export_cases import LAYERS, D, V


def write_target(path: Path, layers: int = LAYERS) -> str:
    """The path of the file."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_embedding_length(D)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{i}>" for i in range(V)])
    writer.add_token_types([TokenType.CONTROL if i < 2 else TokenType.NORMAL for i in range(V)])
    writer.add_token_merges(["a b", "ä ö"])
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return str(path)
