"""Answers in process, by part: CPU seconds of prefill, steps and draw of one batch, one thread.

The first COUNT questions of the demo are answered by ``--target`` as ``regenerate --workers 1`` answers them, ROUNDS
times in one process, since the first round also takes its memory from the system. Two commits are compared in turns.
Usage: python -m benchmarks.answers --target DIR [--count 60] [--max-new-tokens 64] [--rounds 3]
"""

import json
import time

import torch

from benchmarks import report
from collectors.demo import QUESTIONS
from collectors.regenerate import generate
from collectors.regenerate.generate import Sampling
from collectors.targets.load import LoadedTarget, load_target


class TimedBatch(generate._Batch):
    """A batch that counts the CPU seconds of its draws."""

    draw_s = 0.0

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        began = time.process_time()
        try:
            return super()._draw(logits)
        finally:
            self.draw_s += time.process_time() - began


def one_round(target: LoadedTarget, prompts: list[list[int]], sampling: Sampling) -> dict[str, float]:
    began, first = time.process_time(), []

    def beat(drawn: int, _read: int) -> None:
        if drawn and not first:
            first.append(time.process_time())

    batch = TimedBatch(target, prompts, sampling, "answers")
    tokens = sum(len(answer.token_ids) + answer.ended for _, answer in batch.run(beat))
    ended = time.process_time()
    parts = {"prefill_s": first[0] - began, "steps_s": ended - first[0], "draw_s": batch.draw_s}
    return {name: round(value, 2) for name, value in parts.items()} | {
        "tokens": tokens,
        "per_cpu_second": round(tokens / (ended - began), 1),
    }


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--target", required=True)
    for name, value in {"--count": 60, "--max-new-tokens": 64, "--rounds": 3}.items():
        options.add_argument(name, type=int, default=value)
    args = options.parse_args()
    torch.set_num_threads(1)
    target = load_target(args.target)
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()[: args.count]]
    prompts = [
        list(target.tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False))
        for row in rows
    ]
    prompts.sort(key=len, reverse=True)
    sampling = Sampling(0.8, args.max_new_tokens)
    rounds = [one_round(target, prompts, sampling) for _ in range(args.rounds)]
    result = {"dtype": target.dtype, "prompt_tokens": sum(map(len, prompts)), "rounds": rounds}
    report.publish("answers", result, args.results)


if __name__ == "__main__":
    main()
