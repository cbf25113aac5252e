"""Rotary embeddings whose frequencies depend on how long a text is."""

from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from hiddenstore.errors import ConfigError, Kind

_UNSCALED = ("rope_type", "default")


def rope_kind(config: object) -> str:
    """The kind of rotary embedding a text config names, ``default`` when it names none."""
    parameters = _rope_parameters(config)
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def rope_boundary(config: object) -> int | None:
    """Length at which a text config's rotary embedding changes its frequencies for the whole batch, if it does.

    Phi-3's ``longrope`` picks its long factors when the longest row exceeds the original context, so a long sample
    would change the states of the short ones beside it. vLLM picks them for every text where its ``max_model_len`` does
    (its ``phi3_long_rope_scaled_rope.py``).
    """
    if rope_kind(config) not in ("longrope", "dynamic"):
        return None
    original = _rope_parameters(config).get("original_max_position_embeddings")
    original = original or getattr(config, "original_max_position_embeddings", None)
    original = original or getattr(config, "max_position_embeddings", None)
    return int(original) if isinstance(original, int | float) else None


def require_rope_read(name: str, raw: Mapping[str, Any], config: object) -> None:
    """The text config must turn as the config.json ``raw`` says. transformers before 5 passes over ``rope_parameters``,
    the only form that 5 writes, and turns by its defaults. Raises ConfigError: ``target-unreadable``."""
    import transformers

    text = raw.get("text_config")
    written = (text if isinstance(text, Mapping) else raw).get("rope_parameters")
    if not isinstance(written, Mapping) or Version(transformers.__version__) >= Version("5"):
        return
    others = {key: value for key, value in written.items() if key != "rope_theta" and (key, value) != _UNSCALED}
    is_read = getattr(config, "rope_theta", None) == written.get("rope_theta")
    if not is_read or (others and not getattr(config, "rope_scaling", None)):
        message = f"target {name} has rope_parameters, which transformers {transformers.__version__} does not read"
        hint = "pip install 'transformers>=5', or the same as rope_theta and rope_scaling in its config.json"
        raise ConfigError(message, kind=Kind.TARGET_UNREADABLE, hint=hint)


def _rope_parameters(config: object) -> Mapping[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return parameters if isinstance(parameters, Mapping) else {}
