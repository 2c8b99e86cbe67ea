"""A hook of mkdocs: pages of the site that are no Markdown in docs/, and the links to them.

README.md, CHANGELOG.md and CONTRIBUTING.md are pages. So is whatever a page links to: results, examples, other code. A
link to a file that is not there is left as it stands, and mkdocs reports it. Notebooks become pages as they were saved,
with their outputs; nothing is run. The schemas of JSON outputs are made of their declarations.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers.json_schema import OUTPUTS  # noqa: E402

# Where these stand on the site.
_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(\]\(|\]: )(?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=[)\s])")
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_SCHEMAS = "<!-- schemas -->"
_CODE = {".json": "json", ".py": "python", ".sh": "sh", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside docs/, and what that links to."""
    for place, uri in _PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / place)))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        for uri, content in _notebook(notebook).items():
            files.append(File.generated(config, uri, content=content))
    for command, schema in _schemas().items():
        files.append(File.generated(config, f"schemas/{command}.json", content=json.dumps(schema, indent=1)))
    waiting = [_place(file) for file in files.documentation_pages()]
    known = {_uri(place) for place in waiting}
    while waiting:
        place = waiting.pop()
        for target in _targets(_markdown(place), place):
            uri = _uri(target)
            if uri not in known and not target.startswith("docs/") and (ROOT / target).exists():
                known.add(uri)
                waiting.append(uri.removeprefix("files/") if uri.endswith("/README.md") else target)
                files.append(_file(waiting[-1], config))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to where their targets stand on the site."""
    place = _place(page.file)
    if page.file.src_uri == "json_output.md":
        markdown = markdown.replace(_SCHEMAS, _schema_tables())

    def moved(link: re.Match[str]) -> str:
        target = _resolved(link["target"], place)
        if not (ROOT / target).exists():
            return link[0]
        there = posixpath.relpath(_uri(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{link[1]}{there}{link['anchor'] or ''}"

    parts, end = [], 0
    for block in _FENCED.finditer(markdown):
        parts += [_LINK.sub(moved, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join(parts) + _LINK.sub(moved, markdown[end:])


def _notebook(path: Path) -> dict[str, str | bytes]:
    """A saved notebook as a page, and its pictures beside it."""
    import nbformat

    uri = f"notebooks/{path.stem}"
    parts, pictures = [], {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[f"notebooks/{name}"] = base64.b64decode(data["image/png"])
                parts.append(f"![what this cell draws]({name})")
            elif output.get("name") != "stderr":
                printed = (output.get("text") or data.get("text/plain", "")).rstrip("\n")
                # What one cell prints may be kept in pieces.
                if parts[-1].startswith("```text"):
                    parts[-1] = f"{parts[-1].removesuffix('```')}{printed}\n```"
                else:
                    parts.append(f"```text\n{printed}\n```")
    parts.append(f"This page is a notebook: [{path.name}]({path.name}).")
    return {f"{uri}.md": "\n\n".join(parts) + "\n", **pictures}


def _schemas() -> dict[str, dict[str, Any]]:
    return {command.replace(" ", "_"): output.model_json_schema() for command, output in OUTPUTS.items()}


def _schema_tables() -> str:
    """What each command prints, field by field."""
    parts = []
    for command, output in OUTPUTS.items():
        name = command.replace(" ", "_")
        rows = [
            f"| `{field}` | {_type(schema)} | {schema.get('description', '')} |"
            for field, schema in output.model_json_schema()["properties"].items()
        ]
        parts.append(
            f"## selfspec {command} {{ #{name} }}\n\n[schemas/{name}.json](schemas/{name}.json)\n\n"
            "| field | type | meaning |\n| --- | --- | --- |\n" + "\n".join(rows)
        )
    return "\n\n".join(parts)


def _type(schema: dict[str, Any]) -> str:
    """A JSON type in words."""
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _markdown(place: str) -> str:
    """What a file of the project shows as a page: code as a block, a folder as a list; nothing for a picture."""
    path = ROOT / place
    if path.is_dir():
        inside = sorted(each.name for each in path.iterdir() if each.suffix in {".md", *_CODE})
        # As links from beside the folder, which is where they are resolved.
        return f"# {place}\n\n" + "".join(f"- [{name}]({path.name}/{name})\n" for name in inside)
    if path.suffix in _CODE:
        return f"# {place}\n\n```{_CODE[path.suffix]}\n{path.read_text(encoding='utf-8')}```\n"
    return path.read_text(encoding="utf-8") if path.suffix == ".md" and path.is_file() else ""


def _file(place: str, config: MkDocsConfig) -> File:
    """A file of the project as one of the site."""
    path = ROOT / place
    if path.is_dir() or path.suffix in _CODE:
        return File.generated(config, _uri(place), content=_markdown(place))
    return File.generated(config, _uri(place), abs_src_path=str(path))


def _uri(place: str) -> str:
    """Where a file of the project stands on the site."""
    if place in _PAGES:
        return _PAGES[place]
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    path = ROOT / place
    if path.is_dir():
        return f"files/{place}/README.md" if (path / "README.md").is_file() else f"files/{place}.md"
    return f"files/{place}.md" if path.suffix in _CODE else f"files/{place}"


def _place(file: File) -> str:
    """Where a file of the site stands in the project."""
    if file.src_uri.startswith("notebooks/"):
        return (
            f"docs/{file.src_uri.removesuffix('.md')}.ipynb" if file.src_uri.endswith(".md") else f"docs/{file.src_uri}"
        )
    for place, uri in _PAGES.items():
        if file.src_uri == uri:
            return place
    if not file.src_uri.startswith("files/"):
        return f"docs/{file.src_uri}"
    place = file.src_uri.removeprefix("files/")
    return place if (ROOT / place).exists() else place.removesuffix(".md")


def _targets(markdown: str, place: str) -> list[str]:
    return [_resolved(link["target"], place) for link in _LINK.finditer(_FENCED.sub("", markdown))]


def _resolved(target: str, place: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), target))


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    """Read the package from the working tree, wherever mkdocs is called."""
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [str(ROOT)]
    return config
