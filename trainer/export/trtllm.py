"""What TensorRT-LLM's PyTorch backend reads of each drafter, by version.

Sources: ``modeling_speculative.py`` and ``modeling_dflash.py`` of the main branch (2026), pull requests 11010 and
14988, and the documentation of 1.2 (Apache-2.0). Nothing was run: names and shapes are compared with a restatement.
"""

from trainer.export import lacks
from trainer.export.base import Engine, Quirks, Reads, Refused

_EAGLE3 = Reads(
    architecture="LlamaForCausalLMEagle3",
    source="modeling_speculative.py",
    lacks=(
        lacks.NORM_BEFORE_RESIDUAL,
        lacks.OWN_EMBEDDINGS,
        lacks.ONE_LAYER,
        lacks.AS_WIDE_AS_ITS_STATES,
        lacks.EMBEDDINGS_AS_A_LAYER,
    ),
    quirks=Quirks(later_norm="hidden_norm", stacked=True, t2d=False),
)

TRTLLM = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    version="1.2.1",
    convention="output",
    drafters={
        "eagle1": (
            Refused(
                reason="its PyTorch backend has no EAGLE-1 or EAGLE-2 model",
                nearest="--engine vllm or --engine sglang, or an EAGLE-3 drafter",
            ),
        ),
        "eagle3": (_EAGLE3,),
        "eagle3.1": (
            Refused(
                reason="fc_norm and norm_output are read since 1.3",
                nearest="--engine-version 1.3, or train without drafter.fc_norm and drafter.norm_output",
                before="1.3",
            ),
            Reads(_EAGLE3.architecture, _EAGLE3.source, since="1.3", lacks=_EAGLE3.lacks, quirks=_EAGLE3.quirks),
        ),
        "dflash": (
            Refused(
                reason="DFlash came with 1.3",
                nearest="--engine-version 1.3, --engine vllm or --engine sglang",
                before="1.3",
            ),
            Reads(
                architecture="DFlashDraftModel",
                source="modeling_dflash.py",
                since="1.3",
                lacks=(lacks.SLIDING_WINDOW, lacks.OWN_HEAD, lacks.SMALL_VOCABULARY, lacks.EMBEDDINGS_AS_A_LAYER),
            ),
        ),
        "medusa": (
            Refused(
                reason="Medusa belongs to its TensorRT backend; the PyTorch backend has none",
                nearest="--engine vllm --engine-version 0.32, or an EAGLE-3 drafter",
            ),
        ),
    },
)
