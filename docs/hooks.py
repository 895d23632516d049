"""Hooks of the site: its home page is the README, its reference comes from the code.

Pages link files of the repository, as GitHub shows them. The site has a page for each such file.
A page without a body fails the build.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

import reference
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[1]
HOME = "index.md"

_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".md": "markdown"}
_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the home page, the reference, and a page for each file that a page links."""
    made = {HOME: (REPOSITORY / "README.md").read_text(), **reference.pages()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=_for_site(name, text)))
    sources = [*made.items(), *((f.src_uri, f.content_string) for f in _written(files, made))]
    linked = {file for name, text in sources for file in _linked_files(name, text)}
    linked |= {path.relative_to(REPOSITORY) for path in (REPOSITORY / "recipes").glob("*.yaml")}
    for path in sorted(linked):
        files.append(File.generated(config, f"files/{path}.md", content=_file_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links into the repository into links of the site."""
    name = page.file.src_uri
    return markdown if page.file.generated_by else _for_site(name, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Passes a page on; raises PluginError for one that has nothing but a title."""
    body = re.sub(r"<h1\b.*?</h1>", "", html, flags=re.DOTALL)
    if not re.sub(r"<[^>]*>", "", body).strip():
        raise PluginError(f"{page.file.src_uri} has no body: write it, or take it out of the nav")
    return html


def _written(files: Files, made: dict[str, str]) -> list[File]:
    return [f for f in files.documentation_pages() if f.src_uri not in made]


def _target(name: str, link: str) -> Path | None:
    """The file of the repository that a link of a page means; None for a link within the site."""
    folder = REPOSITORY if name == HOME else REPOSITORY / "docs" / PurePosixPath(name).parent
    path = (folder / link).resolve()
    return path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else None


def _linked_files(name: str, text: str) -> list[Path]:
    targets = (_target(name, match[1]) for match in _LINK.finditer(text))
    return [
        path
        for path in targets
        if path is not None and path.parts[0] != "docs" and (REPOSITORY / path).is_file()
        and path != Path("README.md")
    ]  # fmt: skip


def _for_site(name: str, text: str) -> str:
    up = "../" * (len(PurePosixPath(name).parts) - 1)

    def moved(match: re.Match[str]) -> str:
        path, anchor = _target(name, match[1]), match[2] or ""
        if path is None:
            return match[0]
        if path == Path("README.md"):
            return f"]({up}{HOME}{anchor})"
        if path.parts[0] == "docs":
            return f"]({up}{path.relative_to('docs')}{anchor})"
        return f"]({up}files/{path}.md)" if (REPOSITORY / path).is_file() else match[0]

    return _LINK.sub(moved, text)


def _file_page(path: Path) -> str:
    language = _LANGUAGES.get(path.suffix, "text")
    text = (REPOSITORY / path).read_text()
    fence = "`" * max(4, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"# {path}\n\n{fence}{language}\n{text}{fence}\n"
