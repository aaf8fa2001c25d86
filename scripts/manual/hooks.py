"""Hooks that mkdocs calls while it builds the manual: generated pages, and links to files outside of docs/."""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from rapidformer_templates.planning.registry import REGISTRY  # noqa: E402
from scripts.manual import pages, tabs  # noqa: E402
from scripts.manual.catalogue import MADE  # noqa: E402

AS_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sbatch": "bash", ".ipynb": "json", ".toml": "toml"}
LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s:#]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^(```.*?^```)", flags=re.M | re.S)
RULE = re.compile(r"(?<![\w`/[])(RF\d{3})(?![\w`\]])")
SPACE = r'(?: |<span class="w"> </span>)'
FLAG = re.compile(
    rf"(--[a-z][\w-]*)(?:(?:{SPACE}|=)(?:<span class=\"(?:s1|s2|m|nv|l)\">[^<]*</span>|(?!--)[^\s<\\\"])+)?"
)
"""A flag with its value, in plain code or in code with colours."""
CODE = re.compile(r"(<code(?: [^>]*)?>)(.*?)(?=</code>)", flags=re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a page for each switch and each rule to the navigation, after the pages that list them."""
    switches = [f"switches/{switch.name}.md" for switch in REGISTRY.switches]
    rules = [{rule.code: f"rules/{rule.code}.md"} for rule in REGISTRY.all_rules]
    for page, title, each in (("switches.md", "Each switch", switches), ("rules.md", "Each rule", rules)):
        section = next(part for part in _sections(config.nav) if page in part)
        section.insert(section.index(page) + 1, {title: each})
    return config


def _sections(nav: Any) -> Iterator[list[Any]]:
    """Yield the lists of the navigation, at every level."""
    if isinstance(nav, list):
        yield nav
    for part in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from _sections(part)


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
    markdown = markdown.replace(MADE + "\n\n", "")
    if place == "switches.md":
        markdown = _catalogue_with_links(markdown)
    elif place == "rules.md":
        markdown = re.sub(r"^\| (RF\d{3}) \|", r"| [\1](rules/\1.md) |", markdown, flags=re.M)
    if not place.startswith("files/"):
        markdown = _with_rule_links(markdown, place)
    return tabs.with_tabs(_relinked(markdown, lambda target: _on_site(target, place)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep flags and their values together. Remove Sphinx roles, which mkdocstrings does not process."""
    html = CODE.sub(lambda code: code[1] + FLAG.sub(_unbroken, code[2]), html)
    return re.sub(r":(?:class|func|meth|mod|attr):(?=<code>)", "", html)


def _unbroken(flag: re.Match[str]) -> str:
    """Mark a flag, with its value unless both are too long for the line of a phone."""
    short = len(re.sub(r"<[^>]*>", "", flag[0])) <= 40
    whole, rest = (flag[0], "") if short else (flag[1], flag[0].removeprefix(flag[1]))
    return f'<span class="flag">{whole}</span>{rest}'


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
    """Return ``docs/switches.md`` with links to the pages of the switches, which replace the page of details."""
    for switch in REGISTRY.switches:
        markdown = markdown.replace(f"| {switch.name} |", f"| [{switch.name}](switches/{switch.name}.md) |", 1)
    return re.sub(r"\[Details\]\(.*?\) has", "The page of a switch has", markdown)


def _with_rule_links(markdown: str, place: str) -> str:
    """Link codes of rules in the text, but not in code, headings and links."""
    link = posixpath.relpath("rules", posixpath.dirname(place) or ".")
    parts = re.split(r"(^```.*?^```|^#.*?$|`[^`]*`|\[[^\]]*\]\([^)]*\))", markdown, flags=re.M | re.S)
    known = {rule.code for rule in REGISTRY.all_rules}
    return "".join(
        part if i % 2 else RULE.sub(lambda m: f"[{m[1]}]({link}/{m[1]}.md)" if m[1] in known else m[1], part)
        for i, part in enumerate(parts)
    )
