"""What a run says before its first step: how far it goes, and the settings that follow from the target."""

from typing import Any

import torch

from hiddenstore.cli.output import output
from hiddenstore.cli.terminal import amount, plural
from trainer.derived import derived
from trainer.run.session import Session

_COLUMNS = 2


def announce(session: Session) -> None:
    """Print it on stderr; only in human mode. A setting that was given, not derived, is marked ``*``."""
    out = output()
    if not out.is_human:
        return
    from rich.padding import Padding

    for line in _lines(session):
        out.note(line)
    out.err.print(Padding(_grid(_cells(session)), (0, 0, 0, 2), expand=False))


def _lines(session: Session) -> list[str]:
    steps = session.total_steps
    at = f"continues at step {session.step + 1:,} of {steps:,}" if session.step else plural(steps, "step")
    samples = plural(len(session.batches.sample_ids), "sample")
    size = sum(parameter.numel() for parameter in session.optimizer.named.values())
    init = session.config.train.init_from
    return [
        f"{session.config.drafter.name}, {amount(size)} trainable parameters: {at} over {samples}, "
        f"{amount(session.batches.tokens)} tokens; {_place(session)}",
        *([f"weights, draft vocabulary and drafter.* from {init}"] if init is not None else []),
        "from the target, * as you set it:",
    ]


def _place(session: Session) -> str:
    ranks = session.group.rank.world_size
    each = f"{plural(ranks, 'rank')} of " if ranks > 1 else ""
    if session.device.type == "cpu":
        return f"{each}{plural(torch.get_num_threads(), 'CPU thread')}"
    return f"{each}one {torch.cuda.get_device_name(session.device)}"


def _cells(session: Session) -> list[tuple[str, str]]:
    resolved = session.config.model_dump(mode="json")
    cells = []
    for section, values in _derived(session).items():
        for key, value in values.items():
            have = resolved[section][key]
            cells.append((f"{section}.{key}", _text(have) + ("" if _text(have) == _text(value) else " *")))
    return cells


def _derived(session: Session) -> dict[str, dict[str, Any]]:
    """What would hold had nothing been set; of a warm start, what it started from."""
    found = derived(session.store, session.config.drafter.name)
    if session.config.train.init_from is not None:
        found["drafter"] = session.config.drafter.model_dump(mode="json", include=set(found["drafter"]))
    return found


def _grid(cells: list[tuple[str, str]]) -> Any:
    """Settings down the first pair of columns, then down the next."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    height = -(-len(cells) // _COLUMNS)
    for _ in range(_COLUMNS):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
    for row in range(height):
        pairs = [cells[at] for at in range(row, len(cells), height)]
        table.add_row(*(Text(text) for pair in pairs for text in pair))
    return table


def _text(value: Any) -> str:
    if isinstance(value, dict):
        kind, factor = value.get("rope_type"), value.get("factor")
        return f"{kind} x{factor:g}" if factor else str(kind)
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
