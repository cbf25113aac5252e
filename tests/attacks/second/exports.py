"""Attempts on exports and on targets, edited between the commands that read them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.attacks.second.lab import Attempt, Lab, Outcome, rewrite
from tests.attacks.second.stores import put


def exported(spoil: Callable[[Path], object], *words: str) -> Callable[[Lab], Outcome]:
    """An export edited, then served on paper or imported back."""

    def do(lab: Lab) -> Outcome:
        folder = lab.copy("exported")
        spoil(folder)
        if words[0] == "serve":
            return lab.run("serve", folder, "--target", lab.path("target"), "--engine", "vllm", "--print-only")
        return lab.run("import-drafter", folder, "--store", lab.path("store"), "-o", lab.folder / "back")

    return do


def config(change: Callable[[dict[str, Any]], object], name: str = "config.json") -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        document = json.loads((folder / name).read_bytes())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return spoil


def text(data: str, name: str = "config.json") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(data)


def on_target(spoil: Callable[[Path], object], *words: str, base: str = "target") -> Callable[[Lab], Outcome]:
    """The target changed after capture; then collected with, decoded with or served."""

    def do(lab: Lab) -> Outcome:
        target = lab.copy(base, "spoiled")
        spoil(target)
        if words[0] == "collect":
            store = lab.copy("units")
            next((store / "commits").glob("*.json")).unlink()
            return lab.run("collect", lab.path("data"), "-o", store, "--target", target, "--layers", "0,1,2")
        if words[0] == "serve":
            return lab.run("serve", lab.path("exported"), "--target", target, "--engine", "vllm", "--print-only")
        if words[0] == "export":
            return lab.run(
                "export", lab.path("run"), "--engine", "speculators", "--target", target, "-o", lab.folder / "out"
            )
        if words[0] == "import":
            return lab.run("prepare", lab.path("chats.jsonl"), "-o", "d", "--target", target)
        words_ = ("decode", lab.path("run"), "--target", target, "--prompts", lab.path("chats.jsonl"))
        return lab.run(*words_, "-n", "1", "--max-new-tokens", "4")

    return do


def weights(name: str = "model.layers.1.mlp.down_proj.weight") -> Callable[[Path], None]:
    """One block replaced by somebody's fine-tuning."""

    def spoil(target: Path) -> None:
        held = load_file(target / "model.safetensors")
        held[name] = held[name] * 1.5
        save_file(held, target / "model.safetensors", metadata={"format": "pt"})

    return spoil


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return config(change, "tokenizer.json")


def swap_words(document: dict[str, Any]) -> None:
    vocabulary = document["model"]["vocab"]
    vocabulary["x"], vocabulary["y"] = vocabulary["y"], vocabulary["x"]


ATTEMPTS = (
    *(
        Attempt(f"an export, {words}: {what}", exported(spoil, words), word)
        for what, words, spoil, word in (
            ("config.json is a list", "import", text("[1]"), "drafter-unfit"),
            ("config.json is a list", "serve", text("[1]"), "serve-setting"),
            ("config.json is no text", "import", lambda f: (f / "config.json").write_bytes(b"\xff"), "drafter-unfit"),
            ("config.json of NaN", "import", text('{"hidden_size": NaN}'), "drafter-unfit"),
            (
                "another width",
                "import",
                config(put("hidden_size", value=128)),
                "init-differs",
            ),
            ("a width as text", "import", config(put("hidden_size", value="64x")), "drafter-unfit|drafter-shape"),
            ("no heads", "import", config(put("num_attention_heads", value=0)), "drafter-unfit|drafter-shape"),
            ("minus one head", "import", config(put("num_key_value_heads", value=-1)), "drafter-unfit|drafter-shape"),
            ("10^9 layers", "import", config(put("num_hidden_layers", value=10**9)), "drafter-unfit|drafter-shape"),
            (
                "layers shifted by one",
                "import",
                config(
                    lambda c: (
                        c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 3, 4]),
                        c.update(eagle_aux_hidden_state_layer_ids=[2, 3, 4]),
                    )
                ),
                "drafter-unfit|layer-missing|store-lacks-states|held",
            ),
            (
                "layers beyond the target",
                "import",
                config(
                    lambda c: (
                        c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 2, 99]),
                        c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 99]),
                    )
                ),
                "drafter-unfit|layer-missing|store-lacks-states|layers-invalid",
            ),
            (
                "layers as text",
                "import",
                config(
                    lambda c: (
                        c["eagle_config"].update(eagle_aux_hidden_state_layer_ids="123"),
                        c.update(eagle_aux_hidden_state_layer_ids="123"),
                    )
                ),
                "drafter-unfit|layer-missing|layers-invalid",
            ),
            ("a rope of text", "import", config(put("rope_theta", value="x")), "drafter-unfit"),
            ("an eps of minus one", "import", config(put("rms_norm_eps", value=-1)), "drafter-unfit"),
            ("a vocabulary too large", "import", config(put("draft_vocab_size", value=10**12)), "held"),
            ("hiddenstore.json is a list", "serve", text("[]", "hiddenstore.json"), "serve-setting|serve-engine"),
            ("hiddenstore.json is a list", "import", text("[]", "hiddenstore.json"), "drafter-unfit|held"),
            (
                "hiddenstore.json of another checkpoint",
                "serve",
                config(put("target", "checkpoint_sha256", value="0" * 64), "hiddenstore.json"),
                "target-mismatch",
            ),
            (
                "hiddenstore.json of an engine nobody has",
                "serve",
                config(put("engine", value="x; rm -rf /"), "hiddenstore.json"),
                "serve-setting|serve-engine|name-unknown",
            ),
            (
                "hiddenstore.json drafts -1 tokens",
                "serve",
                config(put("draft_len", value=-1), "hiddenstore.json"),
                "serve-setting",
            ),
            (
                "hiddenstore.json drafts 'x; rm'",
                "serve",
                config(put("draft_len", value="x; rm -rf /"), "hiddenstore.json"),
                "serve-setting",
            ),
            (
                "hiddenstore.json missing",
                "serve",
                lambda f: (f / "hiddenstore.json").unlink(),
                "path-missing|serve-setting|held",
            ),
            (
                "weights missing",
                "serve",
                lambda f: (f / "model.safetensors").unlink(),
                "path-missing|serve-setting|export-unreadable",
            ),
            (
                "weights cut",
                "import",
                lambda f: rewrite(f / "model.safetensors", lambda d: d[: len(d) // 2]),
                "drafter-unfit|export-unreadable",
            ),
            (
                "weights of an LFS pointer",
                "import",
                text("version https://git-lfs.github.com/spec/v1\n", "model.safetensors"),
                "drafter-unfit|export-unreadable",
            ),
        )
    ),
    *(
        Attempt(f"a target after capture, {words}: {what}", on_target(spoil, words), word)
        for what, words, spoil, word in (
            ("one block fine-tuned", "collect", weights(), "store-mismatch"),
            ("one block fine-tuned", "decode", weights(), "target-mismatch"),
            ("one block fine-tuned", "serve", weights(), "target-mismatch"),
            ("one block fine-tuned", "export", weights(), "target-mismatch"),
            (
                "two words of the vocabulary swapped",
                "collect",
                tokenizer(swap_words),
                "tokenizer-mismatch|target-mismatch",
            ),
            (
                "two words of the vocabulary swapped",
                "decode",
                tokenizer(swap_words),
                "tokenizer-mismatch|target-mismatch",
            ),
            (
                "two words of the vocabulary swapped",
                "serve",
                tokenizer(swap_words),
                "tokenizer-mismatch|target-mismatch",
            ),
            (
                "two words of the vocabulary swapped",
                "export",
                tokenizer(swap_words),
                "tokenizer-mismatch|target-mismatch",
            ),
            (
                "template edited",
                "collect",
                text("{{ messages[0].content }}", "chat_template.jinja"),
                "target-mismatch|tokenizer-mismatch|held",
            ),
            (
                "template edited",
                "decode",
                text("{{ messages[0].content }}", "chat_template.jinja"),
                "target-mismatch|tokenizer-mismatch|held",
            ),
            ("rope_theta edited", "collect", config(put("rope_theta", value=5e5)), "store-mismatch"),
            ("rope_theta edited", "decode", config(put("rope_theta", value=5e5)), "target-mismatch"),
            ("config.json is a list", "collect", text("[]"), "target-unreadable|target-incomplete|target-damaged"),
            (
                "config.json is a list",
                "export",
                text("[]"),
                "target-unreadable|target-incomplete|target-damaged|target-mismatch",
            ),
            (
                "config.json is a list",
                "serve",
                text("[]"),
                "target-unreadable|target-incomplete|serve-setting|target-mismatch",
            ),
            ("config.json is a list", "import", text("[]"), "target-unreadable|target-incomplete"),
            (
                "config.json of NaN",
                "collect",
                lambda t: rewrite(t / "config.json", lambda d: d.replace(b"1e-06", b"NaN")),
                "target-mismatch|target-unreadable|target-incomplete",
            ),
            (
                "tokenizer.json is a list",
                "collect",
                text("[]", "tokenizer.json"),
                "target-unreadable|target-incomplete",
            ),
            (
                "tokenizer.json whose model is a list",
                "import",
                tokenizer(put("model", value=[])),
                "target-unreadable|target-incomplete",
            ),
            (
                "tokenizer.json with merges of numbers",
                "import",
                tokenizer(put("model", "merges", value=[1, 2])),
                "held",
            ),
            (
                "tokenizer.json whose added tokens are null",
                "import",
                tokenizer(put("added_tokens", value=None)),
                "target-unreadable|target-incomplete|held",
            ),
            (
                "tokenizer.json of zeros",
                "import",
                lambda t: rewrite(t / "tokenizer.json", lambda d: bytes(len(d))),
                "target-unreadable|target-incomplete",
            ),
            (
                "tokenizer_config.json is a list",
                "import",
                text("[]", "tokenizer_config.json"),
                "target-unreadable|target-incomplete",
            ),
            (
                "generation_config.json is no JSON",
                "collect",
                text("{", "generation_config.json"),
                "target-unreadable|target-incomplete|held",
            ),
            (
                "weights cut in half",
                "decode",
                lambda t: rewrite(t / "model.safetensors", lambda d: d[: len(d) // 2]),
                "target-damaged",
            ),
        )
    ),
)
