"""The base of every group of training settings."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of settings; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
