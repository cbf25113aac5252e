"""The bundled target, the text it was trained on, and the command that shows the whole path."""

from pathlib import Path

TARGET_DIR = Path(__file__).parent / "target"
