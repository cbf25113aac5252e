"""Checkpoints: publishing, keeping, damage, kills."""

import os
from pathlib import Path

import pytest
import torch

from hiddenstore.errors import CorruptionError, NotFoundError, StorageError
from schemas import HeadSpec
from tests.trainer.conftest import drafter_config
from tests.trainer.runs import WORDS, tiny_store
from trainer.train import checkpoint
from trainer.train.checkpoint import CheckpointState, DrafterSpec
from trainer.train.loop import train
from trainer.train.run_folder import load_drafter

TENSORS = ({"fc.weight": torch.arange(6.0).view(2, 3)}, {"exp_avg.fc.weight": torch.ones(2, 3)})


def spec(step: int) -> DrafterSpec:
    from hiddenstore.testing.builders import capture_spec

    return DrafterSpec(
        config=drafter_config().model_dump(mode="json"),
        target=capture_spec().target,
        head=HeadSpec(norm_flavour="rms", norm_eps=1e-5, tied=False),
        store="store",
        seed=0,
        step=step,
    )


def state(step: int) -> CheckpointState:
    return CheckpointState(step=step, cursor={"seed": 0}, total_steps=9, files={})


def save(run: Path, step: int) -> Path:
    return checkpoint.save(run, spec(step), state(step), TENSORS)


def test_checkpoint_reads_back_and_latest_names_it(tmp_path: Path) -> None:
    save(tmp_path, 3)
    path = save(tmp_path, 12)
    found = checkpoint.load(path)
    assert torch.equal(found.drafter["fc.weight"], TENSORS[0]["fc.weight"])
    assert found.state.step == 12
    assert checkpoint.latest(tmp_path) == path
    assert (tmp_path / "checkpoints" / "LATEST").read_text() == "step-12\n"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 9, 10, 11):
        save(tmp_path, step)
        checkpoint.remove_old(tmp_path, 2)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-10", "step-11"]


def test_the_name_of_every_folder_that_a_first_save_made_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, real = set[str](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: synced.add(os.readlink(f"/proc/self/fd/{handle}")) or real(handle))
    save(tmp_path / "far" / "run", 3)
    assert {str(tmp_path), str(tmp_path / "far"), str(tmp_path / "far" / "run")} <= synced


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "drafter.json", "state.json"])
def test_a_pipe_in_the_place_of_a_file_ends_and_a_link_to_nowhere_is_no_damage(tmp_path: Path, name: str) -> None:
    file = save(tmp_path, 1) / name
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CorruptionError, match=f"lacks {name}"):
        checkpoint.load(file.parent)
    file.unlink()
    file.symlink_to(tmp_path / "unmounted")
    with pytest.raises(StorageError, match="is its disk mounted"):
        checkpoint.load(file.parent)


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "drafter.json", "state.json"])
def test_a_flipped_byte_or_missing_file_is_named(tmp_path: Path, name: str) -> None:
    file = save(tmp_path, 1) / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match=name.replace(".", r"\.")):
        checkpoint.load(file.parent)
    file.unlink()
    with pytest.raises(CorruptionError, match=name.replace(".", r"\.")):
        checkpoint.load(file.parent)


class _Killed(BaseException):
    pass


def test_a_kill_at_any_moment_of_saving_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fsync and rename of a save is a place to die; whatever is left must load, and the next save must work."""
    count, limit = [0], [0]

    def dying(real: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            count[0] += 1
            if count[0] == limit[0]:
                raise _Killed
            return real(*args, **kwargs)  # type: ignore[operator]

        return call

    monkeypatch.setattr(os, "fsync", dying(os.fsync))
    monkeypatch.setattr(Path, "rename", dying(Path.rename))
    monkeypatch.setattr(Path, "replace", dying(Path.replace))
    save(tmp_path / "count", 1)
    count[0] = 0
    save(tmp_path / "count", 2)
    points, seen = count[0], set()
    assert points >= 9
    for point in range(1, points + 1):
        run = tmp_path / str(point)
        limit[0] = 0
        save(run, 1)
        count[0], limit[0] = 0, point
        with pytest.raises(_Killed):
            save(run, 2)
        limit[0] = 0
        found = checkpoint.latest(run)
        assert found is not None
        seen.add(checkpoint.load(found).state.step)
        assert checkpoint.load(save(run, 2)).state.step == 2
        assert not list((run / "checkpoints").glob(".*"))
    assert seen == {1, 2}


def test_trained_drafter_loads_with_its_vocabulary_and_head(tmp_path: Path) -> None:
    store = tiny_store(tmp_path)
    report = train(store.path, tmp_path / "run", words=[*WORDS, "train.max_steps=4"])
    loaded = load_drafter(tmp_path / "run")
    assert (loaded.step, loaded.vocab.size, loaded.config.aux_layers) == (4, 40, (1, 3, 4))
    assert loaded.identity == store.capture.target
    assert torch.equal(loaded.model.embed(torch.tensor([3])), loaded.head.embed_tokens[[3]].float())
    fresh = load_drafter(report.checkpoint, untrained=True)
    assert fresh.step == 0
    assert torch.equal(fresh.model.lm_head.weight, loaded.head.lm_head[loaded.vocab.target_ids].float())  # type: ignore[index]
    assert not torch.equal(fresh.model.fc.weight, loaded.model.fc.weight)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no run"):
        load_drafter(tmp_path)
