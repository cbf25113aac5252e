"""The options of a collect job, and what follows from them before anything is opened."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from collectors.engines import ENGINES, EngineOptions
from collectors.targets.images import open_images
from collectors.targets.layers import LayerChoice
from hiddenstore.codecs.recipes import DEFAULT_RECIPE, RECIPES, get_recipe, recipe_name
from hiddenstore.errors import ConfigError, FormatError, Kind
from hiddenstore.fs import is_address
from hiddenstore.process import Rank
from hiddenstore.settings import parse
from hiddenstore.targets.blocks import require_rebuildable
from hiddenstore.targets.folder import TargetFolder
from hiddenstore.targets.identity import tokenizer_differences
from schemas.capture import TOPK, FinalMode
from schemas.manifest import Container
from schemas.prepared import PreparedData

AUTO = "auto"


@dataclass(frozen=True)
class CollectOptions:
    """What a person asks of ``hiddenstore collect``.

    ``final`` None follows from ``layers``; ``template`` is the file given to ``prepare``, if one was; ``check`` as
    ``collectors.checks.reference.parse_check`` reads it; ``extra`` are the engine's own settings.
    """

    data: str | Path
    store: str | Path
    target: str
    revision: str | None = None
    template: str | None = None
    trust_remote_code: bool = False
    adapter: str | Path | None = None
    engine: str = "hf"
    layers: str = "eagle3"
    final: FinalMode | None = None
    recipe: str = DEFAULT_RECIPE
    container: Container | None = None
    batch_tokens: int = 4096
    dtype: str | None = None
    device: str = "auto"
    tensor_parallel: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)
    scratch: str | Path | None = None
    server: str | None = None
    check: str = AUTO
    same_target: bool = False

    def absolute(self) -> "CollectOptions":
        """The same for a process in another folder."""
        names = ["data", "store", "template", "scratch", "adapter", *(["target"] if Path(self.target).exists() else [])]
        paths = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        absolute: dict[str, Any] = {
            name: str(Path(path).absolute()) for name, path in paths.items() if not is_address(path)
        }
        return replace(self, **absolute)


def resolve_recipe(recipe: str, choice: LayerChoice, num_layers: int, has_images: bool) -> str:
    """The recipe's own name, of the default for ``auto``. Raises ConfigError: ``final-unfit``: a drafter reads the
    final hidden, the recipe stores top tokens; as ``get_recipe`` and ``require_rebuildable``."""
    codecs = get_recipe(DEFAULT_RECIPE if recipe == AUTO else recipe)
    if codecs.final == TOPK and choice.reads_final:
        raise ConfigError(
            f"recipe {recipe} keeps the target's top tokens instead of the final hidden, which these drafters read",
            kind=Kind.FINAL_UNFIT,
            hint=f"--recipe {recipe_name(codecs.model_copy(update={'final': RECIPES[DEFAULT_RECIPE][1]}))}",
        )
    require_rebuildable(codecs, choice.aux_layers, num_layers, has_images)
    return recipe_name(codecs)


def require_data_fits(info: PreparedData, folder: TargetFolder) -> None:
    """Refuse DATA tokenised for another target: FormatError ``tokenizer-mismatch``, naming what differs."""
    wrong = tokenizer_differences(info, folder)
    is_other_template, tokenizer_fits = info.chat_template_sha256 != folder.chat_template_sha256, not wrong
    if is_other_template:
        digests = info.chat_template_sha256, folder.chat_template_sha256
        wrong.append("chat template {:.8}… in the data, {:.8}… of the target".format(*digests))
    images = None if info.images is None else open_images(folder)
    if info.images is not None and (images is None or images.spec != info.images.spec):
        ours = "none" if images is None else images.spec
        wrong.append(f"image processor {info.images.spec} in the data, {ours} of the target")
    if not wrong:
        return
    hint = f"hiddenstore prepare INPUT -o DATA --target {shlex.quote(folder.name)}"
    if is_other_template and tokenizer_fits:
        hint += "; or, if prepare was given a template, collect with the same --template FILE"
    problem = f"the data was prepared for {info.target} and does not fit target {folder.label}: {'; '.join(wrong)}"
    raise FormatError(problem, kind=Kind.TOKENIZER_MISMATCH, hint=hint)


def require_engine_fits(engine: str, info: PreparedData) -> None:
    """Refuse images where the engine runs tokens alone: ConfigError ``engine-arg``."""
    if info.images is not None and not ENGINES[engine].images:
        raise ConfigError(
            f"engine {engine} runs token ids alone, and {info.images.samples} samples of the data hold images",
            kind=Kind.ENGINE_ARG,
            hint=f"--engine {ENGINES.default}",
        )


def read_engine_args(pairs: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` words as settings, values read as YAML; ConfigError ``engine-arg``.

    >>> read_engine_args(["enforce_eager=true", "gpu_memory_utilization=0.8"])
    {'enforce_eager': True, 'gpu_memory_utilization': 0.8}
    """
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        try:
            settings[name.strip().replace("-", "_")] = parse(value, plain=True)
        except yaml.YAMLError:
            equals = ""
        if not equals or not name.strip():
            raise ConfigError(
                f"--engine-arg {pair!r} is no KEY=VALUE", kind=Kind.ENGINE_ARG, hint="--engine-arg enforce_eager=true"
            )
    return settings


def engine_options(options: CollectOptions, choice: LayerChoice, longest: int, rank: Rank) -> EngineOptions:
    """What this rank asks of its engine; ``longest`` is the longest sample in tokens."""
    device = options.device
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{rank.local_rank % torch.cuda.device_count()}"
    scratch = None if options.scratch is None else Path(options.scratch)
    same = {name: getattr(options, name) for name in ("batch_tokens", "dtype", "tensor_parallel", "extra", "server")}
    return EngineOptions(
        choice.aux_layers, longest=longest, device=device, scratch=scratch, local_rank=rank.local_rank, **same
    )
