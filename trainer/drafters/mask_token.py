"""The token that stands in a block's unfilled slots: one the target has an embedding for and nobody writes."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

CHAT_ROLES = frozenset({"system", "user", "assistant", "developer", "tool", "ipython", "function", "observation"})

FileOf = Callable[[str], bytes | None]
"""The bytes of a file of the store's ``target/`` by name, None where it holds none."""


def mask_token(file: FileOf, vocab_size: int) -> int | None:
    """The tokenizer's mask token, else its first added token without a role, else its pad token; None when there is
    none below ``vocab_size``. Roles are those its config names one by one, the chat template's, and those of a chat.

    Reads ``tokenizer.json`` and ``tokenizer_config.json`` as the store holds them.
    """
    settings = _object(file("tokenizer_config.json"))
    added = _added_tokens(_object(file("tokenizer.json")), settings)
    ids = {content: index for index, content in added.items() if index < vocab_size}
    for name in ("mask_token", "first_unused", "pad_token"):
        content = _first_unused(file, settings, added) if name == "first_unused" else _content(settings.get(name))
        if content in ids:
            return ids[content]
    return None


def _added_tokens(tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[int, str]:
    """Content by id, ascending."""
    found = {int(token["id"]): str(token["content"]) for token in tokenizer.get("added_tokens") or []}
    for index, token in (settings.get("added_tokens_decoder") or {}).items():
        found.setdefault(int(index), str(_content(token)))
    return dict(sorted(found.items()))


def _first_unused(file: FileOf, settings: Mapping[str, Any], added: Mapping[int, str]) -> str | None:
    template = (file("chat_template.jinja") or b"").decode() or str(settings.get("chat_template") or "")
    named = {_content(value) for key, value in settings.items() if key.endswith("_token")}
    for content in added.values():
        # A template may spell <|user|> as "<|" + role + "|>".
        word = re.sub(r"\W|_", "", content).lower()
        if content not in named and content not in template and word not in CHAT_ROLES:
            return content
    return None


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _object(data: bytes | None) -> dict[str, Any]:
    found = json.loads(data) if data else {}
    return found if isinstance(found, dict) else {}
