"""EAGLE-3 as speculators 0.9 trains it beside ours, from the same states: accepted length of chains of 3 and 7.

``hiddenstore export-data`` writes STORE for speculators; its own trainer trains its own draft model on that, with its
defaults (3 TTT steps, KL, Muon, one norm before fc, normed residual and output), on the CPU
(``speculators_on_cpu.py``). The checkpoint comes back through ``import-drafter``. Both sides take equally many steps of
as many tokens, both are judged by ``hiddenstore eval`` on the same validation text. A finished run is not repeated.
Usage: python -m benchmarks.quality_against_speculators STORE --target DIR --runs DIR [--seeds 3] [--steps 300]
[--name NAME] [--peer .venv-parity/bin/python] [--rates 1e-3 …]
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks import report
from benchmarks.commands import Command
from benchmarks.drafter_quality import BATCH_TOKENS, CHAINS, EAGLE3, Bench, Quality, Row, once, table
from schemas.layers import default_aux_layers

PEER = "speculators"
DEFAULT_RATE = 1e-3
THREE_STEPS = ("--drafter", "eagle3", "loss.steps=3")
OURS = (
    Row("eagle3 3 TTT steps", THREE_STEPS),
    EAGLE3,
    Row("eagle3.1 3 TTT steps", (*THREE_STEPS, "drafter.fc_norm=true", "drafter.norm_output=true")),
)
ON_A_CPU = (
    *("--draft-attn-impl", "eager", "--loss-implementation", "eager", "--hidden-states-dtype", "float32"),
    *("--num-workers", "0", "--log-freq", "1000000", "--no-resume-from-checkpoint"),
)


@dataclass(frozen=True)
class Peer:
    """Their trainer over an export of ``bench.store``. ``python`` is that of an environment with speculators."""

    bench: Bench
    python: str
    target: str

    def measure(self, seed: int, rate: float) -> Quality:
        """Train, bring back and judge one seed; a finished one is read back."""
        run, bench = self.bench.runs / f"{PEER}-{rate:.2g}-seed{seed}", self.bench

        def make() -> Quality:
            words = [*self._data(), "--max-steps", str(bench.steps), "--seed", str(seed), "--lr", f"{rate:.2g}"]
            script = str(Path(__file__).with_name("speculators_on_cpu.py"))
            command = [self.python, script, *words, *ON_A_CPU, "--save-path", str(run / "theirs")]
            printed, cpu_s = bench.command.run(command, subprocess.PIPE)
            trained = json.loads(printed.splitlines()[-1])
            as_ours(Path(trained["checkpoint"]), run / "published")
            imported = ("-o", str(run / "run"), "--store", bench.store)
            bench.command.answer("import-drafter", str(run / "published"), *imported)
            chains = bench.judge(run / "run", CHAINS)
            return {"row": PEER, "tokens": trained["tokens"], "train_cpu_s": round(cpu_s, 1), "chains": chains}

        return once(run, {"seed": seed, "lr": rate, "steps": bench.steps}, make)

    def _data(self) -> list[str]:
        """Arguments that name the target and the exported states, which are written first where they are missing."""
        folder = self.bench.runs / "exported"
        about = folder / "hiddenstore.json"
        if not about.exists():
            config = json.loads(Path(self.target, "config.json").read_text(encoding="utf-8"))
            layers = ",".join(map(str, default_aux_layers("eagle3", config["num_hidden_layers"])))
            words = ("--to", PEER, "-o", str(folder), "--layers", layers)
            self.bench.command.answer("export-data", self.bench.store, *words)
        facts = json.loads(about.read_text(encoding="utf-8"))
        return [
            *("--verifier-name-or-path", self.target, "--speculator-type", "eagle3", "--data-path", str(folder)),
            *("--target-layer-ids", *map(str, facts["aux_hidden_state_layer_ids"])),
            *("--train-data-ratio", f"{facts['train_data_ratio']:.6f}", "--on-missing", "raise"),
            *("--total-seq-len", str(BATCH_TOKENS)),
        ]


def as_ours(theirs: Path, out: Path) -> None:
    """Their checkpoint without the norm before fc, which ours has not. That norm divides a token's states by one number
    and multiplies each by its weight. Its weight goes into fc; the number goes away in the norm behind fc, as nothing
    reads fc's output but that norm."""
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


def main() -> None:
    """Their default and other rates for seed 0, the best of them over all seeds; ours over all seeds."""
    parser = report.parser(__doc__)
    parser.add_argument("store")
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--name", default="bundled", help="the target's name in the report")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--peer", default=".venv-parity/bin/python", help="python of an environment with speculators")
    parser.add_argument("--rates", type=float, nargs="*", default=[3e-3, 1e-2], help="other rates to try for theirs")
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.store, arguments.runs, arguments.steps, Command())
    peer = Peer(bench, arguments.peer, arguments.target)
    ours = [bench.measure(row, seed) for seed in range(arguments.seeds) for row in OURS]
    theirs = [peer.measure(0, rate) for rate in (DEFAULT_RATE, *arguments.rates)]
    best = max(theirs, key=lambda one: float(one["chains"][str(CHAINS[0])]["accepted_length"]))
    theirs += [peer.measure(seed, best["lr"]) for seed in range(1, arguments.seeds)]
    page = [
        f"# EAGLE-3 of speculators 0.9 and ours on {arguments.name}, {report.today()}",
        "",
        f"{arguments.steps} steps of {BATCH_TOKENS:,} tokens of the same states, fp32; median over the seeds, lowest "
        "and highest in brackets; accepted length on the same held-out answers, simulated by `hiddenstore eval`. "
        f"Learning rates are derived for ours; theirs is {DEFAULT_RATE:g} by default.",
        "",
        table([*ours, *theirs]),
    ]
    facts = {"target": arguments.name, "steps": arguments.steps, "batch_tokens": BATCH_TOKENS}
    result = {**facts, "ours": ours, "theirs": theirs}
    report.publish(f"quality_against_speculators-{arguments.name}", result, arguments.results, page)


if __name__ == "__main__":
    main()
