"""Writes the table of docs/targets.md from the tests' own tables: ``python -m tests.targets_page``."""

from pathlib import Path

from collectors.targets.images import FAMILIES as WITH_IMAGES
from tests import test_family_pipeline as pipeline
from tests.collectors import test_families as families
from tests.collectors.tiny import CONFIGS
from tests.collectors.tiny_families import IN_VLLM, MORE, RUNNING_STATE, WITH_VISION, more_config

PAGE = Path(__file__).parents[1] / "docs" / "targets.md"
BEGIN, END = "<!-- python -m tests.targets_page -->\n", "<!-- end -->\n"
OWN = families.test_captured_states_and_bundle_logits_equal_transformers_own
SAVED = families.test_a_saved_target_of_a_larger_family_is_captured_equal_to_transformers
PATH = pipeline.test_a_drafter_is_trained_for_the_family_and_decoded_where_tokens_can_be_taken_back
PUBLISHED = {
    "llama": "Llama 2, 3, 3.1, 3.2 text, SmolLM2",
    "mistral": "Mistral 7B, Small (text)",
    "phi3": "Phi 3, 3.5, 4",
    "qwen2": "Qwen 1.5, 2, 2.5",
    "gpt-oss": "gpt-oss 20b, 120b",
    "deepseek-v3": "DeepSeek V3, R1",
    "glm4-moe": "GLM-4.5, 4.6",
    "llama4": "the text model of Llama 4 alone",
    "llama4-vision": "Llama 4 Scout, Maverick",
    "minimax": "MiniMax Text 01",
    "ministral3": "Ministral 3",
    "qwen3-next": "Qwen3-Next",
    "qwen3.5": "Qwen 3.5 (dense)",
    "qwen3.5-moe": "Qwen 3.5 (experts)",
    "minimax-m3": "the text model of MiniMax M3 alone",
    "granite-swa": "Granite Swash",
    "granitemoe-swa": "Granite Swash (experts)",
    "granitemoe-hybrid": "Granite 4.0",
    "nemotron-h": "Nemotron-H, Nemotron 3 Nano",
    "gemma3-vision": "Gemma 3 4B, 12B, 27B",
    "gemma3": "Gemma 3 270M, 1B",
    "mistral3": "Mistral Small 3.1, 3.2",
    "qwen2.5-vl": "Qwen2.5-VL",
    "qwen3-vl": "Qwen3-VL",
    "mllama": "Llama 3.2 Vision 11B, 90B",
}


def table() -> str:
    """A row for each tiny target: its model type, what captures, trains and decodes it, and the engines."""
    lines = ["| model type | for example | capture | train | decode | engines |", "|---|---|---|---|---|---|"]
    for family in (*CONFIGS, *MORE):
        config = CONFIGS[family]() if family in CONFIGS else more_config(family)
        inner = config.get_text_config(decoder=True).model_type
        kind = f"`{config.model_type}`" + (f" › `{inner}`" if family in WITH_VISION else "")
        captured = f"{'own' if family in CONFIGS else 'saved'}[{family}]"
        captured += ", images" if config.model_type in WITH_IMAGES else ""
        decoded = "no: running state" if family in RUNNING_STATE else f"path[{family}]"
        engines = "hf, vllm, trtllm" if family == "llama" else f"hf, in vllm[{family}]" if family in IN_VLLM else "hf"
        example = PUBLISHED.get(family, "")
        lines.append(f"| {kind} | {example} | {captured} | path[{family}] | {decoded} | {engines} |")
    ids = {word: f"{test.__module__.replace('.', '/')}.py::{test.__name__}" for word, test in TESTS.items()}
    names = [f"* **{word}**: `{name}`" for word, name in (ids | OF_ENGINES).items()]
    return "\n".join([*lines, "", *names, ""])


TESTS = {"own": OWN, "saved": SAVED, "path": PATH}
# Their modules need an engine, a double of it, or Pillow.
OF_ENGINES = {
    "in vllm": "tests/engines/test_engine_families.py::"
    "test_vllm_captures_what_hugging_face_does_and_accepts_what_decode_and_eval_foretell",
    "images": "tests/collectors/test_images.py::"
    "test_captured_states_equal_those_of_transformers_in_a_unit_of_images_and_text",
    "vllm": "tests/engines/test_capture.py::test_every_layer_equals_hugging_face",
    "trtllm": "tests/collectors/test_engine_trtllm.py::"
    "test_the_store_is_that_of_hugging_face_with_the_final_hidden_after_the_norm",
}

if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
