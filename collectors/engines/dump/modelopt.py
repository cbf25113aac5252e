"""ModelOpt's dumps: ``<conversation_id>.pt``, a torch dict a conversation, the same keys from three engines.

Keys from Model-Optimizer's ``collect_hidden_states`` scripts: ``input_ids`` [T], ``hidden_states`` [T, D] (the final
hidden), ``aux_hidden_states`` [T, C·D], ``conversation_id``; newer ones add ``loss_mask``, and a reader knows
``hidden_states_prenorm``. Nothing in a file says which engine wrote it: Hugging Face and TensorRT-LLM hand out the
final hidden after its norm and count layers by their output, vLLM before it and by their input.
"""

from collectors.engines.dump.torch_dicts import TorchDicts


class _Files(TorchDicts):
    """The same files whichever engine wrote them; the format's name says which."""

    suffixes = (".pt",)
    columns_keys = ("aux_hidden_states",)
    final_key = "hidden_states"
    prenorm_key = "hidden_states_prenorm"
    needs_mask = False
    pre_norm_hint = ", or --from modelopt-vllm if vLLM made it"


class ModelOptFiles(_Files):
    """What Hugging Face and TensorRT-LLM wrote."""

    default_layers = "eagle3"
    final = "post_norm"


class ModelOptVllmFiles(_Files):
    """What vLLM wrote."""

    numbering = "vllm"
    final = "pre_norm"
    layers_note = (
        ". ModelOpt hands its ids to vLLM unchanged, so the same --aux-layers mean one block earlier than in its other "
        "dumps"
    )
