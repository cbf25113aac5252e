"""The presets: name → hub ids, configs, splits and the shape of a row. Another one is another row of the table."""

from dataclasses import dataclass
from typing import Any

from collectors.presets.shapes import (
    CONVERSATIONS,
    CONVERSATIONS_AND_SYSTEM,
    GENERATED_ANSWER,
    HERMES,
    INPUT_OUTPUT,
    INSTRUCTION,
    MESSAGES,
    MESSAGES_AND_METADATA,
    NEWS,
    QUESTIONS,
    UNFINISHED_CODE,
    Shape,
    pair,
    prompt,
)


@dataclass(frozen=True)
class Part:
    """One split of one config of one hub dataset."""

    hub: str
    split: str = "train"
    config: str | None = None

    def __str__(self) -> str:
        return f"{self.hub}{f'[{self.config}]' if self.config else ''}:{self.split}"


@dataclass(frozen=True)
class Preset:
    """A dataset by name. ``is_multilingual``: variants that ask for another language should leave it alone."""

    parts: tuple[Part, ...]
    shape: Shape
    about: str
    is_multilingual: bool = False


def _splits(hub: str, *splits: str, config: str | None = None) -> tuple[Part, ...]:
    return tuple(Part(hub, split, config) for split in splits)


def _one(hub: str, shape: Shape, about: str, split: str = "train", config: str | None = None) -> Preset:
    return Preset((Part(hub, split, config),), shape, about)


_MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
_V3_MATH = (
    *_splits("nvidia/Nemotron-Math-v2", "high_part00", "high_part01", "high_part02", "medium", "low"),
    *_splits("nvidia/Nemotron-SFT-Math-v3", "train"),
    *_splits("nvidia/Nemotron-Math-Proofs-v1", "lean"),
)
_V3_CODE = (
    *_splits(
        "nvidia/Nemotron-Competitive-Programming-v1",
        *(f"competitive_coding_{language}_part0{number}" for language in ("cpp", "python") for number in (0, 1)),
        *(f"infinibyte_part0{number}" for number in (0, 1)),
    ),
    *_splits(
        "nvidia/Nemotron-SFT-Competitive-Programming-v2",
        "exercism",
        "competitive_coding_python",
        "competitive_coding_cpp",
        "text_to_sql",
    ),
)
_V3_CHAT = (
    *_splits("nvidia/Nemotron-Instruction-Following-Chat-v1", "chat_if", "structured_outputs"),
    *_splits("nvidia/Nemotron-SFT-Instruction-Following-Chat-v2", "reasoning_off", "reasoning_on"),
)
_V3_SCIENCE = _splits("nvidia/Nemotron-Science-v1", "MCQ", "RQA")
_V3_SAFETY = _splits("nvidia/Nemotron-SFT-Safety-v1", "train")
_V3_FINANCE = _splits("nvidia/Nemotron-SpecializedDomains-Finance-v1", "train")
_V3_AGENTIC = (
    *_splits("nvidia/Nemotron-Agentic-v1", "interactive_agent", "tool_calling"),
    *_splits("nvidia/Nemotron-SFT-Agentic-v2", "interactive_agent", "search", "tool_calling"),
)
_V3_SWE = (
    *_splits("nvidia/Nemotron-SWE-v1", "r2e_gym"),
    *_splits("nvidia/Nemotron-SFT-SWE-v2", "agentless", "openhands_swe"),
)
_V3_OPENCODE = _splits(
    "nvidia/Nemotron-SFT-OpenCode-v1",
    *("general", "bash_only_tool", "bash_only_tool_skills"),
    *("question_tool", "agent_skills", "agent_skills_question_tool"),
)
_V3_MULTILINGUAL = _splits(
    "nvidia/Nemotron-SFT-Multilingual-v1",
    *(f"{topic}_{language}" for topic in ("code", "math", "stem") for language in ("de", "es", "fr", "it", "ja", "zh")),
)
_V2 = "nvidia/Nemotron-Post-Training-Dataset-v2"
_PERFECTBLEND = "frankleeeee/PerfectBlend-Regenerated-"

PRESETS: dict[str, Preset] = {
    "ultrachat": _one("HuggingFaceH4/ultrachat_200k", MESSAGES, "200k dialogues written by ChatGPT", "train_sft"),
    "sharegpt": _one("Aeala/ShareGPT_Vicuna_unfiltered", CONVERSATIONS, "120k dialogues people had with ChatGPT"),
    "perfectblend": _one("mlabonne/open-perfectblend", CONVERSATIONS, "1.4M of chat, math, code, instructions"),
    "perfectblend-llama3.1-8b": _one(
        f"{_PERFECTBLEND}Llama-3.1-8B-Instruct", CONVERSATIONS, "PerfectBlend answered by Llama 3.1 8B"
    ),
    "perfectblend-llama3.3-70b": _one(
        f"{_PERFECTBLEND}Llama-3.3-70B-Instruct", CONVERSATIONS, "PerfectBlend answered by Llama 3.3 70B"
    ),
    "perfectblend-llama4-scout": _one(
        f"{_PERFECTBLEND}Llama-4-Scout-17B-16E-Instruct", CONVERSATIONS, "PerfectBlend answered by Llama 4 Scout"
    ),
    "perfectblend-llama4-maverick": _one(
        f"{_PERFECTBLEND}Llama-4-Maverick-17B-128E-Instruct", CONVERSATIONS, "PerfectBlend answered by Llama 4 Maverick"
    ),
    "magpie": _one("Magpie-Align/Magpie-Llama-3.3-Pro-1M-v0.1", CONVERSATIONS, "1M of Llama 3.3 70B, unfiltered"),
    "magpie-500k": _one("Magpie-Align/Magpie-Llama-3.3-Pro-500K-Filtered", CONVERSATIONS, "500k of Llama 3.3 70B"),
    "magpie-300k": _one("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", CONVERSATIONS, "300k of Llama 3.1 70B"),
    "magpie-mt-300k": _one("Magpie-Align/Magpie-Pro-MT-300K-v0.1", CONVERSATIONS, "300k of several turns, Llama 3 70B"),
    "magpie-qwen2.5": _one("Magpie-Align/Magpie-Qwen2.5-Pro-1M-v0.1", CONVERSATIONS, "1M of Qwen2.5 72B, unfiltered"),
    "daring-anteater": _one("nvidia/Daring-Anteater", CONVERSATIONS_AND_SYSTEM, "100k of chat, math, JSON, roleplay"),
    "eaglechat": Preset(
        _splits("zhaode/EagleChat", "train"),
        CONVERSATIONS,
        "1M of chat in English and Chinese, for EAGLE",
        is_multilingual=True,
    ),
    # Its code split holds a dash for every question.
    "nemotron-v1": Preset(
        _splits("nvidia/Nemotron-Post-Training-Dataset-v1", "chat", "math", "stem", "tool_calling"),
        MESSAGES_AND_METADATA,
        "24M of chat, math, stem, tools; chat questions from LMSYS left out",
    ),
    "nemotron-v2": Preset(_splits(_V2, "chat", "code", "math", "stem"), MESSAGES, "English part of 6M (gated)"),
    "nemotron-v2-multilingual": Preset(
        _splits(_V2, *(f"multilingual_{language}" for language in ("de", "es", "fr", "it", "ja"))),
        MESSAGES,
        "the other languages of nemotron-v2 (gated)",
        is_multilingual=True,
    ),
    "nemotron-v3": Preset(
        (*_V3_MATH, *_V3_CODE, *_V3_CHAT, *_V3_SCIENCE, *_V3_SAFETY, *_V3_FINANCE),
        MESSAGES,
        "all of v3 below that is English and not an agent's work",
    ),
    "nemotron-v3-math": Preset(_V3_MATH, MESSAGES, "math and Lean proofs"),
    "nemotron-v3-code": Preset(_V3_CODE, MESSAGES, "competitive programming; some questions left out"),
    "nemotron-v3-chat": Preset(_V3_CHAT, MESSAGES, "chat and instructions"),
    "nemotron-v3-science": Preset(_V3_SCIENCE, MESSAGES, "multiple choice and open science questions"),
    "nemotron-v3-safety": Preset(_V3_SAFETY, MESSAGES, "refusals and safe answers"),
    "nemotron-v3-finance": Preset(_V3_FINANCE, MESSAGES, "finance"),
    "nemotron-v3-agentic": Preset(_V3_AGENTIC, MESSAGES, "agents with tools"),
    "nemotron-v3-swe": Preset(_V3_SWE, MESSAGES, "repairs of repositories, with tools"),
    "nemotron-v3-opencode": Preset(_V3_OPENCODE, MESSAGES, "coding at a terminal, with tools"),
    "nemotron-v3-multilingual": Preset(
        _V3_MULTILINGUAL, MESSAGES, "code, math, stem in six languages", is_multilingual=True
    ),
    "llama-nemotron": Preset(
        _splits("nvidia/Llama-Nemotron-Post-Training-Dataset", "chat", config="SFT"), INPUT_OUTPUT, "chat part"
    ),
    "smoltalk": _one("HuggingFaceTB/smoltalk", MESSAGES, "1M of instructions", config="all"),
    "tulu-3": _one("allenai/tulu-3-sft-mixture", MESSAGES, "940k, the SFT mixture of Tülu 3"),
    "hermes-tools": _one(
        "NousResearch/hermes-function-calling-v1", HERMES, "several turns with tool calls", config="func_calling"
    ),
    "openhermes": _one("teknium/OpenHermes-2.5", CONVERSATIONS, "1M of instructions, written by GPT-4"),
    "openthoughts": _one(
        "open-thoughts/OpenThoughts3-1.2M", CONVERSATIONS, "1.2M of math, code, science, with thoughts"
    ),
    "openthoughts-114k": _one(
        "open-thoughts/OpenThoughts-114k", CONVERSATIONS_AND_SYSTEM, "114k with thoughts in tags of their own"
    ),
    "infinity-llama3.1-8b": _one(
        "nebius/Llama-3.1-8B-Instruct-Infinity-Instruct-0625",
        GENERATED_ANSWER,
        "Infinity-Instruct answered by Llama 3.1 8B",
    ),
    "alpaca": _one("tatsu-lab/alpaca", INSTRUCTION, "52k instructions"),
    "codealpaca": _one("sahil2801/CodeAlpaca-20k", INSTRUCTION, "20k coding instructions"),
    "opencodeinstruct": _one("nvidia/OpenCodeInstruct", pair("input", "output"), "5M coding questions"),
    "opencodereasoning": _one(
        "nvidia/OpenCodeReasoning", pair("input", "output"), "competitive code with thoughts", "split_0", "split_0"
    ),
    "openmathreasoning": _one(
        "nvidia/OpenMathReasoning", pair("problem", "generated_solution"), "competition math with thoughts", "cot"
    ),
    "magicoder-evol": _one(
        "ise-uiuc/Magicoder-Evol-Instruct-110K", pair("instruction", "response"), "110k coding instructions"
    ),
    "opc": Preset(
        tuple(
            Part("OpenCoder-LLM/opc-sft-stage1", config=config)
            for config in ("largescale_diverse_instruct", "filtered_infinity_instruct", "realuser_instruct")
        ),
        pair("instruction", "output"),
        "OpenCoder's first stage",
    ),
    "camel": Preset(
        tuple(Part(f"camel-ai/{subject}") for subject in ("biology", "chemistry", "physics")),
        pair("message_1", "message_2"),
        "science questions, 60k (not for commercial use)",
    ),
    "cnn-dailymail": _one("abisee/cnn_dailymail", NEWS, "287k news articles to summarize", config="3.0.0"),
    "gsm8k": _one("openai/gsm8k", pair("question", "answer"), "7.5k school math, with answers", config="main"),
    "hendrycks-math": Preset(
        tuple(Part("EleutherAI/hendrycks_math", config=subject) for subject in _MATH_SUBJECTS),
        pair("problem", "solution"),
        "7.5k competition math, with solutions",
    ),
    "math-500": _one("HuggingFaceH4/MATH-500", pair("problem", "solution"), "500 test problems", "test"),
    "mt-bench": _one("HuggingFaceH4/mt_bench_prompts", QUESTIONS, "80 questions of two turns"),
    "humaneval": _one("openai/openai_humaneval", UNFINISHED_CODE, "164 functions to write", "test"),
    "mbpp": _one("google-research-datasets/mbpp", prompt("prompt"), "small Python tasks", "test", "sanitized"),
}
"""Hub ids, splits and columns as the datasets' cards and public code that reads them give them in 2026; docs/data.md
says which of them rest on what."""


def preset_rows() -> list[dict[str, Any]]:
    """The table for people and scripts, in its order."""
    return [
        {
            "name": name,
            "parts": [str(part) for part in preset.parts],
            "columns": list(preset.shape.columns),
            "answers": not preset.shape.is_prompt,
            "multilingual": preset.is_multilingual,
            "about": preset.about,
        }
        for name, preset in PRESETS.items()
    ]
