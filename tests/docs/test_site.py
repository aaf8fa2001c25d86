"""The manual as a site: built in strict mode, every link followed, opened in Chromium at desktop and phone widths."""

import base64
import html.parser
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
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


PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars --disable-extensions "
    "--disable-background-networking --disable-component-update --disable-sync --disable-dev-shm-usage "
    "--remote-debugging-pipe "
    # Fewer processes: the suite starts workers at the same time.
    "--no-zygote --in-process-gpu --renderer-process-limit=1 --enable-features=NetworkServiceInProcess2"
)


class Chromium:
    """One tab. Commands and events are JSON messages that end with a zero byte, on file descriptors 3 and 4."""

    def __init__(self, folder: Path) -> None:
        there, self._out = os.pipe()
        self._in, back = os.pipe()
        line = f"exec {PROGRAM} {OPTIONS} --user-data-dir={folder} about:blank 3<&{there} 4>&{back}"
        self._program = subprocess.Popen(
            ["bash", "-c", line], pass_fds=(there, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(there)
        os.close(back)
        self._buffer, self._count, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        page = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._program.terminate()
        self._program.wait(20)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result. Events that arrive before it are kept in ``events``."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self, seconds: float = 60) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not wait([self._in], seconds):
                raise TimeoutError("Chromium does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("Chromium has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def size(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Navigate to a page and wait until it is loaded."""
        self.events.clear()
        self.ask("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, script: str) -> Any:
        """Evaluate a JavaScript expression in the page and return its value."""
        return self.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait_for(self, script: str, seconds: float = 30) -> Any:
        """Wait until an expression is true and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.value(script)):
            if time.monotonic() > end:
                raise TimeoutError(script)
            time.sleep(0.1)
        return value

    def errors(self) -> list[str]:
        """Return the errors that the page has logged since it was opened."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
                found.append(str(params["args"]))
        return found

    def requested(self) -> set[str]:
        """Return the addresses that the page has requested since it was opened."""
        asked = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return {event["params"]["request"]["url"] for event in asked}

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))


HOST = "http://site"
LOOKED_AT = (
    *("", "switches/", "switches/zero-3/", "how-to/seven-billion-on-24-gb/"),
    *("reference/api/", "reference/flags/", "rules/", "rules/RF006/", "learn/several-gpus/", "benchmarks/"),
)
SCREENS = {"desktop": (1400, 1000, False), "desktop-dark": (1400, 1000, True), "phone": (390, 844, False)}
WRAPPED = (
    "[...document.querySelectorAll('.flag')].filter(flag => {"
    "const tops = [...flag.getClientRects()].map(box => box.top); return Math.max(...tops) - Math.min(...tops) > 8"
    "}).length"
)
"""The number of flags that are broken over two lines."""
RESULTS = "document.querySelector('.md-search-result__list').innerText"


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


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site and yield its address."""

    class Quiet(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


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
        if switch.name != "auto-strategy":  # a search that takes many seconds: see tests/switches/auto_strategy
            assert main(words) == 0, capsys.readouterr().err


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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if not PROGRAM:
        pytest.skip("Debian's package chromium is not installed")
    opened = Chromium(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


def _is_one_of_many(place: str) -> bool:
    """Whether a page is one of those about rules, of which every tenth is opened by ``make test-longer``."""
    return re.fullmatch(r"rules/RF\d*[1-9]/", place) is not None


@pytest.mark.parametrize("rules", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_on_a_phone_no_page_scrolls_sideways_and_no_flag_is_broken(
    rules: bool, browser: Chromium, address: str, read: dict[str, Page]
) -> None:
    browser.size(390, 844, phone=True)
    wide, wrapped, errors = [], [], {}
    own = [place for place in sorted(read) if not place.startswith("files/")]  # only code, whose frame scrolls
    for place in (place for place in own if _is_one_of_many(place) == rules):
        browser.open(address + place)
        width = browser.value("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
        wide += [(place, width)] if width > 390 else []
        wrapped += [place] if browser.value(WRAPPED) else []
        errors |= {place: found} if (found := browser.errors()) else {}
        elsewhere = {url for url in browser.requested() if not url.startswith((address, "data:", "blob:"))}
        assert elsewhere == set()
    assert wide == []
    assert wrapped == []
    assert errors == {}


def test_on_a_desktop_the_search_finds_and_pictures_are_taken(browser: Chromium, address: str) -> None:
    """The pictures in build/pictures/ are for a person to look at."""
    folder = ROOT / "build" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for screen, (width, height, dark) in SCREENS.items():
        browser.size(width, height, phone=screen == "phone", dark=dark)
        browser.open(address)
        browser.value("localStorage.clear()")  # it would keep the colours of the first visit
        for place in LOOKED_AT[:3] if dark else LOOKED_AT:
            browser.open(address + place)
            browser.picture(folder / f"{place.strip('/').replace('/', '-') or 'start'}-{screen}.png")
            assert browser.errors() == []
            assert browser.value(WRAPPED) == 0
    browser.size(1400, 1000)
    browser.open(address)
    browser.value("document.querySelector('[data-md-component=search-query]').focus()")
    browser.ask("Input.insertText", text="quantize-base")
    browser.ask("Input.dispatchKeyEvent", type="keyUp", key="e")
    found = browser.wait_for(RESULTS)
    assert "lora" in found.lower()
    browser.picture(folder / "search-desktop.png")
    first = browser.value("document.querySelector('.md-search-result__link').href")
    browser.open(first)
    assert browser.errors() == []
    assert json.loads(browser.value("JSON.stringify(document.body.innerText.toLowerCase().includes('quantize'))"))
