"""What tests of models that see share: transformers' own numbers, environments that show pictures, a server of one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import torch

from rlbench.data import EncodedImage, Prompt
from rlbench.envs import Env, Step
from tests.watching import given, positions

PLACE = {"type": "image"}
PLACE_TOKEN = 264  # the tiny model's <|image_pad|>


def expected(reference: tuple[Any, Any], prompt: Prompt, response: list[int]) -> tuple[list[int], np.ndarray]:
    """The prompt's token ids and the response's log-probs, by transformers."""
    model, processor = reference
    text = prompt.content
    if not isinstance(text, str):
        text = processor.apply_chat_template(text, add_generation_prompt=True, tokenize=False)
    inputs = given(processor, text, prompt)
    ids = inputs.pop("input_ids")
    whole = torch.cat([ids, torch.tensor([response], dtype=ids.dtype)], 1)
    kinds = inputs.pop("mm_token_type_ids", torch.zeros_like(ids))
    kinds = torch.cat([kinds, torch.zeros(1, len(response), dtype=kinds.dtype)], 1)
    inputs.pop("attention_mask")
    if prompt.videos:
        inputs["position_ids"] = positions(model.config, whole[0].tolist(), kinds[0].tolist(), inputs)
    with torch.no_grad():
        logprobs = model(input_ids=whole, mm_token_type_ids=kinds, **inputs).logits.log_softmax(-1)[0]
    drawn = logprobs[ids.shape[1] - 1 : -1].gather(1, whole[0, ids.shape[1] :, None])
    return ids[0].tolist(), drawn[:, 0].numpy()


def logprobs_at(reference: tuple[Any, Any], ids: list[int], images: list[tuple[EncodedImage, int]]) -> np.ndarray:
    """Log p of each token but the first by transformers, (len - 1,), with images whose runs begin at these tokens."""
    model, processor = reference
    kinds = torch.zeros(1, len(ids), dtype=torch.long)
    given: dict[str, Any] = {}
    if images:
        given = dict(processor.image_processor(images=[image.pil() for image, _ in images], return_tensors="pt"))
        for (_, at), grid in zip(images, given["image_grid_thw"], strict=True):
            run = slice(at, at + int(grid.prod()) // processor.image_processor.merge_size**2)
            assert set(ids[run]) == {PLACE_TOKEN} and PLACE_TOKEN not in (ids[run.start - 1], ids[run.stop])
            kinds[0, run] = 1
    whole = torch.tensor([ids])
    with torch.no_grad(), only_placed(model, kinds.bool()):
        logits = model(input_ids=whole, mm_token_type_ids=kinds, **given).logits
    return logits.log_softmax(-1)[0, :-1].gather(1, whole[0, 1:, None])[:, 0].numpy()


@contextmanager
def only_placed(model: Any, places: torch.Tensor) -> Iterator[None]:
    """Have transformers put images at these places alone, where a placeholder token stands elsewhere too."""

    def masks(input_ids: Any, inputs_embeds: Any, **features: Any) -> tuple[Any, Any]:
        chosen = places[..., None].expand_as(inputs_embeds)
        return chosen, torch.zeros_like(chosen)

    model.model.get_placeholder_mask = masks
    try:
        yield
    finally:
        del model.model.get_placeholder_mask


class Asks(Env):
    """Asks once more; `first`: what it says before anything is sampled."""

    def __init__(self, first: Any = None, then: Any = "sure?") -> None:
        self.first, self.then = first, then

    def reset(self, prompt):
        return self.first

    def step(self, turn):
        return Step(self.then, reward=1.0)


class Shows(Env):
    """Answers with the observations that it is given, in turn; the first is what `reset` says."""

    def __init__(self, *observations: Any) -> None:
        self.observations = observations

    def reset(self, prompt):
        return self.observations[0]

    def step(self, turn):
        return Step(self.observations[turn.number + 1], done=turn.number + 2 == len(self.observations))


@contextmanager
def remote(data: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data if self.path == "/x.png" else b"<svg/>")

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
