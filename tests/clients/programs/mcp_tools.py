"""A server of tools with the mcp package: by stdin and stdout, or mcp_tools.py PORT over HTTP."""

from __future__ import annotations

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")


@server.tool()
def price(fruit: str) -> str:
    """The price of a fruit in cents."""
    return f"{fruit} costs {7 * len(fruit)} cents"


@server.tool()
def total(cents: list[int]) -> int:
    """The sum of prices in cents."""
    return sum(cents)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
