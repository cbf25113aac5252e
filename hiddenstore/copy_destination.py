"""Where a copy goes: sources of one capture, a store that can hold it, and what its codecs do to the numbers."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hiddenstore.calibration import copy_slice
from hiddenstore.codecs import get_layout, get_recipe, recipe_name
from hiddenstore.errors import ConfigError, ConflictError, NotFoundError
from hiddenstore.store import Store
from hiddenstore.verify.profile import PROFILE_PATH, read_profile
from hiddenstore.writer import capture_differences, create_store
from schemas.capture import TOPK, Codecs
from schemas.manifest import Container


def check_sources(sources: Sequence[Store], location: str | Path) -> None:
    """Refuse a copy onto a source (``copy-onto-itself``) and sources of two captures (``capture-mismatch``)."""
    for source in sources:
        if Path(source.path).resolve() == Path(location).resolve():
            raise ConfigError(f"{source.path} cannot be copied onto itself", kind="copy-onto-itself")
    first = sources[0]
    for other in sources[1:]:
        lines = [
            line
            for line in capture_differences(first.manifest, other.manifest)
            if not line.startswith(("capture.codecs.", "container:"))
        ]
        if lines:
            listed = "\n".join(f"  {line}" for line in lines)
            raise ConflictError(
                f"{first.path} and {other.path} hold different captures (stored: first, asked: second)\n{listed}",
                kind="capture-mismatch",
                hint=f"hiddenstore diff {first.path} {other.path}",
            )


def open_destination(
    sources: Sequence[Store], location: str | Path, recipe: str | None, container: Container | None
) -> Store:
    """Create the store of a copy, or open the one there; None keeps its recipe or container, else the first source's.

    Raises:
        ConflictError: ``capture-mismatch``.
        ConfigError: ``recipe-unknown``, ``codec-unknown``, ``final-topk``.
    """
    first = sources[0]
    manifest = first.manifest
    with suppress(NotFoundError):
        manifest = Store.open(location, strict=False).manifest
    if recipe is None:
        recipe, codecs = manifest.recipe, manifest.capture.codecs
    else:
        codecs = get_recipe(recipe)
        recipe = recipe_name(codecs)
    _require_finals(sources, codecs)
    capture = first.capture.model_copy(update={"codecs": codecs})
    files = {entry.path: first.target_file(entry.path) for entry in first.manifest.target_files}
    return create_store(location, capture, first.manifest.head, recipe, files, container or manifest.container)


def _require_finals(sources: Sequence[Store], codecs: Codecs) -> None:
    """Top tokens are made from the final hidden, never the other way."""
    without = next((source for source in sources if source.capture.holds_topk), None)
    if without is not None and codecs.final != TOPK:
        raise ConfigError(
            f"{without.path} holds the target's top tokens in place of the final hidden, which a copy in "
            f"{recipe_name(codecs)} needs: it cannot be brought back",
            kind="final-topk",
            hint=f"copy with --recipe {recipe_name(codecs.model_copy(update={'final': TOPK}))}, or collect again",
        )
    needy = next((source for source in sources if not source.capture.aux_layers), None)
    if needy is not None and codecs.final == TOPK and not needy.capture.holds_topk:
        raise ConfigError(
            f"{needy.path} holds the final hidden alone, and top tokens in its place would leave nothing to train from",
            kind="final-topk",
            hint="copy with --recipe safe",
        )


def bring_calibration(sources: Sequence[Store], destination: Store) -> None:
    """The first layer profile, which ``verify --meaning`` holds states against, and the first raw slice."""
    profiled = next((source for source in sources if read_profile(source.fs) is not None), None)
    if profiled is not None:
        destination.fs.put_if_absent(PROFILE_PATH, profiled.fs.read(PROFILE_PATH))
    next((source for source in sources if copy_slice(source.fs, destination.fs)), None)


def rounding_notes(sources: Sequence[Store], destination: Store, recoding_equal: bool) -> list[str]:
    """What re-encoding does to the numbers, one line per codec; equal codecs count when units are cut anew."""
    notes: list[str] = []
    if not recoding_equal:
        sources = [source for source in sources if source.capture.codecs != destination.capture.codecs]
    for group in ("aux", "final"):
        new = get_layout(getattr(destination.capture.codecs, group))
        for source in sources:
            old = get_layout(getattr(source.capture.codecs, group))
            if TOPK in (old.name, new.name):
                if old.name == new.name:
                    continue
                note = f"{group}: {old.name} → {TOPK} keeps the target's top tokens; the hidden cannot be brought back"
            elif not old.exact and not new.exact:
                note = f"{group}: {old.name} → {new.name} rounds a second time"
            elif not old.exact:
                note = f"{group}: {old.name} → {new.name} keeps the error of {old.name}; it does not bring bf16 back"
            elif not new.exact:
                note = f"{group}: {old.name} → {new.name} rounds once"
            else:
                continue
            if note not in notes:
                notes.append(note)
    return notes
