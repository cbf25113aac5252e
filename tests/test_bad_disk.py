"""Disks that are full or cannot be written, under the whole command line: nothing half written, and what to do next."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiddenstore.errors import StorageError
from hiddenstore.fs.publish import replace_file
from tests.tiny_world import LAYERS, TRAIN, World, error_of, run, tree
from tests.tmpfs import mounted

# Its state of two tensors a weight is what does not fit.
ADAMW = ("optim.kind=adamw",)

STORAGE = 5
DISK_BYTES = 2 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", f"size={DISK_BYTES}")


def fill(disk: Path, free_bytes: int) -> Path:
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(DISK_BYTES - free_bytes))
    return ballast


def test_used_up_inodes_are_told_from_a_full_disk(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for disk in mounted(tmp_path / "disk", f"size={DISK_BYTES},nr_inodes=8"):
        assert run("copy", world / "store", str(disk / "copy")) == STORAGE
        message, fix = error_of(capsys.readouterr().err)
        assert message.startswith("no room for another file while writing")
        assert "[inodes-used-up]" in message
        assert "inodes" in fix


@pytest.mark.parametrize("free_bytes", [0, 4 << 10, 8 << 10])
def test_prepare_on_a_full_disk_leaves_nothing(
    free_bytes: int, world: World, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(small_disk, free_bytes)
    before = tree(small_disk)
    words = ("prepare", world / "chats.jsonl", "-o", str(small_disk / "out"), "--target", world / "target")
    assert run(*words) == STORAGE
    message, _ = error_of(capsys.readouterr().err)
    assert "[disk-full]" in message
    assert tree(small_disk) == before


@pytest.mark.parametrize("free_bytes", [0, 100 << 10, 300 << 10])
def test_collect_on_a_full_disk_leaves_no_half_unit_and_the_same_command_finishes(
    free_bytes: int, world: World, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ballast, store = fill(small_disk, free_bytes), str(small_disk / "store")
    words = ("collect", world / "data", "-o", store, "--target", world / "target", "--layers", LAYERS)
    assert run(*words) == STORAGE
    message, fix = error_of(capsys.readouterr().err)
    assert "[disk-full]" in message
    assert str(small_disk) in message
    assert "same command" in fix
    assert list(small_disk.glob("store/segments/*")) == list(small_disk.glob("store/commits/*")) == []
    ballast.unlink()
    assert run(*words) == 0
    assert run("verify", store, "--full") == 0


@pytest.mark.parametrize("free_bytes", [0, 4 << 10, 12 << 10])
def test_a_run_that_cannot_be_begun_leaves_nothing(
    free_bytes: int, world: World, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(small_disk, free_bytes)
    before = tree(small_disk)
    assert run("train", world / "store", "-o", str(small_disk / "run"), *TRAIN) == STORAGE
    message, fix = error_of(capsys.readouterr().err)
    assert "[disk-full]" in message
    assert "same command" in fix
    assert tree(small_disk) == before


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_it_and_resume_goes_on(
    world: World, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(small_disk / "run")
    words = ("train", world / "store", "-o", path, *TRAIN, "train.max_steps=4", "train.checkpoint_every=2", *ADAMW)
    ballast = fill(small_disk, 1 << 20)
    assert run(*words) == STORAGE
    message, fix = error_of(capsys.readouterr().err)
    assert "[disk-full]" in message
    assert fix == f"hiddenstore train {world / 'store'} -o {path} --resume"
    assert sorted(at.name for at in (small_disk / "run" / "checkpoints").iterdir()) == ["LATEST", "step-2"]
    ballast.unlink()
    assert run("train", world / "store", "-o", path, "--resume") == 0
    assert run("eval", path, world / "store") == 0


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that nothing can be written to; root needs a mount for that."""
    folder = tmp_path / "read-only"
    if os.geteuid() == 0:
        yield from mounted(folder, "ro")
        return
    folder.mkdir(mode=0o555)
    yield folder
    folder.chmod(0o755)


@pytest.mark.parametrize(
    "words",
    [
        ("prepare", "chats.jsonl", "--target", "target"),
        ("collect", "data", "--target", "target"),
        ("regenerate", "chats.jsonl", "--target", "target", "--max-new-tokens", "4", "--max-samples", "1"),
        ("train", "store", *TRAIN),
        ("vocab", "store"),
        ("export", "run", "--engine", "vllm"),
        ("export-data", "store", "--to", "speculators", "--missing-final", "zeros"),
    ],
    ids=lambda words: words[0],
)
def test_a_read_only_folder_is_named(
    words: tuple[str, ...], world: World, read_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(read_only / "out")
    assert run(*world.named(words), "-o", out) == STORAGE
    message, _ = error_of(capsys.readouterr().err)
    assert "[permission-denied]" in message
    assert str(read_only) in message
    assert list(read_only.iterdir()) == []


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(
    world: World, read_only: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    for module, name in (("hiddenstore.report.store", "store_page"), ("trainer.report", "measure")):
        monkeypatch.setattr(f"{module}.{name}", lambda *words: measured.append(words))
    for source in ("store", "run"):
        assert run("report", *world.named((source,)), "-o", str(read_only / "page.html")) == STORAGE
        message, _ = error_of(capsys.readouterr().err)
        assert message.startswith(f"{read_only / 'page.html'}: ")
        assert message.endswith("[permission-denied]")
    assert measured == []


def test_what_no_file_can_be_made_for_is_named_and_not_the_one_that_becomes_it(read_only: Path) -> None:
    with pytest.raises(StorageError, match=f"^{read_only}/table.md: ") as caught:
        replace_file(read_only / "table.md", b"")
    assert caught.value.kind == "permission-denied"


def test_sources_that_cannot_be_deleted_are_imported_all_the_same(
    world: World, small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump, store = small_disk / "dump", str(tmp_path / "new")
    assert run("export-data", world / "no_final", "--to", "specforge-dflash", "-o", str(dump)) == 0
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    before = tree(dump)
    words = ("import", str(dump), "--from", "specforge-dflash", "-o", store, "--target", world / "target")
    assert run(*words, "--delete-source") == STORAGE
    message, _ = error_of(capsys.readouterr().err)
    assert "[source-undeleted]" in message
    assert f"{dump}" in message
    assert tree(dump) == before
    assert run("verify", store, "--full") == 0
