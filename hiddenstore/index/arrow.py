"""The samples of a store as one Arrow table."""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hiddenstore.index.table import SPLITS
from hiddenstore.layout import parse_commit

if TYPE_CHECKING:
    from hiddenstore.index.catalog import Catalog


def sample_table(catalog: "Catalog") -> pa.Table:
    """A row per sample that is read, in commit order: id and unit as text, split as a dictionary of text, tokens,
    supervised and final_rows int32."""
    rows = catalog.commit_order()
    table = catalog.table.take(rows)
    units = pa.array([name.unit if (name := parse_commit(file)) else file for file in catalog.names], pa.string())
    numbers = {name: pa.array(table.columns[name]) for name in ("tokens", "supervised", "final_rows")}
    columns = {
        "id": pa.array(list(table.ids), pa.string()),
        "split": pa.DictionaryArray.from_arrays(table.split.astype(np.int8), pa.array(SPLITS)),
        **numbers,
        "unit": units.take(pa.array(table.record)) if len(rows) else pa.array([], pa.string()),
    }
    return pa.table(columns)
