"""The layer profile tells every layer from its neighbours, and from the final hidden after the norm."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hiddenstore.errors import CorruptionError
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.verify.profile import (
    NORMED,
    PROFILE_PATH,
    PROFILE_TOKENS,
    LayerProfile,
    make_profile,
    match_layer,
    read_profile,
    signs,
    sketch,
    write_profile,
)

LAYERS, TOKENS, WIDTH = 7, 100, 96


def residual_stream(seed: int = 0) -> torch.Tensor:
    """States [N+1, T, D] that move slowly from layer to layer, with an outlier channel and a sink row."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(LAYERS, TOKENS, WIDTH, generator=generator) * 0.25
    steps[0] *= 4
    states = steps.cumsum(0)
    states[:, :, 3] += 12
    states[:, 0] *= 40
    return states


def profile(**options: np.ndarray) -> LayerProfile:
    states = residual_stream()
    normed = states[-1] / states[-1].square().mean(-1, keepdim=True).sqrt()
    return make_profile("a" * 32, np.arange(TOKENS), states, normed, **options)


def test_every_layer_is_nearest_to_itself_even_with_a_percent_of_noise() -> None:
    known, states = profile(), residual_stream()
    places = np.arange(len(known.positions))
    for index in range(LAYERS):
        rows = states[index, list(known.positions)]
        distances = match_layer(known, rows * (1 + 0.01 * torch.randn_like(rows)), places)
        nearest = sorted(distances, key=distances.__getitem__)
        assert nearest[0] == index - 1
        assert distances[nearest[0]] < 3e-4 < distances[nearest[1]] / 4


def test_the_normed_final_hidden_is_told_from_the_last_layer() -> None:
    known, last = profile(), residual_stream()[-1]
    rows = (last / last.square().mean(-1, keepdim=True).sqrt())[list(known.positions)]
    distances = match_layer(known, rows, np.arange(len(known.positions)))
    assert min(distances, key=distances.__getitem__) == NORMED
    assert distances[LAYERS - 2] > 0.1


def test_positions_reach_the_final_rows_of_a_long_prompt() -> None:
    known = profile(final_rows=np.arange(80, 100))
    assert set(range(PROFILE_TOKENS // 2)) | set(range(80, 100)) == set(known.positions)
    assert known.common_prefix(np.arange(50)) == PROFILE_TOKENS // 2
    assert known.common_prefix(np.array([0, 1, 7])) == 2


def test_a_profile_survives_the_disk_and_a_flipped_byte_is_an_error(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    assert read_profile(fs) is None
    known = profile()
    assert write_profile(fs, known)
    assert not write_profile(fs, known)
    assert read_profile(fs) == known
    path = tmp_path / PROFILE_PATH
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(CorruptionError):
        read_profile(fs)


def test_the_signs_of_format_1_never_change() -> None:
    assert signs(5, 3).astype(int).tolist() == SIGNS
    assert abs(signs(4096).mean()) < 0.02


def test_a_projection_of_a_row_at_unit_length_has_variance_one() -> None:
    _, found = sketch(torch.randn(400, 512, generator=torch.Generator().manual_seed(0)))
    assert found.var() == pytest.approx(1.0, abs=0.1)


SIGNS = [[-1, 1, 1], [-1, 1, 1], [-1, 1, 1], [1, -1, 1], [1, 1, -1]]
