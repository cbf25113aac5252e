"""The bundled target, a small store of its own greedy answers, and drafters trained on it through the command line."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations
from hiddenstore.cli import main
from hiddenstore.records import LOOP_SHARE, repeated_share
from trainer.evaluate import speculate
from trainer.evaluate.speculate import Generation
from trainer.evaluate.target import LiveTarget

QUESTIONS = 24
NEW_TOKENS = 144
SHORTEST_ANSWER = 40
"""Tokens. Engines count what a draft gets accepted past the end of an answer, we do not: long answers hide that."""
ASKED = 128
"""Most greedy answers of this small target loop, are dropped, or are short."""
STEPS = 80
FAST = (
    "data.batch_tokens=1000",
    "data.pack_tokens=1000",
    "train.validate_every=0",
    "train.checkpoint_every=0",
    "optim.kind=muon",
    "optim.lr=0.01",
)

Document = dict[str, Any]


def hiddenstore(*words: str) -> Document:
    """What a command answers with ``--json``, run in this process."""
    result = CliRunner().invoke(main, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document: Document = json.loads(result.stdout)
    return document


@dataclass(frozen=True)
class EngineWorld:
    """A folder of things that belong together; what a test adds goes below ``root`` under a lock of its own. Up to
    ``count`` questions, answered with up to ``new_tokens`` tokens."""

    root: Path
    target: str = str(TARGET_DIR)
    count: int = QUESTIONS
    new_tokens: int = NEW_TOKENS

    @property
    def questions(self) -> str:
        """JSONL of the conversations that the store holds, answered by the target itself."""
        return str(self.root / "answers.jsonl")

    @property
    def store(self) -> str:
        return str(self.root / "store")

    @cached_property
    def greedy(self) -> list[tuple[list[int], list[int]]]:
        """Prompt and greedy answer of every sample of the store, as token ids, by transformers in fp32."""
        return [(row["prompt"], row["answer"]) for row in json.loads((self.root / "greedy.json").read_text("utf-8"))]

    @property
    def prompts(self) -> list[list[int]]:
        return [prompt for prompt, _ in self.greedy]

    def trained(self, name: str, drafter: str, *words: str, steps: int = STEPS) -> str:
        """The run of a drafter trained on the store, made by whichever test asks first."""
        run = self.root / "runs" / name
        with FileLock(f"{self.root}/{name}.lock"):
            if not run.exists():
                limits = (*FAST, f"train.max_steps={steps}", *words)
                hiddenstore("train", self.store, "-o", str(run), "--drafter", drafter, *limits)
        return str(run)

    def exported(self, run: str, engine: str = "vllm") -> str:
        """The drafter of a run as an engine loads it, in fp32."""
        out = Path(f"{run}-{engine}")
        with FileLock(f"{out}.lock"):
            if not out.exists():
                hiddenstore("export", run, "--engine", engine, "-o", str(out), "--dtype", "float32")
        return str(out)

    def decoded(self, run: str, draft_len: Sequence[int]) -> "Decoded":
        """Every question of the store decoded with the drafter of a run, by our own loop; of several draft lengths each
        is decoded by itself, so what holds more of them than are needed serves too."""
        with FileLock(f"{run}-decoded.lock"):
            for file in Path(run).parent.glob(f"{Path(run).name}-decoded-*-{self.new_tokens}.json"):
                there = Decoded(json.loads(file.read_text(encoding="utf-8")))
                if there.by_length.keys() >= set(draft_len):
                    return there
            lengths = ",".join(map(str, draft_len))
            file = Path(f"{run}-decoded-{lengths}-{self.new_tokens}.json")
            answers = file.with_suffix(".jsonl")
            count = ("-n", str(self.count), "--max-new-tokens", str(self.new_tokens), "--answers", str(answers))
            words = ("--target", self.target, "--dtype", "float32", "--prompts", self.questions)
            with plain_answers_of(self.target):
                document = hiddenstore("decode", run, *words, "--draft-len", lengths, *count)
            rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
            file.write_text(json.dumps({**document, "rows": rows}), encoding="utf-8")
        return Decoded({**document, "rows": rows})

    def evaluated(self, run: str, draft_len: Sequence[int]) -> dict[int, float]:
        """Accepted length by draft length that ``eval`` finds over the same text, from the store alone."""
        lengths = ",".join(map(str, draft_len))
        file = Path(f"{run}-evaluated-{lengths}.json")
        with FileLock(f"{file}.lock"):
            if not file.exists():
                document = hiddenstore("eval", run, self.store, "--split", "train", "--draft-len", lengths)
                file.write_text(json.dumps(document), encoding="utf-8")
        document = json.loads(file.read_text(encoding="utf-8"))
        return {row["draft_len"]: row["accepted_length"] for row in document["sweep"]}


PLAIN: dict[tuple[str, tuple[int, ...], int], Generation] = {}
"""By target, prompt and most tokens."""


@contextlib.contextmanager
def plain_answers_of(target: str) -> Iterator[None]:
    """Let ``decode`` compute the target's plain greedy answer to a prompt once, whatever drafters it is compared with.
    How long they took is then of the first time."""
    right = speculate.plain

    def plain(live: LiveTarget, prompt: Sequence[int], most: int, rule: speculate.Rule | None = None) -> Generation:
        assert rule is None
        key = (target, tuple(prompt), most)
        if key not in PLAIN:
            PLAIN[key] = right(live, prompt, most)
        return PLAIN[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculate, "plain", plain)
        yield


@dataclass(frozen=True)
class Decoded:
    """What ``decode`` said and wrote."""

    document: Document

    @cached_property
    def prompts(self) -> list[list[int]]:
        return [row["prompt_ids"] for row in self.document["rows"]]

    @cached_property
    def answers(self) -> list[list[int]]:
        return [row["answer_ids"] for row in self.document["rows"]]

    @cached_property
    def by_length(self) -> dict[int, Document]:
        """The row of each draft length."""
        return {row["draft_len"]: row for row in self.document["sweep"]}


def make_engine_world(world: EngineWorld, layers: str = "all-drafters") -> EngineWorld:
    """Questions about the standard library, the target's greedy answers, and their states."""
    root = world.root
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{root}/world.lock"):
        if Path(world.store).exists():
            return world
        unique = {row["messages"][0]["content"] for row in conversations()}
        chosen = sorted(unique, key=lambda text: sha256(text.encode()).digest())[: ASKED * world.count // QUESTIONS]
        rows = greedy_answers(world, chosen)
        (root / "greedy.json").write_text(json.dumps(rows), encoding="utf-8")
        lines = [json.dumps({"messages": row["messages"]}) for row in rows]
        Path(world.questions).write_text("\n".join(lines) + "\n", encoding="utf-8")
        data = str(root / "data")
        hiddenstore("prepare", world.questions, "-o", data, "--target", world.target, "--val", "0")
        how = ("--layers", layers, "--dtype", "fp32", "--recipe", "lossless", "--engine", "hf")
        hiddenstore("collect", data, "-o", world.store, "--target", world.target, *how)
    return world


def greedy_answers(world: EngineWorld, questions: Sequence[str]) -> list[Document]:
    """Questions that the target answers at length and without looping, with their answers, all asked in one batch."""
    tokenizer = AutoTokenizer.from_pretrained(world.target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(world.target, dtype=torch.float32).eval()
    asked = [[{"role": "user", "content": question}] for question in questions]
    how = {"add_generation_prompt": True, "return_dict": True, "padding": True, "return_tensors": "pt"}
    batch = tokenizer.apply_chat_template(asked, **how)
    found = model.generate(**batch, do_sample=False, max_new_tokens=world.new_tokens)
    rows = []
    for messages, mask, text in zip(asked, batch["attention_mask"], found.tolist(), strict=True):
        width = len(mask)
        prompt, answer = text[width - int(mask.sum()) : width], text[width:]
        if tokenizer.eos_token_id in answer:
            answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
        if len(answer) >= SHORTEST_ANSWER and repeated_share(answer) <= LOOP_SHARE:
            said = tokenizer.decode(answer, skip_special_tokens=True)
            spoken = [*messages, {"role": "assistant", "content": said}]
            rows.append({"prompt": prompt, "answer": answer, "messages": spoken})
    return rows[: world.count]
