"""What SGLang reads of each drafter, by version.

Sources: ``llama_eagle.py``, ``llama_eagle3.py``, ``dflash.py`` and ``speculative/`` of SGLang 0.5.23, and a copy of
``llama_eagle3.py`` from before it (Apache-2.0). Nothing was run: names and shapes are compared with a restatement.
"""

from trainer.export import lacks
from trainer.export.base import Engine, Quirks, Reads, Refused

_EAGLE3 = (lacks.NORM_BEFORE_RESIDUAL, lacks.OWN_EMBEDDINGS, lacks.AS_WIDE_AS_ITS_STATES, lacks.EMBEDDINGS_AS_A_LAYER)

SGLANG = Engine(
    name="sglang",
    title="SGLang",
    version="0.5.23",
    convention="output",
    drafters={
        "eagle1": (
            Reads(
                architecture="LlamaForCausalLMEagle",
                source="llama_eagle.py",
                lacks=(lacks.FIRST_NORM, lacks.LAST_NORM, lacks.HEAD_BIAS),
                quirks=Quirks(fc_bias=True),
            ),
        ),
        "eagle3": (
            Reads(
                architecture="LlamaForCausalLMEagle3",
                source="llama_eagle3.py, an earlier copy",
                before="0.5.23",
                lacks=(*_EAGLE3, lacks.NOT_THREE_LAYERS, lacks.SEVERAL_LAYERS),
            ),
            Reads(
                architecture="LlamaForCausalLMEagle3",
                source="llama_eagle3.py",
                since="0.5.23",
                lacks=_EAGLE3,
                quirks=Quirks(later_norm="hidden_norm"),
            ),
        ),
        "eagle3.1": (
            Refused(
                reason="an SGLang without fc_norm drops those weights in silence; 0.5.23 is the first known to have it",
                nearest="--engine-version 0.5.23, or train without drafter.fc_norm and drafter.norm_output",
                before="0.5.23",
            ),
            Reads(
                architecture="LlamaForCausalLMEagle3",
                source="llama_eagle3.py",
                since="0.5.23",
                lacks=_EAGLE3,
                quirks=Quirks(later_norm="hidden_norm"),
            ),
        ),
        "dflash": (
            Refused(
                reason="the first SGLang known to read this format is 0.5.23",
                nearest="--engine-version 0.5.23",
                before="0.5.23",
            ),
            Reads(
                architecture="DFlashDraftModel",
                source="dflash.py",
                since="0.5.23",
                lacks=(lacks.SLIDING_WINDOW, lacks.OWN_HEAD, lacks.SMALL_VOCABULARY, lacks.EMBEDDINGS_AS_A_LAYER),
            ),
        ),
        "medusa": (
            Refused(
                reason="SGLang has no Medusa",
                nearest="--engine vllm --engine-version 0.32, or an EAGLE-3 drafter",
            ),
        ),
    },
)
