"""Hooks that mkdocs calls while it builds the manual: generated pages, and links to files outside of docs/."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from rapidformer_templates.planning.registry import REGISTRY  # noqa: E402
from scripts.manual import pages  # noqa: E402

AS_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sbatch": "bash", ".ipynb": "json", ".toml": "toml"}
LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s:#]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^(```.*?^```)", flags=re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a page for each switch to the navigation, after the catalogue."""
    assert config.nav is not None
    section = next(entry["Switches"] for entry in config.nav if "Switches" in entry)
    section[1:1] = [{"Each switch": [f"switches/{switch.name}.md" for switch in REGISTRY.switches]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and a page for each file or folder of the repository that another page links."""
    made = dict(pages.generated())
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        made[AS_PAGES[name]] = _moved((ROOT / name).read_text(encoding="utf-8"))
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()} | made
    for place, text in texts.items():
        for path in _linked_outside(text, place):
            made.setdefault(_place_of(path), _repository_page(path))
    for place, text in made.items():
        file = File.generated(config, place, content=text)
        if place.startswith("files/"):
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links to files outside of docs/ lead to their pages on the site. Link the switches in the catalogue."""
    place = page.file.src_uri
    if place == "switches.md":
        markdown = _catalogue_with_links(markdown)
    return _relinked(markdown, lambda target: _on_site(target, place))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the Sphinx roles from docstrings, which mkdocstrings does not process."""
    return re.sub(r":(?:class|func|meth|mod|attr):(?=<code>)", "", html)


def _relinked(markdown: str, new_target: Any) -> str:
    """Replace the target of each relative link in the text, except in code."""
    parts = FENCE.split(markdown)
    return "".join(
        part if i % 2 else LINK.sub(lambda m: new_target(m["target"]) + (m["anchor"] or ""), part)
        for i, part in enumerate(parts)
    )


def _moved(text: str) -> str:
    """Adapt the links of a text from the repository's root to the folder docs/."""
    return _relinked(text, lambda t: t.removeprefix("docs/") if t.startswith("docs/") else f"../{t}")


def _outside(target: str, place: str) -> str | None:
    """Return the path in the repository of a link that leaves docs/, or None."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(place), target))
    return None if path.startswith("docs/") else path


def _linked_outside(text: str, place: str) -> set[str]:
    prose = "".join(FENCE.split(text)[::2])
    found = {_outside(match["target"], place) for match in LINK.finditer(prose)}
    return {path for path in found if path and path not in AS_PAGES and (ROOT / path).exists()}


def _place_of(path: str) -> str:
    return f"files/{path}.md"


def _on_site(target: str, place: str) -> str:
    path = _outside(target, place)
    if path is None:
        return target
    there = AS_PAGES.get(path, _place_of(path))
    return posixpath.relpath(there, posixpath.dirname(place) or ".")


def _repository_page(path: str) -> str:
    """Return a page that shows a file as code, or a folder's entries with the first line of each docstring."""
    found = ROOT / path
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if found.is_file():
        language = LANGUAGES.get(found.suffix, "text")
        return f"{head}````{language}\n{found.read_text(encoding='utf-8').rstrip()}\n````\n"
    entries = sorted(entry for entry in found.iterdir() if entry.name[0] not in "_.")
    return head + "\n".join(f"- `{entry.name}`{_said_of(entry)}" for entry in entries) + "\n"


def _said_of(entry: Path) -> str:
    source = entry / "__init__.py" if entry.is_dir() else entry
    if source.suffix != ".py" or not source.exists():
        return ""
    match = re.match(r'"""(.*?)(?:"""|\n)', source.read_text(encoding="utf-8"))
    return f": {pages._text(match[1])}" if match else ""


def _catalogue_with_links(markdown: str) -> str:
    """Return ``docs/switches.md`` without the sections of the switches, because each has a separate page here."""
    for switch in REGISTRY.switches:
        markdown = markdown.replace(f"| {switch.name} |", f"| [{switch.name}](switches/{switch.name}.md) |", 1)
    markdown = re.sub(r"^Generated by .*?\n\n", "", markdown, count=1, flags=re.M | re.S)
    return re.sub(r"^### .*?(?=^## )", "", markdown, flags=re.M | re.S)
