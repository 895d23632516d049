from pathlib import Path

import pytest
from support.rest_servers import client_of, refused, tokens_of

from rolemesh.coordinator.api.http.pages import DASHBOARD, MEDIA_TYPES
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pages = tmp_path / "pages"
    (pages / "charts").mkdir(parents=True)
    (pages / "index.html").write_text("<!doctype html>")
    (pages / "app.js").write_text("export {}")
    (pages / "charts" / "line.svg").write_text("<svg/>")
    (pages / "notes.txt").write_text("not served")
    (pages / "__init__.py").write_text("")
    (tmp_path / "secret.html").write_text("outside")
    return pages


def operations() -> StoreOperations:
    return StoreOperations(MemoryStateStore())


@pytest.mark.parametrize(
    ("path", "media_type", "text"),
    [
        ("/", "text/html; charset=utf-8", "<!doctype html>"),
        ("/app.js", "text/javascript; charset=utf-8", "export {}"),
        ("/charts/line.svg", "image/svg+xml", "<svg/>"),
    ],
)
async def test_files_have_their_types_and_are_asked_for_anew(
    folder: Path, path: str, media_type: str, text: str
) -> None:
    async with client_of(operations(), pages=folder, tokens=tokens_of("t")) as client:
        answer = await client.get(path)
        again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
        head = await client.head(path)

    assert (answer.status_code, answer.text) == (200, text)
    assert answer.headers["content-type"] == media_type
    assert answer.headers["cache-control"] == "no-cache"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert (again.status_code, again.content) == (304, b"")
    assert (head.status_code, head.content) == (200, b"")


async def test_a_file_that_changed_has_another_tag(folder: Path) -> None:
    async with client_of(operations(), pages=folder) as client:
        before = await client.get("/app.js")
        (folder / "app.js").write_text("export const a = 1")
        after = await client.get("/app.js", headers={"if-none-match": before.headers["etag"]})

    assert after.status_code == 200
    assert after.text == "export const a = 1"


@pytest.mark.parametrize(
    "path",
    [
        "/notes.txt",
        "/__init__.py",
        "/charts",
        "/../secret.html",
        "/%2e%2e/secret.html",
        "/charts/..%2f..%2fsecret.html",
        "//secret.html",
    ],
)
async def test_nothing_else_of_the_disk_is_served(folder: Path, path: str) -> None:
    async with client_of(operations(), pages=folder) as client:
        refused(await client.get(f"http://localhost{path}"), 404, "ROUTE_NOT_FOUND")


async def test_a_page_takes_no_post(folder: Path) -> None:
    async with client_of(operations(), pages=folder) as client:
        answer = await client.post("/app.js")
        refused(answer, 405, "METHOD_NOT_ALLOWED")
        assert answer.headers["allow"] == "GET, HEAD"


async def test_every_file_of_the_dashboard_is_served() -> None:
    files = [path for path in DASHBOARD.rglob("*") if path.suffix in MEDIA_TYPES]
    assert DASHBOARD / "index.html" in files
    async with client_of(operations(), pages=DASHBOARD) as client:
        for file in files:
            name = file.relative_to(DASHBOARD).as_posix()
            answer = await client.get("/" if name == "index.html" else f"/{name}")
            assert answer.content == file.read_bytes()
