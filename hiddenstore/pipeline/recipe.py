"""The file that ``hiddenstore run`` reads: a target, inputs, and the options of each stage under their own names."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

Section = dict[str, Any]
"""Options of a command by their long names, with ``_`` or ``-``: ``max-tokens: 2048``, ``full: true``."""


class DrafterSection(BaseModel):
    """One drafter. ``config``: a recipe of ``hiddenstore train`` or a YAML file; ``settings``: its key.path=value words
    as a tree; ``ranks``: processes to train it on."""

    model_config = ConfigDict(extra="forbid")

    drafter: str | None = None
    config: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    ranks: int = Field(1, gt=0)


class Recipe(BaseModel):
    """``out`` is the folder of everything the run makes. One capture serves every entry of ``drafters``; ``eval``,
    ``decode`` and ``export`` are done for each. ``regenerate`` and ``decode`` happen where their section is there."""

    model_config = ConfigDict(extra="forbid")

    target: str
    out: str
    inputs: list[str] = Field(min_length=1)
    regenerate: Section | None = None
    prepare: Section = Field(default_factory=dict)
    collect: Section = Field(default_factory=dict)
    verify: Section = Field(default_factory=lambda: {"full": True, "meaning": True})
    drafters: dict[str, DrafterSection] = Field(min_length=1)
    eval: Section = Field(default_factory=dict)
    decode: Section | None = None
    export: Section = Field(default_factory=lambda: {"engine": "vllm"})

    @field_validator("drafters", mode="before")
    @classmethod
    def _drafters_may_be_empty(cls, drafters: Any) -> Any:
        return {name: section or {} for name, section in drafters.items()} if isinstance(drafters, dict) else drafters

    @field_validator("drafters")
    @classmethod
    def _names_are_folders(cls, drafters: dict[str, DrafterSection]) -> dict[str, DrafterSection]:
        for name in drafters:
            if name in ("", ".", "..") or Path(name).name != name:
                raise ValueError(f"{name!r} cannot name a folder")
        return drafters
