"""``hiddenstore demo``: the whole path on the bundled target, as the commands a user would type."""

import hashlib
import json
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations
from hiddenstore.cli.inner import do, do_on_ranks
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.errors import ConflictError, Kind

TRAINING_QUESTIONS = 3000
VALIDATION_QUESTIONS = 90
PROMPTS = 40
ANSWER_TOKENS = 128
CHAIN = 3
TRAIN_SETTINGS = (
    "data.batch_tokens=1000",
    "data.pack_tokens=560",
    "drafter.fc_norm=true",
    "drafter.norm_output=true",
    "drafter.intermediate_size=576",
    "drafter.train_embeddings=true",
    "loss.steps=3",
    "loss.step_decay=0.7",
    "optim.lr=4e-3",
    "optim.clip=0.5",
    "train.epochs=5",
    "train.checkpoint_every=0",
)


class Walk:
    """One run of the demo into a fresh folder; ConflictError where it holds something already."""

    def __init__(self, folder: str, seed: int) -> None:
        self.folder = Path(folder)
        self.seed = seed
        self.started = time.monotonic()
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ConflictError(
                f"{self.folder} is not empty; the demo starts from nothing",
                kind=Kind.OUTPUT_EXISTS,
                hint=f"hiddenstore demo {shlex.quote(f'{folder}-2')}",
            )
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> dict[str, Any]:
        """Every step in order; the figures of the last page."""
        target = str(TARGET_DIR)
        questions, prompts = self._questions()
        answers, data, store, run = (self._at(name) for name in ("answers.jsonl", "data", "store", "run"))
        output().note("\n1  the target answers questions about the standard library, at temperature 0.8")
        sampling = ("--temperature", "0.8", "--max-new-tokens", str(ANSWER_TOKENS), "--workers", "2")
        do("regenerate", questions, "-o", answers, "--target", target, *sampling)
        output().note("\n2  conversations become tokens, a loss mask and turn spans")
        do("prepare", answers, "-o", data, "--target", target, "--val", "2%")
        output().note("\n3  one forward pass captures three layers and the final hidden")
        do("collect", data, "-o", store, "--target", target, "--engine", "hf", "--layers", "eagle3")
        output().note("\n4  the store is checked: every byte, and what the numbers mean")
        do("verify", store, "--full", "--meaning")
        output().note("\n5  an EAGLE-3.1 drafter trains from disk; the target is not loaded")
        self._train(store, "--drafter", "eagle3", *TRAIN_SETTINGS, f"train.seed={self.seed}", "-o", run)
        output().note("\n6  real speculative decoding of held-out questions, beside plain greedy decoding")
        greedy = self._at("greedy-answers.jsonl")
        chain = ("--draft-len", str(CHAIN))
        count = ("-n", str(PROMPTS), "--max-new-tokens", str(ANSWER_TOKENS))
        live = do("decode", run, "--target", target, "--prompts", prompts, *chain, *count, "--answers", greedy)
        output().note("\n7  the same greedy text captured and walked: accepted length without running the target")
        recorded, judged = self._at("greedy-data"), self._at("greedy-store")
        do("prepare", greedy, "-o", recorded, "--target", target, "--val", "0")
        do("collect", recorded, "-o", judged, "--target", target, "--engine", "hf", "--layers", "eagle3")
        simulated = do("eval", run, judged, "--split", "train", *chain, "--untrained")
        output().note("\n8  the drafter as an engine loads it")
        drafter = self._at("drafter-vllm")
        do("export", run, "--engine", "vllm", "-o", drafter)
        info = do("info", store, quiet=True)
        paths = {"store": store, "run": run, "greedy_store": judged, "drafter": drafter}
        return _document(info, simulated, live, paths, time.monotonic() - self.started)

    def show(self, document: dict[str, Any]) -> None:
        """The last page."""
        out = output()
        lengths = document["accepted_length"]
        out.print()
        out.table(
            ["tokens per target forward, chain of 3", ">accepted length"],
            [
                ["untrained drafter", f"{lengths['untrained']:.2f}"],
                ["best n-gram table, same training text", f"{lengths['ngram']:.2f}"],
                ["trained drafter, simulated on recorded text", f"{lengths['simulated']:.2f}"],
                ["trained drafter, live", f"{lengths['live']:.2f}"],
            ],
        )
        same = f"{document['identical_prompts']} of {document['prompts']} answers identical to plain greedy decoding"
        smaller = document["bytes_raw"] / document["bytes_stored"]
        out.print()
        out.pairs(
            [
                ("looping", f"{document['looping_share']:.0%} of the greedy answers, left out above"),
                ("captured", f"{document['tokens']:,} tokens, {smaller:.2f}x smaller than raw bf16"),
                ("lossless", same),
                ("tokens/s", f"{document['tokens_per_s']:,.0f}; greedy {document['baseline_tokens_per_s']:,.0f}"),
                *((name.replace("_", " "), path) for name, path in document["paths"].items()),
                ("took", f"{document['seconds']:.0f} s"),
            ]
        )

    def _questions(self) -> tuple[str, str]:
        """Files of questions, in an order that depends on their text alone: to train on, and held out."""
        unique = {row["messages"][0]["content"]: row for row in conversations()}
        order = sorted(unique, key=lambda text: hashlib.sha256(text.encode()).digest())
        validation, training = order[:VALIDATION_QUESTIONS], order[VALIDATION_QUESTIONS:][:TRAINING_QUESTIONS]
        return (
            self._write("questions.jsonl", [unique[text] for text in training]),
            self._write("held-out-questions.jsonl", [unique[text] for text in validation]),
        )

    def _at(self, name: str) -> str:
        return str(self.folder / name)

    def _write(self, name: str, rows: list[dict[str, Any]]) -> str:
        path = self.folder / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    def _train(self, *arguments: str) -> None:
        """A rank on each of two cores: in a drafter this small a second thread finds nothing to do."""
        ranks = min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        if ranks == 1:
            do("train", *arguments)
        else:
            do_on_ranks(ranks, "train", arguments)


def _document(
    info: Mapping[str, Any],
    simulated: Mapping[str, Any],
    live: Mapping[str, Any],
    paths: dict[str, str],
    seconds: float,
) -> dict[str, Any]:
    return {
        **{name: info[name] for name in ("tokens", "bytes_stored", "bytes_raw")},
        "accepted_length": {
            "untrained": simulated["untrained_accepted_length"],
            "ngram": live["ngram_accepted_length"],
            "simulated": simulated["accepted_length"],
            "live": live["accepted_length"],
        },
        "identical_prompts": live["prompts"] - len(live["differences"]) - len(live["ties"]),
        **{name: live[name] for name in ("prompts", "looping_share", "tokens_per_s", "baseline_tokens_per_s")},
        "paths": paths,
        "seconds": round(seconds, 1),
    }


@click.command(epilog=examples("hiddenstore demo", "hiddenstore demo /tmp/demo --seed 1"))
@click.argument("folder", default="hiddenstore-demo", type=click.Path())
@click.option("--seed", default=0, show_default=True, help="Seed of the drafter.")
@common_options
def demo(folder: str, seed: int) -> None:
    """The whole path on CPU: conversations, states, a trained drafter, its accepted length, an export.

    Runs the commands it prints, on the bundled target of 2.85 M parameters, and downloads nothing. About five minutes
    on two cores.
    """
    walk = Walk(folder, seed)
    document = walk.run()
    out = output()
    out.data(document, human=lambda: walk.show(document))
    out.hint("hiddenstore", "show", document["paths"]["store"])
