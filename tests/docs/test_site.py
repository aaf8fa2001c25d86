"""The manual as a site: built in strict mode, and every link followed."""

import html.parser
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

import rapidformer_templates
from rapidformer_templates.commands.main import main
from rapidformer_templates.planning.registry import REGISTRY
from scripts import pictures
from tests.support.manual import ROOT

for package in ("mkdocs", "material", "mkdocstrings"):
    pytest.importorskip(package, reason=f"needs {package}: pip install 'rapidformer_templates[docs]'")
pytestmark = [pytest.mark.docs, pytest.mark.slow]


HOST = "http://site"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. A broken link, or a page that is in no menu, is an error."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder


class Page(html.parser.HTMLParser):
    """Links, loaded files and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        if tag == "a" and values.get("href"):
            self.links.add(str(values["href"]))
        elif tag in ("link", "script", "img", "iframe") and (values.get("href") or values.get("src")):
            self.loads.add(str(values.get("href") or values.get("src")))


@pytest.fixture(scope="module")
def read(site: Path) -> dict[str, Page]:
    """Return every page by its path, such as ``switches/zero-3/``."""
    files = [file for file in site.rglob("*.html") if file.name != "404.html"]
    return {
        str(file.relative_to(site)).removesuffix("index.html"): Page(file.read_text(encoding="utf-8")) for file in files
    }


def test_every_link_and_anchor_leads_somewhere(site: Path, read: dict[str, Page]) -> None:
    followed, broken = 0, []
    for place, page in read.items():
        for link in page.links | page.loads:
            target = urlsplit(urljoin(f"{HOST}/{place}", link))
            if f"{target.scheme}://{target.netloc}" != HOST:
                continue
            followed += 1
            path, anchor = unquote(target.path.lstrip("/")), unquote(target.fragment)
            anchors = read[path].anchors | {""} if path in read else {anchor}
            if anchor not in anchors or not (site / path).exists():
                broken.append(f"{place}: {link}")
    assert broken == []
    assert followed > 5000


def test_nothing_is_loaded_from_elsewhere(site: Path, read: dict[str, Page]) -> None:
    assert {link for page in read.values() for link in page.loads if "//" in link} == set()
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//", styles) == []


def test_each_switch_has_a_page_whose_command_works(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from scripts.manual.pages import example_command

    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text("{}", encoding="utf-8")
    for switch in REGISTRY.switches:
        page = (site / "switches" / switch.name / "index.html").read_text(encoding="utf-8")
        for part in (*switch.receipt, *(rule.code for rule in switch.rules)):
            assert part in page, (switch.name, part)
        words = shlex.split(example_command(switch).replace("\\\n", " "))[1:]
        if switch.name == "auto-strategy":  # a search that takes many seconds: see tests/switches/auto_strategy
            continue
        status, said = main(words), capsys.readouterr().err
        if switch.needs_package and find_spec(switch.needs_package) is None:
            assert f"needs {switch.needs_package}, which is not installed" in said
        else:
            assert status == 0, said


def test_each_rule_has_a_page_in_three_parts(read: dict[str, Page]) -> None:
    parts = {"why", "example", "what-to-do-instead"}
    for rule in REGISTRY.all_rules:
        page = read[f"rules/{rule.code}/"]
        assert parts <= page.anchors
        assert f"{rule.code}/" in read["rules/"].links


def test_a_training_command_has_tabs(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<label for=\"__tabbed_1_\d\">(?:<a [^>]*>)?(\w+)", page) == ["Command", "Python", "YAML"]


def test_the_api_has_every_public_name(read: dict[str, Page]) -> None:
    homes = rapidformer_templates._HOME
    assert {f"{homes[public]}.{public}" for public in homes} <= read["reference/api/"].anchors


def _without_counts(picture: str) -> str:
    """Remove the number of rules, which each new rule changes."""
    return re.sub(r"\d+(?=&#160;consulted)", "", picture)


def test_pictures_show_what_is_said_today() -> None:
    """Compare the words in the pictures: output of commands, numbers of tables. How they look is up to matplotlib."""
    for file, text in pictures.pictures():
        kept = (pictures.FOLDER / file).read_text(encoding="utf-8")
        words = [re.findall(r"<text[^>]*>([^<]*)</text>", _without_counts(picture)) for picture in (kept, text)]
        assert words[0] == words[1], f"{file}: python scripts/pictures.py"
        assert len(words[0]) > 4
