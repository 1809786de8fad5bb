"""The HTTP side of an endpoint: vLLM's routes and serving classes behind a gate that checks the key, bounds the body
and reads which run a request belongs to."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from vllm.entrypoints.anthropic import api_router as anthropic_routes
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion import api_router as chat_routes
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion import api_router as completion_routes
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models import api_router as model_routes
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager

from rlbench.data.prompts.lengths import begin_text
from rlbench.envs.policy import UNKEPT
from rlbench.errors import DataError, nearest
from rlbench.units import format_bytes
from rlbench.workers.replica.serving.balancing import Balancer
from rlbench.workers.replica.serving.client import SENDER, EngineClient, Sender
from rlbench.workers.replica.serving.listening import CONNECTIONS, listening
from rlbench.workers.replica.serving.media import TakenMedia
from rlbench.workers.replica.serving.options import ServeOptions
from rlbench.workers.replica.serving.refusal import Refusal

MAX_BODY = 8 << 20
READ_LIMIT_S = 30.0
RUN_HEADER = b"x-rlbench-run"
RUN_PATH = re.compile(r"/run/([^/]*)(/v1/.*)")
RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/messages", "/v1/messages/count_tokens")


def make_app(client: Any, options: ServeOptions, model: str) -> FastAPI:
    """Return vLLM's routes for chats, completions, models and Anthropic's messages over a client; `model`: its path."""
    parsers = {"enable_auto_tools": options.tool_parser is not None, "tool_parser": options.tool_parser}
    parsers["reasoning_parser"] = options.reasoning_parser or ""
    template = {"chat_template": None, "chat_template_content_format": "auto", "request_logger": None}
    defaults = {"default_chat_template_kwargs": dict(options.template)}
    models = OpenAIServingModels(client, [BaseModelPath(name, model) for name in options.models])
    renderer = OnlineRenderer(client.model_config, client.renderer, **template, **parsers, **defaults)
    chat = {"online_renderer": renderer, **template, **parsers, **defaults}
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.args = Namespace(log_error_stack=False, sse_keep_alive_interval=0)  # what routes read of vLLM's own
    app.state.openai_serving_models = models
    app.state.openai_serving_chat = OpenAIServingChat(client, models, "assistant", **chat)
    app.state.openai_serving_completion = OpenAIServingCompletion(
        client, models, online_renderer=renderer, request_logger=None
    )
    app.state.anthropic_serving_messages = AnthropicServingMessages(client, models, "assistant", **chat)
    for routes in (chat_routes, completion_routes, model_routes, anthropic_routes):
        app.include_router(routes.router)
    init_exception_handler(app)
    return app


def check_parsers(options: ServeOptions) -> None:
    """Refuse parsers that vLLM does not have."""
    tools, reasoning = ToolParserManager.list_registered(), ReasoningParserManager.list_registered()
    for what, name, known in (
        ("tool_parser", options.tool_parser, tools),
        ("reasoning_parser", options.reasoning_parser, reasoning),
    ):
        if name is not None and name not in known:
            raise DataError(f"{what}={name!r}: vLLM has none of this name{nearest(name, known)}; {', '.join(known)}")


class Gate:
    """ASGI: lets in who knows `key`, and hands on what it read: the body, with its images or sounds checked, and which
    run the request belongs to. `taken`: which a request may have; `fetch`: whether addresses of images are read;
    `begin`: what the tokenizer puts before a text."""

    def __init__(self, app: Any, key: str, taken: TakenMedia, fetch: bool, begin: str) -> None:
        self._app, self._key, self._taken, self._fetch = app, key.encode(), taken, fetch
        self._begin = begin
        self.balancer: Balancer | None = None  # where there are several replicas

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request, or have another replica serve it."""
        if scope["type"] != "http":  # the server's own start and end
            await self._app(scope, receive, send)
            return
        try:
            path, run = self._sender(scope)
            body = await asyncio.wait_for(_read(receive), READ_LIMIT_S)
            asked = _object(body)
            serve = partial(self._serve, scope, path, run, asked, body, receive, send)
            if (balancer := self.balancer) is None:
                await serve()
            else:
                await balancer.answer(run, asked, scope, body, receive, send, serve)
        except Refusal as refusal:
            await _refused(refusal)(scope, receive, send)
        except TimeoutError:
            late = Refusal(408, "RequestTimeout", f"the body did not arrive within {READ_LIMIT_S:g} s")
            await _refused(late)(scope, receive, send)

    async def _serve(
        self, scope: Any, path: str, run: str, asked: dict[str, Any], body: bytes, receive: Any, send: Any
    ) -> None:
        """Have the app answer a request whose body was read; Refusal of media and texts that it must not see."""
        media: tuple[str, ...] = ()
        begun = begins_once(asked, self._begin)
        if parts := self._taken.parts_of(asked):
            media = await asyncio.to_thread(self._taken.checked, parts, self._fetch)
        if parts or begun:
            body = json.dumps(asked).encode()
        SENDER.set(Sender(run, asked, media))
        sent = False

        async def replay() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app({**scope, "path": path, "raw_path": path.encode()}, replay, send)

    def _sender(self, scope: Any) -> tuple[str, str]:
        """Return the path without the run, and the run: of the path, the header or the key; Refusal."""
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"").partition(b" ")[2] or headers.get(b"x-api-key", b"")
        key, _, of_key = given.partition(b":")
        if not hmac.compare_digest(key, self._key):
            raise Refusal(401, "AuthenticationError", "wrong API key: session.endpoint().key is the one wanted")
        path, run = scope["path"], headers.get(RUN_HEADER, of_key).decode("latin-1")
        if (named := RUN_PATH.fullmatch(path)) is not None:
            run, path = named.groups()
        if run == UNKEPT:
            return path, run
        if (run or named is not None) and not RUN_NAME.fullmatch(run):
            raise Refusal(400, "BadRequestError", f"a run's name has 1 to 128 of A-Z a-z 0-9 . _ -, got {run[:40]!r}")
        if path not in ROUTES:
            raise Refusal(404, "NotFoundError", f"no {path!r} here; there are {', '.join(ROUTES)}")
        wanted = "GET" if path == "/v1/models" else "POST"
        if scope["method"] != wanted:
            raise Refusal(405, "MethodNotAllowed", f"{path} wants {wanted}, got {scope['method']}")
        return path, run


async def _read(receive: Any) -> bytes:
    """Return a request's body; Refusal where it is too large."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "BadRequestError", "the client went away")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            raise Refusal(413, "PayloadTooLarge", f"the body is larger than the {format_bytes(MAX_BODY)} allowed")
        if not message.get("more_body"):
            return b"".join(parts)


def _object(body: bytes) -> dict[str, Any]:
    """Return a body that is a JSON object, or none: what is wrong with it, vLLM's routes say. Refusal of what they
    would choke on."""
    try:
        value = json.loads(body)
    except RecursionError:
        raise Refusal(400, "BadRequestError", "the body is nested too deeply") from None
    except ValueError:
        value = None
    if isinstance(value, dict) and value.get("use_beam_search"):
        raise Refusal(400, "BadRequestError", "use_beam_search: this endpoint samples, as a policy does")
    return value if isinstance(value, dict) else {}


def begins_once(asked: dict[str, Any], begin: str) -> bool:
    """Have texts that begin with what the tokenizer puts before them, as rendered ones do, get it no second time;
    whether the request changed. Refusal of a list in which only some do."""
    given = asked.get("prompt")
    texts = given if isinstance(given, list) else [given]
    begun = [bool(begin) and isinstance(text, str) and text.startswith(begin) for text in texts]
    if not any(begun) or "add_special_tokens" in asked:
        return False
    if not all(begun):
        raise Refusal(400, "BadRequestError", f"some prompts begin with {begin}, others do not: send them apart")
    asked["add_special_tokens"] = False
    return True


def _refused(refusal: Refusal) -> JSONResponse:
    error = create_error_response(str(refusal), refusal.kind).error.model_dump() | {"code": refusal.status}
    return JSONResponse({"error": error}, refusal.status, {"Connection": "close"})


class Server:
    """Serves on a thread of its own. `step`: what the thread beside it does again and again, see `ReplicaEndpoint`, and
    `begin` once before."""

    def __init__(
        self,
        client: EngineClient,
        options: ServeOptions,
        model: str,
        begin: Callable[[], None],
        step: Callable[[], None],
    ) -> None:
        self.client, self.options = client, options
        first = begin_text(client.renderer.tokenizer)
        app = self._gate = Gate(
            make_app(client, options, model), options.key, client.taken, options.fetch_images, first
        )
        self._socket = listening(options.host, options.port)
        self.port = int(self._socket.getsockname()[1])
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, limit_concurrency=CONNECTIONS, lifespan="off")
        )
        self._begin, self._step, self._closing = begin, step, threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("endpoint http", self._listen), ("endpoint step", self._drive))
        ]
        for thread in self._threads:
            thread.start()

    def balance(self, own: int, urls: Sequence[str]) -> None:
        """Hand on calls that other replicas serve; see `Balancer`."""
        self._gate.balancer = Balancer(own, urls)

    def close(self) -> None:
        """Serve nobody any more; open calls end."""
        self._closing.set()
        self._threads[1].join()  # first: it hands outputs to the other
        self._server.should_exit = self._server.force_exit = True
        self._threads[0].join()
        self._socket.close()
        self.client.close()

    def _listen(self) -> None:
        self._server.run(sockets=[self._socket])

    def _drive(self) -> None:
        self._begin()
        while not self._closing.is_set():
            self._step()
