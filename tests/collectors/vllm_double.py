"""A stand-in for a vLLM server: HTTP answers and state files made from a Hugging Face forward of its own.

It shares no code with the reader. Its files are written after the answer, under the lock that vLLM holds meanwhile.
"""

import fcntl
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Damage = Callable[[torch.Tensor, list[int]], tuple[torch.Tensor, list[int]]]


class VllmDouble:
    """``ids`` are vLLM's; ``refusals`` are HTTP codes answered before the first good answer; ``room`` is its
    ``max_model_len``; ``keys`` are those that were sent; ``penalty`` is the repetition penalty of the model's
    ``generation_config.json``, which holds where a request names none."""

    def __init__(self, model: Any, tokenizer: Any, name: str, folder: Path, ids: list[int]) -> None:
        self.model, self.tokenizer, self.name, self.folder, self.ids = model, tokenizer, name, folder, ids
        self.refusals: list[int] = []
        self.keys: set[str | None] = set()
        self.damage: Damage = lambda states, tokens: (states, tokens)
        self.most_files = 0
        self.delay_s = 0.0
        self.penalty = 1.0
        self.room = 256
        self._count = 0
        self._guard = threading.Lock()
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                card = {"id": double.name, "root": double.name, "max_model_len": double.room}
                self._send({"version": "0.32.0"} if self.path == "/version" else {"data": [card]})

            def do_POST(self) -> None:
                double.keys.add(self.headers["Authorization"])
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    text = double.tokenizer.encode(asked["prompt"], add_special_tokens=asked["add_special_tokens"])
                    self._send({"tokens": text})
                elif double.refusals:
                    self._send({"error": "no"}, double.refusals.pop())
                else:
                    self._send(double.complete(asked))

            def _send(self, document: dict[str, Any], code: int = 200) -> None:
                data = json.dumps(document).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_words: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        tokens = list(asked["prompt"])
        with self._guard, torch.no_grad():
            self._count += 1
            path = self.folder / f"cmpl-{self._count}-0.safetensors"
            self.most_files = max(self.most_files, len(list(self.folder.glob("*.safetensors"))))
            out, last = self._run(tokens)
        penalty = asked.get("repetition_penalty", self.penalty)
        seen = torch.tensor(sorted(set(tokens)))
        last[seen] = torch.where(last[seen] > 0, last[seen] / penalty, last[seen] * penalty)
        states, read = self.damage(torch.stack([out[k] for k in self.ids], dim=1), tokens)
        lock = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self._write, args=(path, lock, states, read)).start()
        return {
            "choices": [{"prompt_token_ids": tokens, "token_ids": [int(last.argmax())]}],
            "kv_transfer_params": {"hidden_states_path": str(path)},
        }

    def _run(self, tokens: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Residual stream after 0 … N layers, each [T, D], and the logits after the last token."""
        before_norm: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _module, args: before_norm.append(args[0][0]))
        result = self.model(torch.tensor([tokens]), output_hidden_states=True)
        hook.remove()
        return [*(state[0] for state in result.hidden_states[:-1]), before_norm[0]], result.logits[0, -1]

    def _write(self, path: Path, lock: Any, states: torch.Tensor, tokens: list[int]) -> None:
        time.sleep(self.delay_s)
        save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(tokens)}, path)
        lock.close()
