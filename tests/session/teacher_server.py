"""A small OpenAI-compatible server that a transformers model answers behind: in vLLM's form, or with `echo` alone."""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class TeacherService:
    """Serves the model at `path` on a free port; `knows`: "prompt_logprobs" or "echo"; it can be told to go away."""

    def __init__(self, path: str, knows: str = "prompt_logprobs", tokenizes: bool = True, shift: int = 0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.knows, self.tokenizes, self.shift = knows, tokenizes, shift
        self.answered, self.gone_after, self.thinks_s = 0, sys.maxsize, 0.0
        self.lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.say(200, {"data": [{"id": "served", "root": "somewhere"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize" and service.tokenizes:
                    ids = service.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
                    self.say(200, {"tokens": [i + service.shift for i in ids]})
                elif self.path != "/v1/completions":
                    self.say(404, {"error": "there is no such page"})
                elif service.gone():
                    self.connection.close()
                else:
                    self.say(200, {"choices": service.choices(body)})

            def say(self, status: int, answer: Any) -> None:
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def gone(self) -> bool:
        with self.lock:
            self.answered += 1
            return self.answered > self.gone_after

    def choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        time.sleep(self.thinks_s)
        return [self.choice(i, ids, body) for i, ids in enumerate(body["prompt"])][::-1]

    @torch.no_grad()
    def choice(self, index: int, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        logp = torch.log_softmax(self.model(torch.tensor([ids])).logits[0], -1)
        if self.knows == "echo":
            said = [None, *(float(logp[t - 1, token]) for t, token in enumerate(ids) if t)]
            return {"index": index, "logprobs": {"token_logprobs": said}}
        places: list[Any] = [None]
        for t in range(1, len(ids)):
            kept = [*logp[t - 1].topk(body["prompt_logprobs"]).indices.tolist(), ids[t]]
            places.append({str(token): {"logprob": float(logp[t - 1, token])} for token in kept})
        return {"index": index, "prompt_logprobs": places}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
