"""Variants of prompts: other languages, styles and switches asked for, so that a drafter meets more than plain English.

Which variants a conversation gets follows from its own text and the seed, not from its place, so that they stay what
they were when rows are added.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from collectors.conversations import Message

DEFAULT = "default"
DEFAULT_FILE = Path(__file__).parent / "presets" / "variants.yaml"


class Variant(BaseModel):
    """One way to ask differently: ``user_suffix`` ends every user turn, ``system`` opens a conversation without one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    user_suffix: str | None = None
    system: str | None = None
    enabled: bool = True

    @model_validator(mode="after")
    def _says_something(self) -> "Variant":
        if not (self.user_suffix or self.system):
            raise ValueError(f"variant {self.name} has neither user_suffix nor system")
        return self

    def fits(self, messages: Sequence[Message]) -> bool:
        """Whether it can be asked: a system message of the conversation's own is never replaced."""
        return self.system is None or messages[0]["role"] != "system"

    def of(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation asked this way."""
        changed = [
            {**message, "content": message["content"] + (self.user_suffix or "")}
            if message["role"] == "user"
            else message
            for message in messages
        ]
        return [{"role": "system", "content": self.system}, *changed] if self.system else changed


class Augmentation(BaseModel):
    """``copies`` variants of every conversation, each another one; ``plain`` keeps the conversation as it was too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    variants: tuple[Variant, ...] = Field(min_length=1)
    copies: int = Field(default=1, ge=1)
    plain: bool = True
    seed: int = 0

    @model_validator(mode="after")
    def _enough(self) -> "Augmentation":
        names = [variant.name for variant in self.variants]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two variants are named {twice}")
        if self.copies > (count := sum(variant.enabled for variant in self.variants)):
            raise ValueError(f"{self.copies} copies asked for, but {count} variants are enabled")
        return self

    def chosen(self, messages: Sequence[Message]) -> list[Variant]:
        """The variants this conversation gets; fewer than ``copies`` where few fit it."""
        key = json.dumps([self.seed, messages], sort_keys=True).encode()
        fitting = [variant for variant in self.variants if variant.enabled and variant.fits(messages)]

        def rank(variant: Variant) -> bytes:
            return hashlib.blake2b(variant.name.encode(), key=hashlib.blake2b(key).digest(), digest_size=8).digest()

        return sorted(fitting, key=rank)[: self.copies]


def read_augmentation(file: str | Path) -> Augmentation:
    """From YAML, or ``default``: the variants that come with hiddenstore. ConfigError lists every problem."""
    from hiddenstore.config import load

    return load(Augmentation, DEFAULT_FILE if str(file) == DEFAULT else file)
