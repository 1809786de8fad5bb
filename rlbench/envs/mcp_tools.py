"""The tools of an MCP server (Model Context Protocol, `pip install mcp`) as an environment's tools."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbench.data.base.drawing import needed
from rlbench.data.prompts.images import EncodedImage
from rlbench.data.prompts.prompt import Prompt
from rlbench.envs.loop import process_loop
from rlbench.envs.protocol import Turn
from rlbench.envs.tools import Parser, ToolEnv, find_calls
from rlbench.errors import DataError

Server = str | tuple[str, ...]
CLOSE_S = 10.0


def mcp(
    server: str | Sequence[str],
    *,
    parser: Parser | None = None,
    reward: Callable[[Turn], float | None] | None = None,
    role: str | None = "tool",
    timeout_s: float = 30.0,
    images: bool = False,
) -> McpEnv:
    """Make an environment of an MCP server's tools, as `rb.envs.tools` does of functions.

        env = rb.envs.mcp(["python", "server.py"])
        rollouts = session.rollout(chats, n=8, env=env, tools=env.tools, max_tokens=128)

    The server is asked for its tools here and now. Each sample has a session of its own with it, so what its tools
    remember is of one sample; a command is started for each, by the replica.

    Args:
        server: the server's address (`"http://…/mcp"`, Streamable HTTP), or the command, a list of words, that starts
            one which talks over its standard input and output.
        parser, reward, role: as of `rb.envs.tools`.
        timeout_s: seconds one answer of the server may take; then the policy reads that there was none.
        images: show the policy, which has to see, the images that tools answer with; else it reads `[image]`.
    """
    needed("mcp", "rb.envs.mcp(…)")
    if isinstance(server, str) and not server.startswith(("http://", "https://")):
        raise DataError(f"mcp({server!r}): give an address (http://…), or a command as a list: ['python', 'server.py']")
    reached: Server = server if isinstance(server, str) else tuple(map(str, server))
    if not reached or not timeout_s > 0:
        raise DataError(f"mcp({server!r}, timeout_s={timeout_s}): wanted a command of at least one word, and a time")
    try:
        session = _Session(reached, timeout_s)
        listed = session.listed()
        session.close()
    except Exception as error:
        raise DataError(f"mcp: {_shown(reached)} cannot be asked for its tools: {_cause(error)}") from error
    if not listed:
        raise DataError(f"mcp: {_shown(reached)} has no tools")
    functions: dict[str, Any] = {tool.name: RemoteTool(tool.name, dict(tool.input_schema)) for tool in listed}
    schemas = [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description or "", "parameters": dict(t.input_schema)},
        }
        for t in listed
    ]
    told = {"server": reached, "timeout_s": timeout_s, "tools": schemas, "images": images}
    return McpEnv(functions, parser or find_calls, reward, role, **told)  # type: ignore[arg-type]


@dataclass(eq=False, repr=False, kw_only=True)
class McpEnv(ToolEnv):
    """See `mcp`. `tools`: what the server offers, in OpenAI's form."""

    server: Server
    timeout_s: float
    tools: list[dict[str, Any]]
    images: bool = False
    _session: _Session | None = None

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools as the server describes them."""
        return self.tools

    def __repr__(self) -> str:
        return f"mcp({_shown(self.server)}: {', '.join(self.functions)})"

    def reset(self, prompt: Prompt) -> None:
        """Open a session with the server, for one sample."""
        self._session = _Session(self.server, self.timeout_s)
        for tool in self.functions.values():
            tool.session, tool.images = self._session, self.images  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the session, and the server where a command started it."""
        if self._session is not None:
            self._session.close()


@dataclass(eq=False)
class RemoteTool:
    """A server's tool, called as a function with the arguments that its JSON schema names."""

    name: str
    schema: dict[str, Any] = field(repr=False)
    session: _Session | None = None
    images: bool = False

    @property
    def __signature__(self) -> inspect.Signature:
        """Parameters by the schema, those that are required first; any keywords where names are no Python names."""
        names, needs = list(self.schema.get("properties", {})), self.schema.get("required", ())
        if not all(name.isidentifier() and not keyword.iskeyword(name) for name in names):
            return inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)])
        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        ordered = sorted(names, key=lambda name: name not in needs)
        return inspect.Signature(
            [inspect.Parameter(name, kind, default=empty if name in needs else None) for name in ordered]
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the server answers: a text, or texts and images."""
        if self.session is None:
            raise DataError(f"{self.name}: no session with the server is open: reset the environment first")
        bound = self.__signature__.bind(*args, **kwargs)
        loose = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in bound.signature.parameters.values())
        parts = self.session.called(self.name, bound.kwargs if loose else bound.arguments, self.images)
        return "\n".join(parts) if all(isinstance(part, str) for part in parts) else parts


class _Session:
    """A session with a server, on the process's event loop for them; called from any other thread."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        self._server, self._timeout_s = server, timeout_s
        self._opened: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._over = asyncio.Event()
        self._task = asyncio.run_coroutine_threadsafe(self._serve(), process_loop())
        try:
            self._client = self._opened.result(timeout_s)
        except concurrent.futures.TimeoutError:
            self._task.cancel()
            raise TimeoutError(f"it did not answer within timeout_s={timeout_s:g}") from None

    async def _serve(self) -> None:
        """Hold the session open in one task, which the protocol's library asks for."""
        library = needed("mcp", "rb.envs.mcp(…)")
        reached: Any = self._server
        if isinstance(reached, tuple):
            reached = library.StdioServerParameters(command=reached[0], args=list(reached[1:]))
        try:
            async with library.Client(reached, read_timeout_seconds=self._timeout_s) as client:
                self._opened.set_result(client)
                await self._over.wait()
        except Exception as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)

    def listed(self) -> list[Any]:
        """Return the server's tools, all pages of them."""

        async def pages() -> list[Any]:
            page = await self._client.list_tools()
            found = list(page.tools)
            while page.next_cursor:
                page = await self._client.list_tools(cursor=page.next_cursor)
                found += page.tools
            return found

        return asyncio.run_coroutine_threadsafe(pages(), process_loop()).result()

    def called(self, name: str, arguments: Mapping[str, Any], images: bool) -> list[Any]:
        """Call a tool; return its texts, and its images where asked for. What it says of an error the policy reads."""
        calling = self._client.call_tool(name, dict(arguments))
        result = asyncio.run_coroutine_threadsafe(calling, process_loop()).result()
        parts = [
            EncodedImage.from_any(base64.b64decode(part.data), f"the image that {name} gave")
            if images and part.type == "image"
            else part.text
            if part.type == "text"
            else f"[{part.type}]"
            for part in result.content
        ]
        return ["error: " + "\n".join(map(str, parts))] if result.is_error else parts

    def close(self) -> None:
        process_loop().call_soon_threadsafe(self._over.set)
        self._task.result(CLOSE_S)


def _shown(server: Server) -> str:
    return server if isinstance(server, str) else " ".join(server)


def _cause(error: BaseException) -> str:
    """Say what failed, of a group of exceptions the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
