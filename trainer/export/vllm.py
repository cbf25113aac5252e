"""What vLLM reads of each drafter, by version.

Sources: ``llama_eagle.py``, ``llama_eagle3.py``, ``qwen3_dflash.py``, ``medusa.py`` and ``v1/spec_decode`` of vLLM 0.32
and 0.33 (Apache-2.0).
"""

from trainer.export import lacks
from trainer.export.base import Engine, Quirks, Reads, Refused

VLLM = Engine(
    name="vllm",
    title="vLLM",
    version="0.32",
    convention="vllm",
    drafters={
        "eagle1": (
            Reads(
                architecture="EagleLlamaForCausalLM",
                source="llama_eagle.py",
                ran="0.32",
                lacks=(lacks.FIRST_NORM, lacks.LAST_NORM, lacks.HEAD_BIAS),
            ),
        ),
        "eagle3": (
            Reads(
                architecture="LlamaForCausalLMEagle3",
                source="llama_eagle3.py",
                ran="0.32",
                quirks=Quirks(top_level_ids=True),
            ),
        ),
        "eagle3.1": (
            Refused(
                reason="the first vLLM known to read fc_norm and norm_output is 0.32",
                nearest="--engine-version 0.32, or train without drafter.fc_norm and drafter.norm_output",
                before="0.32",
            ),
            Reads(
                architecture="LlamaForCausalLMEagle3",
                source="llama_eagle3.py",
                ran="0.32",
                since="0.32",
                quirks=Quirks(top_level_ids=True),
            ),
        ),
        "dflash": (
            Refused(
                reason="the first vLLM known to read this format is 0.32",
                nearest="--engine-version 0.32, or an EAGLE-3 drafter",
                before="0.32",
            ),
            Reads(
                architecture="DFlashDraftModel",
                source="qwen3_dflash.py",
                ran="0.32",
                since="0.32",
                lacks=(lacks.SLIDING_WINDOW,),
            ),
        ),
        "medusa": (
            Reads(
                architecture="MedusaModel",
                source="medusa.py",
                ran="0.32",
                before="0.33",
                lacks=(lacks.ORIGINAL_HEAD_BIAS,),
            ),
            Refused(
                reason="vLLM 0.33 removed Medusa",
                nearest="--engine-version 0.32, or an EAGLE-3 drafter: hiddenstore train STORE --drafter eagle3",
                since="0.33",
            ),
        ),
    },
)
