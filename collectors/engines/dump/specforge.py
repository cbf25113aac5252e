"""SpecForge's offline features: ``rows_*/data_*.ckpt`` or ``.ckpt.gz``, one torch dict a conversation, right-padded.

Read from SpecForge 0.2 (``offline_reader``, ``algorithms/eagle3/data.py``, ``common/dflash_family_data.py``). The
batch's padding is stored and its attention mask is not; layer ids are not stored either. The final hidden comes from
SGLang, after the final norm.
"""

from collectors.engines.dump.torch_dicts import TorchDicts


class Eagle3Features(TorchDicts):
    """``aux_hidden_state`` [1, T, 3·D] and the final ``hidden_state`` [1, T, D]."""

    default_layers = "eagle3"
    final = "post_norm"
    suffixes = (".ckpt", ".ckpt.gz")
    columns_keys = ("aux_hidden_state",)
    final_key = "hidden_state"
    is_padded = True


class DFlashFeatures(TorchDicts):
    """``hidden_states`` [1, T, C·D], also of the domino strategy; no final hidden."""

    suffixes = (".ckpt", ".ckpt.gz")
    columns_keys = ("hidden_states",)
    is_padded = True


class DSparkFeatures(DFlashFeatures):
    """``hidden_states`` [1, T, C·D] and the final ``target_last_hidden_states`` [1, T, D]."""

    final = "post_norm"
    final_key = "target_last_hidden_states"
