"""The strict base every stored document derives from."""

from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

FORMAT_VERSION: Final = 1
IMAGES_FORMAT: Final = 2
"""What a document of samples with images says, so that a reader without them refuses it."""
Format = Literal[1]
"""Of every document that need not say so."""
FormatOfImages = Literal[1, 2]


def require_format(version: FormatOfImages, *, has_images: bool) -> None:
    """Raises ValueError where the format of a document does not say whether samples hold images."""
    if version != (expected := IMAGES_FORMAT if has_images else FORMAT_VERSION):
        raise ValueError(f"format: expected {expected} of a document with{'' if has_images else 'out'} images")


class Document(BaseModel):
    """A frozen pydantic model that refuses unknown fields, so that nothing stored is ever ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Sparse(Document):
    """A document without those members of ``absent`` that are null or empty: written as older readers know it."""

    absent: ClassVar[tuple[str, ...]]

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        members: dict[str, Any] = dump(self)
        empty: tuple[object, ...] = (None, (), [], {})
        return {name: value for name, value in members.items() if name not in self.absent or value not in empty}
