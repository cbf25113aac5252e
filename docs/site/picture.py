"""A picture of a terminal: ``python docs/site/picture.py OUT.svg hiddenstore demo`` runs the words after OUT in a
terminal of 80 columns and draws the last rows of what they print, in its colours. Needs rich alone."""

import os
import pty
import re
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 80, 34


def screen(words: list[str]) -> Text:
    """The last rows that a command leaves on a terminal, lines that it drew over left out."""
    printed = bytearray()

    def keep(descriptor: int) -> bytes:
        part = os.read(descriptor, 65536)
        printed.extend(part)
        return part

    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    if status := pty.spawn(words, keep):
        raise SystemExit(os.waitstatus_to_exitcode(status))
    lines = printed.decode().replace("\r\n", "\n").rstrip().split("\n")
    return Text.from_ansi("\n".join(line.rpartition("\r")[2] for line in lines[-ROWS:]))


def main(out: Path, words: list[str]) -> None:
    console = Console(record=True, width=COLUMNS, file=StringIO())
    console.print(screen(words))
    # The reader's own monospace font: the one that rich names lies on a server.
    picture = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=" ".join(words)), flags=re.DOTALL)
    out.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
