"""What TensorRT-LLM itself saves: ``<prefix>_<counter>.pt``, a torch list with one dict per request.

Keys of ``SaveHiddenStatesDecodingConfig`` (TensorRT-LLM 1.2 documentation): ``id``, ``input_ids`` [T], ``hidden_state``
[T, D] after the final norm, ``aux_hidden_states`` [T, C·D] (an older version: ``hidden_state_features``), layers
ascending; asked for layer -1 they end in the final hidden once more. The counter says nothing of the conversation.
"""

from collectors.engines.dump.torch_dicts import TorchDicts


class TrtLlmFiles(TorchDicts):
    """Requests in the order of their counters. Listing them opens every file once, since each may hold several."""

    default_layers = "eagle3"
    final = "post_norm"
    has_many_per_file = True
    suffixes = (".pt",)
    columns_keys = ("aux_hidden_states", "hidden_state_features")
    final_key = "hidden_state"
    needs_mask = False
