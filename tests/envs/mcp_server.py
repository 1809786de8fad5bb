"""An MCP server for tests: over standard input and output, or with a port over HTTP, at `/mcp` of this machine."""

import io
import sys
from typing import Any

import PIL.Image
from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("test")
seen: list[str] = []


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a text, and say how many there are."""
    seen.append(text)
    return f"{len(seen)} notes"


@server.tool(structured_output=False)
def picture(shade: int) -> list[Any]:
    """Draw a square."""
    data = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), (shade, 0, 0)).save(data, "PNG")
    return ["a square", Image(data=data.getvalue(), format="png")]


@server.tool()
def broken() -> str:
    """Fail."""
    raise ValueError("no luck")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
