"""A server of tools with the mcp package: by stdin and stdout, or mcp_tools.py PORT over HTTP."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from mcp.server.mcpserver import MCPServer
from pydantic import Field

Pieces = Annotated[int, Field(ge=0, le=9)]

server = MCPServer("shop")


@server.tool()
def price(fruit: Literal["plum", "pear"]) -> str:
    """The price of a fruit in cents."""
    return f"{fruit} costs {7 * len(fruit)} cents"


@server.tool()
def total(plums: Pieces, pears: Pieces) -> str:
    """What so many plums and pears cost together."""
    return f"together {28 * (plums + pears)} cents"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
