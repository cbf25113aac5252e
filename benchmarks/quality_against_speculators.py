"""EAGLE-3 as speculators 0.9 trains it beside ours, from the same states: accepted length of chains of 3 and 7.

``hiddenstore export-data`` writes STORE for speculators; its own trainer trains its own draft model on that, with its
defaults (3 TTT steps, KL, Muon, one norm before fc, normed residual and output), on the CPU
(``speculators_on_cpu.py``). The checkpoint comes back through ``import-drafter``. Both sides take equally many steps of
as many tokens, both are judged by ``hiddenstore eval`` on the same validation text. A finished run is not repeated.
Usage: python -m benchmarks.quality_against_speculators STORE --target DIR --runs DIR [--seeds 3] [--steps 300]
[--name NAME] [--peer .venv-parity/bin/python] [--rates 1e-3 …]
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.drafter_quality import (
    BATCH_TOKENS,
    CHAINS,
    RESULT,
    RESULTS,
    ROWS,
    Bench,
    Command,
    Found,
    Row,
    judgement,
    spread,
)
from schemas.layers import default_aux_layers

PEER = "speculators"
DEFAULT_RATE = 1e-3
OURS = (
    Row("eagle3 3 TTT steps", ("--drafter", "eagle3", "loss.steps=3")),
    next(row for row in ROWS if row.name == "eagle3"),
    Row(
        "eagle3.1 3 TTT steps",
        ("--drafter", "eagle3", "loss.steps=3", "drafter.fc_norm=true", "drafter.norm_output=true"),
    ),
)
ON_A_CPU = (
    *("--draft-attn-impl", "eager", "--loss-implementation", "eager", "--hidden-states-dtype", "float32"),
    *("--num-workers", "0", "--log-freq", "1000000", "--no-resume-from-checkpoint"),
)


@dataclass(frozen=True)
class Peer:
    """Their trainer over an export of ``bench.store``. ``python`` is that of an environment that holds it."""

    bench: Bench
    python: str
    target: str

    def measure(self, seed: int, rate: float) -> Found:
        """Train, bring back and judge one seed; a finished one is read back."""
        run = self.bench.runs / f"{PEER}-{rate:.2g}-seed{seed}"
        file = run / RESULT
        if file.exists() and (known := json.loads(file.read_text(encoding="utf-8")))["steps"] == self.bench.steps:
            return dict(known)
        shutil.rmtree(run, ignore_errors=True)
        words = [*self._data(), "--max-steps", str(self.bench.steps), "--seed", str(seed), "--lr", f"{rate:.2g}"]
        report, cpu_s = self._train([*words, *ON_A_CPU, "--save-path", str(run / "theirs")])
        as_ours(Path(report["checkpoint"]), run / "published")
        command = self.bench.command
        command.answer("import-drafter", str(run / "published"), "-o", str(run / "run"), "--store", self.bench.store)
        lengths = ",".join(map(str, CHAINS))
        judged = command.answer("eval", str(run / "run"), self.bench.store, "--draft-len", lengths)
        chains = {str(one["draft_len"]): judgement(one) for one in judged["sweep"]}
        found = {"row": PEER, "seed": seed, "lr": rate, "steps": self.bench.steps, "tokens": report["tokens"]}
        found |= {"train_cpu_s": round(cpu_s, 1), "chains": chains}
        file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return found

    def _data(self) -> list[str]:
        """Arguments that name the target and the exported states, which are written first where they are not there."""
        folder = self.bench.runs / "exported"
        about = folder / "hiddenstore.json"
        if not about.exists():
            config = json.loads(Path(self.target, "config.json").read_text(encoding="utf-8"))
            layers = ",".join(map(str, default_aux_layers("eagle3", config["num_hidden_layers"])))
            words = ("--to", PEER, "-o", str(folder), "--layers", layers)
            self.bench.command.answer("export-data", self.bench.store, *words)
        said = json.loads(about.read_text(encoding="utf-8"))
        return [
            *("--verifier-name-or-path", self.target, "--speculator-type", "eagle3", "--data-path", str(folder)),
            *("--target-layer-ids", *map(str, said["aux_hidden_state_layer_ids"])),
            *("--train-data-ratio", f"{said['train_data_ratio']:.6f}", "--on-missing", "raise"),
            *("--total-seq-len", str(BATCH_TOKENS)),
        ]

    def _train(self, words: Sequence[str]) -> tuple[dict[str, Any], float]:
        script = Path(__file__).with_name("speculators_on_cpu.py")
        command = [self.python, str(script), *words]
        with subprocess.Popen(
            command, env=self.bench.command.environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            said = process.stdout.read().splitlines()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{PEER} ended with {process.returncode}")
        return json.loads(said[-1]), usage.ru_utime + usage.ru_stime


def as_ours(theirs: Path, out: Path) -> None:
    """Their checkpoint without the norm before fc, which ours has not.

    That norm divides a token's states by one number and multiplies each by its weight. Its weight goes into fc; the
    number goes away in the norm behind fc, as nothing reads fc's output but that norm.
    """
    config = json.loads((theirs / "config.json").read_text(encoding="utf-8"))
    tensors = {name: tensor.float() for name, tensor in load_file(theirs / "model.safetensors").items()}
    if config["norm_before_fc"]:
        if not (config["norm_before_residual"] and config["norm_output"]):
            raise SystemExit("the norm before fc matters: its output is the residual as it is")
        tensors["fc.weight"] *= tensors.pop("input_norm.weight")
        config["norm_before_fc"] = False
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")


def table(ours: Sequence[Found], theirs: Sequence[Found]) -> list[str]:
    """A Markdown table: a line for each of ours, and for each learning rate of theirs."""
    groups: dict[tuple[str, float], list[Found]] = {}
    for one in [*ours, *theirs]:
        groups.setdefault((one["row"], one["lr"]), []).append(one)
    heads = ["trainer", "learning rate", "seeds", *(f"chain of {length}" for length in CHAINS), "by position", "tokens"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (name, rate), found in groups.items():
        cells = [name, f"{rate:.1e}{', its default' * (name == PEER and rate == DEFAULT_RATE)}", str(len(found))]
        cells += [spread([one["chains"][str(length)]["accepted_length"] for one in found]) for length in CHAINS]
        cells.append(" ".join(f"{share:.2f}" for share in found[0]["chains"][str(CHAINS[-1])]["per_position"]))
        lines.append(f"| {' | '.join([*cells, format(found[0]['tokens'], ',')])} |")
    return lines


def report(name: str, steps: int, ours: Sequence[Found], theirs: Sequence[Found]) -> None:
    """Print and write what there is."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [
        f"# EAGLE-3 of speculators 0.9 and ours on {name}, {today}",
        "",
        f"{steps} steps of {BATCH_TOKENS:,} tokens of the same states, fp32; median over the seeds, lowest and highest "
        "in brackets; accepted length on the same held-out answers, simulated by `hiddenstore eval`.",
        "",
        *table(ours, theirs),
    ]
    print("\n".join(lines))
    document = {
        "benchmark": "quality_against_speculators",
        "date": today,
        "target": name,
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "steps": steps,
        "batch_tokens": BATCH_TOKENS,
        "ours": ours,
        "theirs": theirs,
    }
    file = RESULTS / f"quality_against_speculators-{name}-{today}.json"
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Their default and other rates for seed 0, the best of them over all seeds; ours over all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--name", default="bundled", help="the target's name in the report")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--peer", default=".venv-parity/bin/python", help="python of an environment with speculators")
    parser.add_argument("--rates", type=float, nargs="*", default=[3e-3, 1e-2], help="other rates to try for theirs")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.store, args.runs, args.steps, Command())
    peer = Peer(bench, args.peer, args.target)
    ours = [bench.measure(row, 0) for row in OURS]
    tried = [peer.measure(0, rate) for rate in (DEFAULT_RATE, *args.rates)]
    best = max(tried, key=lambda one: float(one["chains"][str(CHAINS[0])]["accepted_length"]))
    theirs = [
        *tried,
        *(peer.measure(seed, best["lr"]) for seed in range(1, args.seeds)),
    ]
    ours += [bench.measure(row, seed) for seed in range(1, args.seeds) for row in OURS]
    report(args.name, args.steps, ours, theirs)


if __name__ == "__main__":
    main()
