"""``rebuilt``: no array at all, for a final hidden that comes back from the decoded top aux layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hiddenstore.codecs.base import FIXED_CHUNK_TOKENS, RowPart, SmallField
from schemas.capture import REBUILT


@dataclass(frozen=True)
class NothingStored:
    """0 bits a value; what is not stored is in ``capture.states``."""

    name: str = REBUILT
    exact: bool = False
    code_dtype: str = "uint8"
    compressed: bool = False
    formula: str = "not stored: the target's last blocks make it of the decoded top aux layer"
    small: Mapping[str, SmallField] = field(default_factory=dict)
    nominal_bits: float = 0.0

    def chunk_tokens(self, width: int) -> int:
        return FIXED_CHUNK_TOKENS

    def code_columns(self, width: int) -> int:
        return 0

    def row_parts(self, width: int) -> tuple[RowPart, ...]:
        return ()

    def row_bits(self, width: int) -> float:
        return 0.0


NOTHING = NothingStored()
