"""Training files of Model Optimizer and NeMo AutoModel: every field is answered, nothing of them is lost in silence."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from hiddenstore.cli import main
from hiddenstore.cli.peers import Translation, translated
from hiddenstore.cli.run import Pipeline
from hiddenstore.errors import ConfigError
from hiddenstore.settings import load
from tests.trainer.runs import WORDS, tiny_store
from trainer.settings import check_settings

EAGLE3 = {
    "metadata": {"recipe_type": "speculative_eagle", "description": "a recipe"},
    "model": {"model_name_or_path": "maker/target", "trust_remote_code": False, "use_fake_base_for_offline": False},
    "data": {"mode": None, "data_path": "chats.jsonl", "offline_data_path": None, "draft_vocab_cache": None},
    "training": {
        "output_dir": "ckpts/x", "num_train_epochs": 1, "per_device_train_batch_size": 2, "learning_rate": "1.0e-4",
        "warmup_steps": 1000, "training_seq_len": 2048, "logging_steps": 100, "save_steps": 8192, "cp_size": 1,
        "disable_tqdm": False, "estimate_ar": False, "ar_validate_steps": -1, "answer_only_loss": False,
        "do_eval": False, "lr_scheduler_type": "linear", "save_strategy": "steps", "weight_decay": 0.0,
        "dataloader_drop_last": True, "bf16": True, "tf32": True, "remove_unused_columns": False,
    },
    "eagle": {
        "eagle_decoder_type": "llama", "eagle_ttt_steps": 3, "eagle_mix_hidden_states": False,
        "eagle_use_torch_compile": True, "eagle_self_logit_distillation": True, "eagle_freeze_base_model": True,
        "eagle_loss_decay_factor": 0.9, "eagle_hidden_state_distillation": False, "eagle_reuse_base_decoder": False,
        "eagle_report_acc": True, "eagle_enable_nvtx": False,
        "eagle_export_rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048
        },
        "eagle_architecture_config": {"num_hidden_layers": 2, "intermediate_size": 8192, "draft_vocab_size": 32000},
    },
}  # fmt: skip
DFLASH = {
    "imports": {"dflash_default": "configs/default", "dflash_training_default": "configs/training_default"},
    "model": {"model_name_or_path": "maker/target"},
    "data": {"data_path": "chats.jsonl"},
    "training": {"$import": "dflash_training_default", "output_dir": "out"},
    "dflash": {"$import": "dflash_default", "dflash_loss_decay_factor": 0, "dflash_mask_token_id": 5},
}
AUTOMODEL = {
    "recipe": "TrainEagle3Recipe",
    "dist_env": {"backend": "nccl", "timeout_minutes": 60},
    "recipe_args": {
        "target_model_name_or_path": "maker/target", "train_data_path": "chats.jsonl", "val_data_path": None,
        "train_split": "train[:200000]", "val_split": None, "output_dir": "outputs/x", "seq_length": 2048,
        "micro_batch_size": 1, "grad_accumulation_steps": 4, "num_workers": 4, "num_epochs": 1, "ttt_steps": 4,
        "draft_vocab_size": 32000, "freeze_embeddings": True, "shuffle_seed": 42, "log_every_steps": 20,
        "max_grad_norm": 1.0, "fc_norm": True, "norm_output": True, "target_attn_implementation": "sdpa",
    },
    "optimizer": {"lr": "2.0e-4", "betas": [0.9, 0.95], "weight_decay": 0.0, "warmup_ratio": 0.05, "min_lr_ratio": 0.1},
    "checkpoint": {
        "enabled": True, "checkpoint_dir": "c", "model_save_format": "safetensors", "save_consolidated": True
    },
}  # fmt: skip
EAGLE2 = {
    "recipe": "TrainEagle2Recipe",
    "recipe_args": {"draft_num_hidden_layers": 1, "hidden_loss_weight": 1.0, "token_loss_weight": 0.1},
    "optimizer": {"lr": 1e-4},
}
ALL = {"eagle3": EAGLE3, "dflash": DFLASH, "automodel": AUTOMODEL, "eagle2": EAGLE2}


def file_of(folder: Path, document: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def ours(folder: Path, document: Any, *words: str, ranks: int = 1) -> Translation:
    found = translated(file_of(folder, document), words, ranks)
    assert found is not None
    return found


def leaves(tree: dict[str, Any], path: str = "") -> list[str]:
    return [name for key, value in tree.items() for name in
            (leaves(value, f"{path}{key}.") if isinstance(value, dict) and value else [f"{path}{key}"])]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_every_field_is_answered_and_every_setting_exists(tmp_path: Path, name: str) -> None:
    found = ours(tmp_path, ALL[name])
    assert found.unknown == []
    written = {field for field in leaves(ALL[name]) if "import" not in field}
    assert written <= {field for field, _, _ in found.rows}
    check_settings(found.drafter, None, found.words())
    tree = {"target": "t", "out": "o", "inputs": ["i"], **found.pipeline()}
    assert load(Pipeline, None, (), tree).drafters[found.drafter].settings


def test_model_optimizer_s_recipe_becomes_these_settings(tmp_path: Path) -> None:
    values = ours(tmp_path, EAGLE3, ranks=4).values
    assert values | {
        "target": "maker/target", "inputs": "chats.jsonl", "out": "ckpts/x", "loss.steps": "3", "optim.lr": "1.0e-4",
        "loss.step_decay": "0.9", "optim.warmup_steps": "1000", "optim.min_lr_ratio": 0, "data.loss_on": "all",
        "data.max_tokens": "2048", "data.pack_tokens": 4096, "data.batch_tokens": 4 * 4096, "drafter.num_layers": "2",
        "export.yarn": [32.0, 2048], "prepare.loss-on": "all", "drafter.vocab_size": "32000", "loss.kind": "soft_ce",
    } == values  # fmt: skip
    assert "train.validate_every" not in values


def test_automodel_s_file_becomes_these_settings(tmp_path: Path) -> None:
    found = ours(tmp_path, AUTOMODEL)
    assert found.values | {
        "optim.beta1": "0.9", "optim.beta2": "0.95", "drafter.train_embeddings": False, "collect.attention": "sdpa",
        "data.batch_tokens": 4 * 2048, "inputs": "chats.jsonl:train[:200000]", "data.seed": "42", "optim.clip": "1.0",
        "drafter.fc_norm": "true", "optim.schedule": "cosine", "train.dist_backend": "nccl",
        "train.dist_timeout_minutes": "60",
    } == found.values  # fmt: skip
    assert ours(tmp_path, EAGLE2).drafter == "eagle1"


def test_imports_whose_values_are_known_are_filled_in_and_others_refused(tmp_path: Path) -> None:
    values = ours(tmp_path, DFLASH).values
    assert (values["drafter.block_size"], values["train.epochs"], values["loss.gamma"]) == (8, 10, "0")
    with pytest.raises(ConfigError, match="lies in another file"):
        ours(tmp_path, {**DFLASH, "dflash": {"$import": "mine"}})


def test_mixed_hidden_states_are_a_setting_and_its_mode_may_come_first(tmp_path: Path) -> None:
    mixing = "loss.mix_hidden_states"
    assert ours(tmp_path, EAGLE3).values[mixing] == "none"
    assert ours(tmp_path, EAGLE3, "eagle.eagle_hsm_mode=no_replace").values[mixing] == "none"
    words = ("eagle.eagle_hidden_state_distillation=true", "eagle.eagle_reuse_base_decoder=true")
    assert ours(tmp_path, EAGLE3, "eagle.eagle_mix_hidden_states=true", *words).values[mixing] == "sparse_replace"
    mode = {"eagle_hsm_mode": "uniform_layer_sample", **EAGLE3["eagle"], "eagle_mix_hidden_states": True}
    found = ours(tmp_path, {**EAGLE3, "eagle": mode})
    assert found.values[mixing] == "uniform_layer_sample"
    check_settings(found.drafter, None, found.words())


def test_words_may_be_in_their_names_or_in_ours(tmp_path: Path) -> None:
    found = ours(tmp_path, EAGLE3, "training.cp_size=2", "data.data_path=other.jsonl", "optim.lr=5e-3", "data.seed=7")
    assert (found.values["train.context_parallel"], found.values["inputs"]) == ("2", "other.jsonl")
    assert found.words()[-2:] == ("optim.lr=5e-3", "data.seed=7")


def test_what_is_not_offered_is_refused_by_name_all_at_once(tmp_path: Path) -> None:
    words = ("eagle.eagle_share_kv=true", "eagle.eagle_decoder_type=kimik2", "training.bf16=true")
    with pytest.raises(ConfigError) as raised:
        ours(tmp_path, EAGLE3, *words)
    assert "eagle_share_kv=true: shared keys and values are not offered" in raised.value.message
    assert "eagle_decoder_type=kimik2: its block with latent attention" in raised.value.message
    restore = {**AUTOMODEL, "checkpoint": {"restore_from": "epoch_0_step_3000"}}
    with pytest.raises(ConfigError, match="--resume-from RUN/checkpoints/step-N"):
        ours(tmp_path, restore)
    with pytest.raises(ConfigError, match="trains TrainMtpRecipe; there are TrainEagle3Recipe"):
        ours(tmp_path, {**AUTOMODEL, "recipe": "TrainMtpRecipe"})


def test_a_settings_file_of_ours_is_none_of_theirs(tmp_path: Path) -> None:
    assert translated(file_of(tmp_path, {"data": {"seed": 1}, "optim": {"lr": 1.0}})) is None
    assert translated(file_of(tmp_path, {"target": "t", "data": {"x": 1}})) is None


def test_train_takes_the_file_prints_its_map_and_names_what_nothing_is_known_of(tmp_path: Path) -> None:
    tiny_store(tmp_path)
    arguments = {**AUTOMODEL["recipe_args"], "new_idea": 3, "seq_length": 16, "draft_vocab_size": 40, "ttt_steps": 2}
    file = file_of(tmp_path, {**AUTOMODEL, "recipe_args": arguments})
    small = [word for word in WORDS if word.startswith("drafter.")]
    words = ["train", str(tmp_path / "store"), "-o", str(tmp_path / "run"), "-c", str(file), "train.max_steps=1"]
    done = CliRunner().invoke(main, [*words, *small], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert re.search(r"recipe_args.ttt_steps +2 → loss.steps=2", done.stderr)
    assert "nothing is known of recipe_args.new_idea=3: left out" in done.stderr
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (kept["loss"]["steps"], kept["data"]["max_tokens"], kept["optim"]["lr"]) == (2, 16, 2e-4)
    refused = CliRunner().invoke(main, [*words, "drafter.width=3", "--json"])
    assert json.loads(refused.stderr.strip().splitlines()[-1])["kind"] == "config-unknown-key"
