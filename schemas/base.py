"""The strict base every stored document derives from."""

from pydantic import BaseModel, ConfigDict

FORMAT_VERSION = 1
IMAGES_FORMAT = 2
"""What a document of samples with images says, so that a reader without them refuses it."""


class Document(BaseModel):
    """A frozen pydantic model that refuses unknown fields, so that nothing stored is ever ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
