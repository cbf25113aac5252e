"""YAML as settings are written in it: scalars stay the text that was written, tricks are refused."""

from pathlib import Path
from typing import Any

import yaml

from hiddenstore.errors import ConfigError, NotFoundError


class KeysOnce:
    """For a YAML loader: a key written twice is refused, of which it would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _value in node.value:
            if key.value in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {key.value!r} is set twice")
            seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)  # type: ignore[misc]
        return found


class _WordsLoader(KeysOnce, yaml.BaseLoader):
    """YAML whose scalars stay the text that was written; ``null``, ``~`` and nothing become None.

    Anchors are refused: a small file could otherwise unfold into a huge one.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.YAMLError(f"line {mark.line + 1}: aliases (*name) are not supported")
        return super().compose_node(parent, index)


def _null_or_text(loader: _WordsLoader, node: yaml.ScalarNode) -> str | None:
    if node.style is None and node.value in ("", "~", "null", "Null", "NULL"):
        return None
    return str(node.value)


_WordsLoader.add_constructor("tag:yaml.org,2002:str", _null_or_text)


def parse(text: str) -> Any:
    """One YAML document as text, None, lists and mappings; nothing else can come out of it."""
    loader = _WordsLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"the settings file {path} does not exist", kind="config-missing") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}", kind="config-unreadable") from error
    try:
        found = parse(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML: {first_line(error)}", kind="config-unreadable") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} should hold key: value lines, found {type(found).__name__}", kind="config-unreadable"
        )
    return found


def first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
