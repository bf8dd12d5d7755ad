"""The calculator as an MCP server over stdio: docs/tools.md."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("sums", log_level="ERROR")


@server.tool()
def calculator(expression: str) -> int:
    """Evaluate an arithmetic expression."""
    try:
        return sum(int(number) for number in expression.split("+"))
    except ValueError:
        # The server logs an unexpected exception with a traceback, which takes a second.
        raise ToolError("Give whole numbers with + between them.") from None


if __name__ == "__main__":
    server.run()
