"""Rules for the structure of the code. Each test checks all modules and lists those that break its rule."""

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from rapidformer_templates.engines.assembly import Building
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.plan import EngineOptions
from rapidformer_templates.planning.registry import REGISTRY

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/rapidformer_templates"
MODULES = sorted(SOURCE.rglob("*.py"))
NEUTRAL = ["run/loop.py", "trainer.py", "pretrainer.py", "finetuner.py"]
BACKENDS = ("deepspeed", "fairscale", "torch.distributed", "onnxruntime", "apex", "bitsandbytes")
# A switch whose name is also a common word in training loops.
EVERYDAY = {"optimizer"}


FLOORS = (
    {"errors"}, {"planning"}, {"system"}, {"models"}, {"data"}, {"engines"}, {"switches"}, {"run"}, {"trainer"},
    {"pretrainer", "finetuner"}, {"compat"}, {"commands"}, {"__init__", "__main__"},
)  # fmt: skip
"""Packages of the source, from the lowest up. A package imports only from below. Higher ones are named by strings."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_tree(path)))


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Return every import: at the top, in a function, or only for types."""
    return tuple(_each_import(_nodes(path)))


def _each_import(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            # If a package of ours is imported from the main package, this does not import the main package's own names.
            yield from named if node.module == SOURCE.name else (str(node.module), *named)


def _words(path: Path) -> Iterator[str]:
    """Yield identifiers and strings. Docstrings are left out: they may explain what the code must not name."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose = {id(node.body[0].value) for node in _nodes(path)
             if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    for node in _nodes(path):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def test_loop_and_templates_name_no_switch() -> None:
    switches = {switch.name for switch in REGISTRY.switches}
    fields = {field for switch in REGISTRY.switches for field in switch.fields}
    forbidden = (
        switches | fields | {spelling(field) for field in fields} | {s.replace("-", "_") for s in switches}
    ) - EVERYDAY
    assert {name: forbidden & set(_words(SOURCE / name)) for name in NEUTRAL} == {name: set() for name in NEUTRAL}


BELOW = ("planning", "system", "models", "data", "engines", "run")
NAMING = {
    "planning/optimizers.py": "which switches cut what an optimizer must have whole",
    "planning/request.py": "the precision, which every engine computes in; sizes of a model have names of flags",
    "planning/switch.py": "sizes of a model have names of flags",
    "planning/deepspeed_file": "a second place for flags: which key is which",
    "models/architectures.py": "sizes of a model have names of flags",
    "data/loader.py": "freeze is a function of the garbage collector, too",
    "data/shapes.py": "a limit has the name of its flag",
    "data/tasks/pretraining.py": "samples of dynamic shapes are documents, which is of the data",
    "run/out_of_memory.py": "the ladder is one of flags",
    "run/planned_model.py": "it runs an engine on the tensors of the planner",
    "run/configure.py": "the automatic strategy chooses flags before there is a plan",
}
"""Modules below the switches, and of a run, that name a switch, and why they cannot avoid it."""


@cache
def _names_of_switches() -> frozenset[str]:
    names = {switch.name for switch in REGISTRY.switches} - EVERYDAY
    fields = {field for switch in REGISTRY.switches for field in switch.fields} - EVERYDAY
    return frozenset(names | fields | {spelling(field) for field in fields})


@cache
def _named_in(path: Path) -> set[str]:
    """Return the switches and fields of flags whose full names occur in the module's code."""
    return _names_of_switches() & set(_words(path)) | {m for m in _imports(path) if _room_of(m) == "switches"}


def test_rooms_know_no_switch_by_name() -> None:
    assert {_room(path) for path in MODULES} > set(BELOW)
    modules = {str(path.relative_to(SOURCE)): path for path in MODULES if _room(path) in BELOW}
    others = {name: path for name, path in modules.items() if not name.startswith(tuple(NAMING))}
    assert {name: named for name, path in others.items() if (named := _named_in(path))} == {}


def test_loop_and_templates_import_no_backend() -> None:
    imported = [(name, module) for name in NEUTRAL for module in _imports(SOURCE / name)]
    assert [(name, module) for name, module in imported if module.startswith(BACKENDS)] == []


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def _room_of(module: str) -> str | None:
    """Return the package that a module or a name belongs to. None if it is not ours."""
    package, *parts = module.split(".")
    if package != SOURCE.name:
        return None
    return parts[0] if parts and parts[0] in FLOOR else "__init__"


def test_rooms_import_downwards() -> None:
    """Check every import: at the top, in a function, or only for types."""
    upwards = []
    for path in MODULES:
        here = _room(path)
        rooms = {room for module in _imports(path) if (room := _room_of(module)) and room != here}
        upwards += [(str(path), room) for room in sorted(rooms) if FLOOR[room] >= FLOOR[here]]
    assert upwards == []


OBJECTS = {
    named
    for switch in REGISTRY.switches
    for named in (switch.engine, switch.transform, switch.prepare, switch.order)
    if named
} | {facts.groups for facts in OPTIMIZERS.values() if facts.groups}


@pytest.mark.parametrize("named", sorted(OBJECTS))
def test_what_a_string_names_is_there(named: str) -> None:
    module, _, name = named.partition(":")
    assert (SOURCE.parent / f"{module.replace('.', '/')}.py").exists()
    assert callable(getattr(pytest.importorskip(module), name))


@pytest.mark.parametrize("kind", [Building, EngineOptions])
def test_options_have_types(kind: type) -> None:
    """Only the entries of a DeepSpeed file and the result of the user's hook may have any type."""
    untyped = [field.name for field in dataclasses.fields(kind) if "Any" in str(field.type)]
    assert [name for name in untyped if name not in ("deepspeed", "try_loss")] == []


SIDEWAYS = {
    ("fsdp", "layout"): "a stage of a pipeline shards its parameters",
    ("layout", "mixture_of_experts"): "it divides the experts",
    ("torch_compile", "layout"): "a graph must contain no divided parameter",
}
"""Switches that import from another one's file or folder, and why. The planner traces all of them."""


def test_a_switch_imports_another_one_only_for_a_reason() -> None:
    switches = f"{SOURCE.name}.switches."
    pairs = set()
    for path in (path for path in MODULES if _room(path) == "switches"):
        here = path.relative_to(SOURCE / "switches").with_suffix("").parts[0]
        others = {name.removeprefix(switches).split(".")[0] for name in _imports(path) if name.startswith(switches)}
        pairs |= {(here, other) for other in others - {here} if here != "auto_strategy"}
    assert pairs == SIDEWAYS.keys()
