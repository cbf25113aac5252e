"""The executor of the double: a Hugging Face forward per batch, and files as TensorRT-LLM's documentation has them.

One line of JSON in, one out. Every request of a batch writes its states into one buffer, row after row, and each is
saved from the buffer's first rows, as TensorRT-LLM does (it assumes a batch of one and no chunking).

Traps, by name: ``write_interval``: files hold so many requests and the rest is never written; ``key``: the older name
of the layers; ``batch``: so many requests a forward; ``reuse``: rows of a prompt's first so many tokens are not run;
``cut``: the prompt is cut to so many tokens; ``shift``: every layer is the one above; ``missing``: the last layer is
not handed out; ``repeat``: whether the layers repeat the final hidden (default true); ``first``: they repeat it in
front; ``pre_norm``: hidden_state before the norm; ``zero``: all states zero; ``roll``: final rows one place late;
``swap``: each of a pair of requests gets the other's states; ``reverse``: files of a pair appear in reverse order;
``halves``: each file is written in two halves with so many seconds between; ``torn``: only the first half is;
``object``: the file holds an object; ``noise``: a file of a warm-up request lies there at the start; ``late``: a file
comes so many seconds after the answer; ``dtype``: of the states; ``fail``: every request fails.
"""

import json
import queue
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PAIRED = ("batch", "swap", "reverse")


class Executor:
    def __init__(self, args: dict[str, Any], traps: dict[str, Any]) -> None:
        self.traps = traps
        if traps.get("no_start"):
            raise RuntimeError("a worker ended\nand what it wrote")
        saving = args["speculative_config"]
        self.folder, self.prefix = Path(saving["output_directory"]), saving["file_prefix"]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_interval = traps.get("write_interval", saving["write_interval"])
        self.layers = sorted(k for k in saving["eagle3_layers_to_capture"] if k >= 0)
        self.repeat = traps.get("repeat", -1 in saving["eagle3_layers_to_capture"])
        dtype = "auto" if args["dtype"] == "auto" else getattr(torch, args["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(args["model"], dtype=dtype).eval()
        self.before_norm: torch.Tensor | None = None
        self.model.model.layers[-1].register_forward_hook(self._keep)
        self.counter, self.unwritten = 0, []
        width = self.model.config.hidden_size
        self.buffer = torch.zeros(args["max_num_tokens"], len(self.layers) * width)
        self.last = torch.zeros(args["max_num_tokens"], width)
        if traps.get("noise"):
            torch.save([{"id": 0, "input_ids": torch.zeros(4, dtype=torch.long)}], self.folder / "states_0.pt")

    @property
    def batch(self) -> int:
        return max((int(self.traps.get(name, 1)) for name in PAIRED), default=1)

    def run(self, prompts: list[list[int]]) -> list[int]:
        """The token after each prompt, its states saved."""
        saved_ids, tokens, row = [], [], 0
        rows = []
        for prompt in prompts:
            prompt = prompt[: self.traps.get("cut", len(prompt))]
            states, final, token = self.forward(prompt)
            skipped = self.traps.get("reuse", 0) if len(prompt) > self.traps.get("reuse", 0) else 0
            end = row + len(prompt) - skipped
            self.buffer[row:end], self.last[row:end] = states[skipped:], final[skipped:]
            rows.append((row, end))
            row = end
            saved_ids.append(prompt)
            tokens.append(token)
        # A batch reads every request from the first rows; the order traps read each from its own, or the other's.
        begins = [start for start, _ in rows] if {"swap", "reverse"} & self.traps.keys() else [0] * len(rows)
        if "swap" in self.traps:
            begins.reverse()
        entries = [
            self.entry(ids, slice(begin, begin + len(ids))) for ids, begin in zip(saved_ids, begins, strict=True)
        ]
        for entry in reversed(entries) if "reverse" in self.traps else entries:
            self.save(entry)
        return tokens

    @torch.no_grad()
    def forward(self, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
        out = self.model(input_ids=torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
        outputs = [*(states[0] for states in out.hidden_states[1:-1]), self.before_norm[0]]
        shift = 1 if self.traps.get("shift") else 0
        layers = [outputs[min(k + shift, len(outputs) - 1)] for k in self.layers]
        final = self.before_norm[0] if self.traps.get("pre_norm") else out.hidden_states[-1][0]
        if self.traps.get("roll"):
            final = final.roll(1, dims=0)
        states = torch.cat(layers, dim=-1) if layers else final[:, :0]
        scale = 0.0 if self.traps.get("zero") else 1.0
        return states * scale, final * scale, int(out.logits[0, -1].argmax())

    def entry(self, ids: list[int], rows: slice) -> dict[str, Any]:
        dtype = getattr(torch, self.traps.get("dtype", str(self.model.dtype).removeprefix("torch.")))
        final = self.last[rows].to(dtype).clone()
        width = final.shape[1]
        states = self.buffer[rows].to(dtype).clone()
        if self.traps.get("missing"):
            states = states[:, :-width]
        if self.repeat and self.layers:
            states = torch.cat([final, states] if self.traps.get("first") else [states, final], dim=-1)
        entry = {"id": self.counter + 1, "input_ids": torch.tensor(ids, dtype=torch.long), "hidden_state": final}
        if self.layers:
            entry[self.traps.get("key", "aux_hidden_states")] = states
        return entry

    def save(self, entry: dict[str, Any]) -> None:
        self.counter += 1
        self.unwritten.append(entry)
        if self.counter % self.write_interval:
            return
        path = self.folder / f"{self.prefix}_{self.counter}.pt"
        saved, self.unwritten = self.unwritten, []
        if self.traps.get("late"):
            threading.Timer(self.traps["late"], torch.save, (saved, path)).start()
        elif self.traps.get("object"):
            torch.save([Fraction(1, 3)], path)
        elif "halves" in self.traps or self.traps.get("torn"):
            self._save_in_halves(saved, path)
        else:
            torch.save(saved, path)

    def _save_in_halves(self, saved: list[dict[str, Any]], path: Path) -> None:
        whole = path.with_suffix(".whole")
        torch.save(saved, whole)
        data = whole.read_bytes()
        whole.unlink()
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            if not self.traps.get("torn"):
                time.sleep(self.traps["halves"])
                file.write(data[len(data) // 2 :])

    def _keep(self, _module: Any, _args: Any, output: Any) -> None:
        self.before_norm = output[0] if isinstance(output, tuple) else output


def main() -> None:
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    executor: Executor | None = None
    while (document := requests.get())["do"] != "end":
        numbers, answers = [document["number"]], [{}]
        try:
            if document["do"] == "open":
                executor = Executor(document["args"], document["traps"])
            elif document["do"] == "run":
                prompts = [document["input_ids"]]
                if executor.traps.get("fail"):
                    raise RuntimeError("CUDA out of memory")
                while len(prompts) < executor.batch:
                    try:
                        other = requests.get(timeout=20)
                    except queue.Empty:
                        break
                    prompts.append(other["input_ids"])
                    numbers.append(other["number"])
                answers = [{"token": token} for token in executor.run(prompts)]
        except Exception as error:  # noqa: BLE001 - the caller raises it
            answers = [{"error": str(error)}] * len(numbers)
        for number, answer in zip(numbers, answers, strict=True):
            sys.stdout.write(json.dumps({"number": number, **answer}) + "\n")
        sys.stdout.flush()


def _read(requests: "queue.Queue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    requests.put({"do": "end"})


if __name__ == "__main__":
    main()
