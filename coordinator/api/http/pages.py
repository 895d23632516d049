"""The files of the dashboard, as they are on disk.

They hold no data and no secret: the page asks for the token and sends it with its requests.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

DASHBOARD = Path(__file__).parents[2] / "dashboard"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Types of files by suffix; a file with another suffix is not served."""


def page_routes(directory: Path) -> Iterator[Route]:
    """Makes one route for each file, and `/` for index.html.

    Files are looked up when the routes are made, so that no path of a request ever reaches the
    file system; their content is read by each request.
    """
    for file in sorted(directory.rglob("*")):
        if file.is_file() and file.suffix in MEDIA_TYPES:
            path = f"/{file.relative_to(directory).as_posix()}"
            path = "/" if path == "/index.html" else path
            yield Route(path, _sender(file), methods=["GET"], include_in_schema=False)


def _sender(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        content = await asyncio.to_thread(file.read_bytes)
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        # no-cache: a browser keeps the file but asks for it again each time, so that page and
        # coordinator have the same version.
        headers = {"etag": tag, "cache-control": "no-cache"}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=MEDIA_TYPES[file.suffix])

    return send
