"""What docs/object-storage.md and docs/sharing.md tell a reader to type, on a real S3 server."""

from pathlib import Path

import pytest

from hiddenstore.store import Store
from tests.doc_blocks import ROOT, blocks, small, target_of_eight_layers
from tests.tiny_world import chat, run, write_rows

pytestmark = pytest.mark.objects


def test_the_commands_of_the_pages_run_in_their_order(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    target = target_of_eight_layers(tmp_path / "target")
    write_rows(tmp_path / "chats.jsonl", [chat(number) for number in range(40)])
    pages = [ROOT / "docs" / name for name in ("object-storage.md", "sharing.md")]
    commands = [words for page in pages for block in blocks(page) if block.how == "run by" for words in block.commands]
    for words in commands:
        if words[:2] == ["push", "my-store"]:
            assert run("copy", f"{place}/store", "my-store", "-q") == 0
        own = [word.replace("s3://bucket", place).replace("/scratch/cache", "cache") for word in words]
        assert run(*small(own, target, "")) == 0, f"{words}: {capsys.readouterr().err[-2000:]}"
    assert [words[0] for words in commands] == ["doctor", "prepare", "collect", "train", "push"]
    assert set(Store.open(f"{place}/my-store").sample_ids) == set(Store.open(f"{place}/store").sample_ids)
