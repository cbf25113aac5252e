"""EAGLE-3, P-EAGLE and DSpark as speculators 0.9 trains them beside ours, from the same states: accepted length of
chains of 3 and 7.

``hiddenstore export-data`` writes STORE for speculators; its own trainer trains its own draft model on that, with its
defaults (EAGLE-3: 3 TTT steps, KL, Muon, one norm before fc, normed residual and output) but for size, draft vocabulary
and mask token, which are those of ours, on the CPU (``speculators_on_cpu.py``). The checkpoint comes back through
``import-drafter``. Both sides take equally many steps of as many tokens in one precision, and are judged by
``hiddenstore eval`` on the same text. Finished runs are not repeated, nor those that ``drafter_quality`` left in DIR.
Usage: python -m benchmarks.quality_against_speculators STORE --model DIR --runs DIR [--drafters eagle3 …]
[--precision bf16] [--peer .venv-parity/bin/python] [--rates 1e-3 … | --rate 1e-2] [what drafter_quality takes]
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.drafter_quality import BATCH_TOKENS, BY_NAME, CHAINS, Bench, Quality, measured, once, parser, publish
from trainer.train.run_folder import describe

PEER = "speculators"
# Rows of padding see nothing in P-EAGLE, which makes its eager attention NaN.
SAFE = ("--draft-attn-impl", "sdpa")
DEFAULT_RATE = 1e-3
# A rate that is best at the end of a grid says that a higher one is to be tried.
RATE_STEP, HIGHEST_RATE = 3, 0.1
# Layers of ours see the whole text, theirs by default 2,048 tokens.
ONE, TWO = (("--num-layers", str(len(layers)), "--full-attention-indices", *layers) for layers in ("0", "01"))
# The peer counts blocks of a pack, 512 of 8,192 tokens by default, ours of a sample.
BLOCKS = ("--block-size", "7", "--max-anchors", "128")
SIDES: dict[str, tuple[str, tuple[str, ...]]] = {
    "eagle3": ("eagle3.1 3 TTT steps", ONE),
    "peagle": ("peagle", (*SAFE, *TWO, "--draft-arch", "llama", "--num-depths", "7", "--fc-norm")),
    "dspark": ("dspark", (*SAFE, *TWO, *BLOCKS)),
}
"""The row of ours that a drafter stands beside, and what the peer is told."""
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
ON_A_CPU = ("--draft-attn-impl", "eager", "--loss-implementation", "eager", "--num-workers", "0")


@dataclass(frozen=True)
class Peer:
    """Their trainer over an export of ``bench.store``. ``python`` is that of an environment with speculators; ``model``
    the target's folder."""

    bench: Bench
    python: str
    model: str
    drafter: str
    precision: str

    def measure(self, seed: int, rate: float) -> Quality:
        """Train, bring back and judge one seed; a finished one is read back."""
        run, bench = self.bench.runs / f"{PEER}-{self.drafter}-{rate:.2g}-seed{seed}", self.bench

        def make() -> Quality:
            words = [*self._data(), "--max-steps", str(bench.steps), "--seed", str(seed), "--lr", f"{rate:.2g}"]
            words += ["--hidden-states-dtype", PRECISIONS[self.precision], *ON_A_CPU, *SIDES[self.drafter][1]]
            script = str(Path(__file__).with_name("speculators_on_cpu.py"))
            command = [self.python, script, *words, "--save-path", str(run / "theirs")]
            printed, cpu_s = bench.command.run(command, subprocess.PIPE)
            trained = json.loads(printed.splitlines()[-1])
            words = ["-o", str(run / "run"), "--store", bench.store]
            bench.command.answer("import-drafter", trained.pop("checkpoint"), *words)
            chains = bench.judge(run / "run", CHAINS)
            return {"row": f"{PEER} {self.drafter}", **trained, "train_cpu_s": round(cpu_s, 1), "chains": chains}

        key = {"seed": seed, "lr": rate, "steps": bench.steps, "precision": self.precision, "vocab": bench.vocab}
        return once(run, key, make)

    def _data(self) -> list[str]:
        """Arguments that name the target, the exported states, which are written first where they are missing, and what
        our run of the kind derived."""
        info = describe(self.bench.run(BY_NAME[SIDES[self.drafter][0]], 0))
        drafter, folder = info.spec.drafter, self.bench.runs / f"exported-{self.drafter}"
        about, vocab = folder / "hiddenstore.json", info.vocab(info.spec.target.vocab_size)
        if not about.exists():
            words = ("--to", PEER, "-o", str(folder), "--layers", ",".join(map(str, drafter.aux_layers)))
            self.bench.command.answer("export-data", self.bench.store, *words)
        facts = json.loads(about.read_text(encoding="utf-8"))
        for name, tensor in {"d2t": vocab.d2t, "t2d": vocab.t2d}.items():
            np.save(folder / f"{name}-{vocab.size}.npy", tensor.numpy())
        mask = getattr(drafter, "mask_token_id", None)
        return [
            *("--verifier-name-or-path", self.model, "--speculator-type", self.drafter, "--data-path", str(folder)),
            *("--target-layer-ids", *map(str, facts["aux_hidden_state_layer_ids"])),
            *("--train-data-ratio", repr(facts["train_data_ratio"]), "--on-missing", "raise"),
            *("--total-seq-len", str(BATCH_TOKENS), "--log-freq", "1000000", "--no-resume-from-checkpoint"),
            *([] if vocab.is_full else ["--draft-vocab-size", str(vocab.size)]),
            *([] if mask is None else ["--mask-token-id", str(mask)]),
        ]


def accepted(result: Quality) -> float:
    """The length that rates are compared by."""
    return float(result["chains"][str(CHAINS[0])]["accepted_length"])


def main() -> None:
    """Ours over all seeds; their default and other rates for seed 0, the best of them over all seeds."""
    options = parser(__doc__)
    options.set_defaults(only=[])
    options.add_argument("--model", required=True, help="folder of the target")
    options.add_argument("--drafters", nargs="+", choices=SIDES, default=["eagle3"])
    options.add_argument("--precision", choices=PRECISIONS, default="fp32")
    options.add_argument("--peer", default=".venv-parity/bin/python", help="python of an environment with speculators")
    options.add_argument("--rates", type=float, nargs="*", default=[3e-3, 1e-2], help="other rates to try for theirs")
    options.add_argument("--rate", type=float, help="theirs at this rate alone, chosen on other text")
    arguments = options.parse_args()
    arguments.settings.append(f"train.precision={arguments.precision}")
    arguments.only += [SIDES[one][0] for one in arguments.drafters if SIDES[one][0] not in arguments.only]
    bench, results = measured(arguments)
    for drafter in arguments.drafters:
        peer = Peer(bench, arguments.peer, arguments.model, drafter, arguments.precision)
        if arguments.rate:
            results += [peer.measure(seed, arguments.rate) for seed in range(arguments.seeds)]
            continue
        rates = [peer.measure(0, rate) for rate in sorted({DEFAULT_RATE, *arguments.rates})]
        while (best := max(rates, key=accepted)) is rates[-1] and best["lr"] * RATE_STEP <= HIGHEST_RATE:
            rates.append(peer.measure(0, round(best["lr"] * RATE_STEP, 6)))
        results += [*rates, *(peer.measure(seed, best["lr"]) for seed in range(1, arguments.seeds))]
    publish(bench, arguments.target, results, arguments.results, "quality_against_speculators")


if __name__ == "__main__":
    main()
