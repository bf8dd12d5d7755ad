"""An MCP server in a process of its own: `python mcp_calculator.py`; over HTTP with a port."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import (
    BlobResourceContents,
    ContentBlock,
    EmbeddedResource,
    TextContent,
    TextResourceContents,
)

server = MCPServer("sums")


@server.tool()
def calculator(expression: str) -> int:
    """Evaluate an arithmetic expression."""
    return sum(int(number) for number in expression.split("+"))


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("nothing was found")


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
async def slow() -> None:
    """Sleep for a minute."""
    await asyncio.sleep(60)


@server.tool(structured_output=False)
def read() -> list[ContentBlock]:
    """Read the notes."""
    address = "file:///notes"
    return [
        EmbeddedResource(resource=TextResourceContents(uri=address, text="A note.")),
        EmbeddedResource(resource=BlobResourceContents(uri=address, blob="AAAA")),
        TextContent(text=""),
        TextContent(text="The end."),
    ]


@server.tool()
def process() -> str:
    """Return the id of the server's process, and the secret in its environment."""
    return f"{os.getpid()} {os.environ.get('SECRET_OF_TEST', '')}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
