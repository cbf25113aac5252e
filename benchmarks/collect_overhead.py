"""What `collect` spends outside the target's forward, in CPU seconds by part.

    python benchmarks/collect_overhead.py [--target DIR --data DIR] [--recipe safe] [--tokens 20000]

Without --target a random one of 55 M is used (12 layers, width 640; 3 aux layers + final); without --data, random
conversations of 40 to 400 tokens. The forward is timed by the CPU clock of its thread, less the time inside the hooks;
one thread, so that this clock holds all of its matrix products. `benchmarks/collect_engines.py` has the rate beside the
bare forward's.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import report
from benchmarks.commands import prepare
from collectors.capture import job
from collectors.capture import options as job_open
from collectors.engines.hf import HfEngine, StateTap

WIDTH, LAYERS, VOCAB = 640, 12, 1024


class CpuClock:
    """CPU seconds by part, each measured on the thread that runs it; nested parts are taken out of the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._nested = 0.0

    def wrap(self, owner: Any, name: str, part: str, *, nests: bool = True) -> None:
        """Time a function of ``owner``; those of the worker thread do not nest."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, began = self._nested, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - began
                self.seconds[part] += spent
                if nests:
                    self.seconds[part] -= self._nested - before
                    self._nested = before + spent

        setattr(owner, name, timed)


def random_target(folder: Path) -> Path:
    """A random Llama of 55 M parameters with a tokenizer of single characters."""
    from tests.collectors.tiny import tiny_tokenizer

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=1728,
        num_hidden_layers=LAYERS,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def random_data(folder: Path, target: Path, tokens: int) -> Path:
    """Random conversations of single characters, the second half of each supervised; the prepared data."""
    chance, rows = random.Random(0), []
    while tokens > 0:
        half = chance.randrange(20, 200)
        texts = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=half)) for _ in range(2)]
        roles = zip(("user", "assistant"), texts, strict=True)
        rows.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]}))
        tokens -= 2 * half
    folder.mkdir()
    chats, data = folder / "chats.jsonl", folder / "data"
    chats.write_text("\n".join(rows) + "\n", encoding="utf-8")
    prepare(chats, data, target)
    return data


def measure(options: job_open.CollectOptions) -> dict[str, Any]:
    """One collect run with its CPU seconds by part."""
    clock = CpuClock()
    clock.wrap(HfEngine, "_forward", "forward")
    clock.wrap(StateTap, "_take", "hooks")
    clock.wrap(StateTap, "_take_final", "hooks")
    clock.wrap(job, "check_unit", "check", nests=False)
    clock.wrap(job, "write_unit", "encode and write", nests=False)
    run = job.CollectJob.run

    def timed_run(self: job.CollectJob) -> job.CollectReport:
        began = time.process_time()
        result = run(self)
        clock.seconds["capture"] = time.process_time() - began
        return result

    job.CollectJob.run = timed_run  # type: ignore[method-assign]
    began = time.process_time()
    collected = job.collect(options)
    whole = time.process_time() - began
    parts = dict(clock.seconds)
    capture = parts.pop("capture")
    parts["rest"] = capture - sum(parts.values())
    return {
        "tokens": collected.tokens,
        "bytes_stored": collected.bytes_stored,
        "wall_s": round(collected.seconds, 2),
        "tokens_per_s": round(collected.tokens_per_s, 1),
        "cpu_s": {name: round(seconds, 3) for name, seconds in parts.items()},
        "capture_cpu_s": round(capture, 3),
        "start_cpu_s": round(whole - capture, 3),
        "outside_forward_share": round(1 - parts["forward"] / capture, 4),
        "outside_forward_share_with_start": round(1 - parts["forward"] / whole, 4),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--recipe", default="safe")
    parser.add_argument("--dtype")
    parser.add_argument("--layers", default="eagle3")
    parser.add_argument("--batch-tokens", type=int, default=job_open.CollectOptions.batch_tokens)
    parser.add_argument("--tokens", type=int, default=20_000)
    arguments = parser.parse_args()
    names = ("recipe", "dtype", "layers", "batch_tokens")
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = arguments.target or random_target(folder / "target")
        data = arguments.data or random_data(folder / "chats", target, arguments.tokens)
        figures = measure(job_open.CollectOptions(str(data), folder / "store", str(target), **settings))
    kind = "random" if arguments.target is None else target.name
    result = {"target": kind, "options": settings, **figures}
    report.publish(f"collect_overhead_{arguments.recipe}", result, arguments.results)


if __name__ == "__main__":
    main()
