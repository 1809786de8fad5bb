"""An MCP server for tests: over standard input and output, or with a port over HTTP, at `/mcp` of this machine."""

import sys

from mcp.server import MCPServer

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


@server.tool()
def broken() -> str:
    """Fail."""
    raise ValueError("no luck")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
