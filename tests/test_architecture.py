"""Rules for the structure of the code. Each test checks all modules and lists those that break its rule."""

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

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


def test_module_is_short_and_documented() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in MODULES}
    assert [str(path) for path, text in texts.items() if len(text.splitlines()) >= 600] == []
    written = [path for path, text in texts.items() if text.strip()]
    assert [str(path) for path in written if not ast.get_docstring(_tree(path))] == []
    interfaces = [path for path in MODULES if path.parent.name != "bench"]
    assert [(str(path), name) for path in interfaces for name in _undocumented(_tree(path))] == []


def _undocumented(tree: ast.Module) -> list[str]:
    """Return the public classes and functions of a module that are long and have no docstring."""
    public = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name[0] != "_"]
    return [node.name for node in public if not ast.get_docstring(node) and _lines(node) > 8]


def _lines(node: ast.ClassDef | ast.FunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


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


ATTRIBUTES_OF_OTHERS = {
    "transformers": "chat_template config loss_type name_or_path pad_token _is_hf_initialized nf use_cache",
    "configurations": "architectures auto_mapping base_model_name_or_path inference_mode num_hidden_layers "
    "output_router_logits quantization_config revision target_modules target_parameters task_type fan_in_fan_out "
    "tie_word_embeddings",
    "peft": "base_layer peft_config _disable_adapters",
    "tokenizers": "normalizer pre_tokenizer",
    "argparse": "choices help usage",
    "torch": "compiling found_inf global_var grad_scale meta optimize_ddp padding_idx post_backward recompile_limit "
    "skip_fwd_side_effects_in_bwd_under_checkpoint _boxed_call",
    "torch.autograd.Function": "then zeros",
    "onnxruntime": "graph_optimization_level inter_op_num_threads intra_op_num_threads optimized_model_filepath",
    "deepspeed": "all_gather cur_hysteresis cur_scale is_fp16_supported last_overflow_iter process_gradients "
    "raise_error_at_min_scale reduce_ready_partitions_and_remove_grads _optimizer_step",
    "trackers": "experiment_name main_process_only run_id",
    "sys": "excepthook",
    "functions": "is_hook _rapidformer_replacement",
}
"""Attributes that modules set on objects of other libraries, which read them, and on functions."""


def _declared_in_classes(path: Path) -> Iterator[str]:
    """Yield the attributes and methods of a module's classes."""
    for kind in (node for node in _nodes(path) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.FunctionDef):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                yield node.attr


def _is_self(node: ast.expr) -> bool:
    """Whether a name is the object of a class, or the context of an autograd function, which its backward reads."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "ctx")


def test_no_fact_is_pinned_on_an_object() -> None:
    """A fact about a model is an object of a class, which ``Assembly.record`` keeps."""
    declared = {name for path in MODULES for name in _declared_in_classes(path)}
    declared |= {*dir(nn.Module()), *dir(nn.Parameter(torch.zeros(1)))}
    theirs = set(" ".join(ATTRIBUTES_OF_OTHERS.values()).split())
    assigned = {
        (str(path.relative_to(SOURCE)), node.attr)
        for path in MODULES
        for node in _nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not _is_self(node.value)
    }
    assert {use for use in assigned if use[1] not in declared | theirs} == set()


@pytest.mark.parametrize("kind", [Building, EngineOptions])
def test_options_have_types(kind: type) -> None:
    """Only the entries of a DeepSpeed file and the result of the user's hook may have any type."""
    untyped = [field.name for field in dataclasses.fields(kind) if "Any" in str(field.type)]
    assert [name for name in untyped if name not in ("deepspeed", "try_loss")] == []


SIDEWAYS = {
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
