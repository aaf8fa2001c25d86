"""Measure the test suite: ``--durations-file build/durations.json`` writes seconds by test, fixture and file.

It also prints the slowest files and the suite's peak number of processes and peak memory. If several processes run the
tests, the process that distributes the tests collects the figures of all of them.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

SLOWEST = 20
"""Number of files in the summary."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", type=Path, help="write the seconds of every test and fixture to this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("durations_file") or hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config), "durations")


class Load(threading.Thread):
    """Sample twice per second the processes of the suite (this one and its descendants) and the free memory.

    Attributes:
        running: the tests that run now, kept up to date by :class:`Durations`.
        commands: the largest sample: process, parent and command line.
        tests: the tests that ran then.
        memory: the largest number of bytes that all processes of the machine have taken since the start.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.running = set[str]()
        self.commands, self.tests, self.memory = list[str](), list[str](), 0
        self._ended = threading.Event()

    def run(self) -> None:
        here, available = psutil.Process(), psutil.virtual_memory().available
        while not self._ended.wait(0.5):
            self.memory = max(self.memory, available - psutil.virtual_memory().available)
            processes = [here, *here.children(recursive=True)]
            if len(processes) > len(self.commands):
                self.commands, self.tests = [_command(process) for process in processes], sorted(self.running)

    def end(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self.join()


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} of {process.ppid()}: {' '.join(process.cmdline())[:120]}"
    return "ended"


class Durations:
    """Seconds by test, by fixture and by file.

    Attributes:
        tests: seconds of setup with its fixtures, call and teardown, by test.
        fixtures: seconds by "file or test::fixture", without the fixtures that a fixture uses.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.file: Path | None = config.getoption("durations_file")
        self.tests: dict[str, dict[str, float]] = defaultdict(dict)
        self.fixtures: dict[str, float] = defaultdict(float)
        self.load = Load()
        if self.file is not None and not hasattr(config, "workerinput"):
            self.load.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            self.fixtures[f"{request.node.nodeid}::{fixturedef.argname}"] += time.perf_counter() - begin

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.load.running.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.load.running.discard(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests[report.nodeid][report.when or ""] = report.duration

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workerinput"):
            self.config.workeroutput["fixtures"] = dict(self.fixtures)  # type: ignore[attr-defined]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, seconds in getattr(node, "workeroutput", {}).get("fixtures", {}).items():
            self.fixtures[name] += seconds

    def _files(self) -> dict[str, float]:
        """Return seconds by file, slowest first."""
        files: dict[str, float] = defaultdict(float)
        for name, phases in self.tests.items():
            files[name.partition("::")[0]] += sum(phases.values())
        return dict(sorted(files.items(), key=lambda item: -item[1]))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.file is None:
            return
        self.load.end()
        files = self._files()
        fixtures = dict(sorted(self.fixtures.items(), key=lambda item: -item[1]))
        peak = {"processes": len(self.load.commands), "memory_gb": round(self.load.memory / 1e9, 2)}
        rounded = {
            "peak": peak | {"tests": self.load.tests, "commands": self.load.commands},
            "files": {name: round(seconds, 3) for name, seconds in files.items()},
            "tests": {name: {k: round(v, 4) for k, v in phases.items()} for name, phases in self.tests.items()},
            "fixtures": {name: round(seconds, 4) for name, seconds in fixtures.items()},
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(rounded, indent=1), encoding="utf-8")
        terminalreporter.section(f"slowest {SLOWEST} files ({self.file})")
        for name, seconds in list(files.items())[:SLOWEST]:
            terminalreporter.write_line(f"{seconds:8.1f} s  {name}")
        terminalreporter.write_line(f"peak: {peak['processes']} processes, {peak['memory_gb']} GB")
