"""What the demos take along: the bundled target and the text it was trained on, a real model, questions, pipelines."""

from pathlib import Path

_FOLDER = Path(__file__).parent

TARGET_DIR = _FOLDER / "target"
QUESTIONS = _FOLDER / "questions.jsonl"
"""Questions to train on: GSM8K's and the real model's own, in turn."""
MT_BENCH = _FOLDER / "mt_bench.jsonl"
"""The 80 first turns of MT-Bench, never trained on."""


def pipeline_text(name: str) -> str:
    """The pipeline file of a demo, with ``$words`` to fill in."""
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
