"""A server that keeps SGLang's published contract, computing with transformers: real tokens and log-probs, slowly.

It refuses arguments, routes and fields that `../schema.json` does not list, as SGLang's own parsers would.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SCHEMA = json.loads((Path(__file__).parents[1] / "schema.json").read_text())
LOCK, PAUSED = threading.Lock(), threading.Event()


def arguments() -> dict[str, Any]:
    """Read `--name value` and `--flag`; one that SGLang does not have ends the server."""
    values: dict[str, Any] = {"context_length": None, "enable_memory_saver": False}
    words = sys.argv[1:]
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        if name not in SCHEMA["arguments"]:
            sys.exit(f"launch_server.py: error: unrecognized arguments: --{name}")
        values[name] = words.pop(0) if words and not words[0].startswith("--") else True
    return values


ARGS = arguments()

import torch  # noqa: E402 - refused arguments end it at once
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

TOKENIZER = AutoTokenizer.from_pretrained(ARGS["model_path"])
EOS = TOKENIZER.eos_token_id


class State:
    """What the server holds."""

    def __init__(self) -> None:
        self.load(ARGS["model_path"])
        self.aborted: set[str] = set()
        self.running: set[str] = set()
        self.version = "default"
        self.released: set[str] = set()

    def load(self, folder: str) -> None:
        """Load a folder's weights."""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, ARGS["dtype"])).eval()


STATE: State


@torch.no_grad()
def logits_of(ids: list[int]) -> torch.Tensor:
    """Return logits (len, vocabulary) of one sequence."""
    with LOCK:
        return STATE.model(torch.tensor([ids])).logits[0].float()


def generate(body: dict[str, Any]):
    """Yield (tokens, log-probs, finish reason) of a request, `stream_interval` tokens at a time."""
    options = body.get("sampling_params") or {}
    if unknown := sorted(set(options) - set(SCHEMA["sampling"])):
        raise ValueError(f"Unexpected keyword argument '{unknown[0]}'")
    ids, rid = list(body["input_ids"]), body.get("rid") or ""
    heat, most = options.get("temperature", 1.0), options.get("max_new_tokens", 128)
    stop = [options["stop"]] if isinstance(options.get("stop"), str) else options.get("stop") or []
    ends = {*(options.get("stop_token_ids") or ()), *(() if options.get("ignore_eos") else (EOS,))}
    context = int(ARGS["context_length"] or STATE.model.config.max_position_embeddings)
    if len(ids) >= context:
        raise ValueError(f"The input ({len(ids)} tokens) is longer than the model's context length ({context} tokens).")
    every, least = options.get("stream_interval") or 1, options.get("min_new_tokens", 0)
    drawn: list[int] = []
    tokens, logprobs, reason = [], [], None
    STATE.running.add(rid)
    try:
        while reason is None:
            while PAUSED.is_set() and rid not in STATE.aborted:
                time.sleep(0.01)
            if rid in STATE.aborted:
                reason = {"type": "abort", "message": "Abort in running"}
                break
            logits = logits_of([*ids, *drawn])[-1]
            for token, bias in (options.get("logit_bias") or {}).items():
                logits[int(token)] += bias
            if len(drawn) < least:
                logits[list(ends)] = -torch.inf
            law = torch.log_softmax(logits / (heat or 1.0), -1)
            noise = torch.Generator().manual_seed((options.get("sampling_seed", 0) + 7919 * len(drawn)) % 2**63)
            token = int(law.argmax() if heat == 0 else torch.multinomial(law.exp(), 1, generator=noise))
            drawn.append(token)
            tokens.append(token)
            logprobs.append(float(law[token]))
            text = TOKENIZER.decode(drawn, skip_special_tokens=options.get("skip_special_tokens", True))
            if token in ends and len(drawn) > least:
                reason = {"type": "stop", "matched": token}
            elif matched := next((one for one in stop if one in text), None):
                reason = {"type": "stop", "matched": matched}
            elif len(drawn) >= min(most, context - len(ids)):
                reason = {"type": "length", "length": len(drawn)}
            elif len(tokens) >= every:
                yield tokens, logprobs, None
                tokens, logprobs = [], []
        yield tokens, logprobs, reason
    finally:
        STATE.running.discard(rid)
        STATE.aborted.discard(rid)


def answer_of(body: dict[str, Any], part: tuple[list[int], list[float], Any]) -> dict[str, Any]:
    """Return one event or answer of `/generate`."""
    tokens, logprobs, reason = part
    about: dict[str, Any] = {"id": body.get("rid"), "finish_reason": reason, "weight_version": STATE.version}
    if body.get("return_logprob"):
        about["output_token_logprobs"] = [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)]
        ids = body["input_ids"]
        if body.get("logprob_start_len", -1) == 0:
            law = torch.log_softmax(logits_of(ids), -1)
            given = [[float(law[t - 1, ids[t]]), ids[t], None] for t in range(1, len(ids))]
            about["input_token_logprobs"] = [[None, ids[0], None], *given]
            if wanted := body.get("token_ids_logprob"):
                about["output_token_ids_logprobs"] = [[[float(law[-1, t]), t, None] for t in wanted]]
    return {"text": TOKENIZER.decode(tokens), "output_ids": tokens, "meta_info": about}


class Handler(BaseHTTPRequestHandler):
    """SGLang's routes."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer what is read."""
        if self.path == "/health_generate":
            self._send({}, 200)
        elif not self._known():
            return
        elif self.path == "/server_info":
            bytes_ = sum(p.nbytes for p in STATE.model.parameters())
            usage = {"weight": bytes_ / 2**30, "kvcache": 0.0}
            self._send({**ARGS, "internal_states": [{"memory_usage": usage}]})

    def do_POST(self) -> None:
        """Answer a call."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if not self._known():
            return
        if unknown := sorted(set(body) - set(SCHEMA["bodies"].get(self.path, body))):
            self._send({"detail": [{"type": "extra_forbidden", "loc": ["body", unknown[0]]}]}, 422)
            return
        try:
            if self.path == "/generate":
                self._generate(body)
            else:
                self._send(*self._control(body))
        except ValueError as error:
            self._send({"error": {"message": str(error)}}, 400)

    def _control(self, body: dict[str, Any]) -> tuple[Any, int]:
        match self.path:
            case "/abort_request":
                STATE.aborted |= STATE.running & {body["rid"]}
            case "/pause_generation":
                PAUSED.set()
            case "/continue_generation":
                PAUSED.clear()
            case "/flush_cache" if STATE.running:
                return "Flush cache failed.\n", 400
            case "/update_weights_from_disk":
                try:
                    STATE.load(body["model_path"])
                except Exception as error:
                    return {"success": False, "message": f"Failed to update weights: {error}"}, 400
                return {"success": True, "message": "Succeeded to update model weights."}, 200
            case "/update_weight_version":
                STATE.version = body["new_version"]
            case "/release_memory_occupation":
                STATE.released |= set(body["tags"])
            case "/resume_memory_occupation":
                STATE.released -= set(body["tags"])
        return {}, 200

    def _generate(self, body: dict[str, Any]) -> None:
        if STATE.released:
            raise ValueError(f"memory was released: {sorted(STATE.released)}")
        parts = generate(body)
        if not body.get("stream"):
            whole = [*parts]
            tokens = [token for part in whole for token in part[0]]
            self._send(answer_of(body, (tokens, [value for part in whole for value in part[1]], whole[-1][2])))
            return
        first = next(parts)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for part in (first, *parts):
            self.wfile.write(b"data: " + json.dumps(answer_of(body, part)).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _known(self) -> bool:
        if self.headers.get("Authorization") != f"Bearer {ARGS['api_key']}":
            self._send({"error": "Unauthorized"}, 401)
        elif self.path not in SCHEMA["routes"]:
            self._send({"detail": "Not Found"}, 404)
        else:
            return True
        return False

    def _send(self, value: Any, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    STATE = State()
    ThreadingHTTPServer.request_queue_size = 256  # requests come many at once
    ThreadingHTTPServer((ARGS["host"], int(ARGS["port"])), Handler).serve_forever()
