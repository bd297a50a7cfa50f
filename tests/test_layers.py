"""The package keeps its layers: a module imports only from layers below its own."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "paceline"
LAYERS = (
    ("units", "errors"),
    ("core",),
    ("yaml_file", "catalog", "references", "recipe", "rundir", "events", "logfile"),
    ("estimate", "engines", "launchers", "stage", "probe", "profile", "mlperf", "native"),
    ("search", "report", "store"),
    (
        "audit",
        "host_lists",
        "host_keys",
        "host_readings",
        "placement",
        "preflight",
        "plan",
        "parts",
        "comparison",
        "logfacts",
        "logfigures",
        "parsing",
        "imported",
        "ending",
        "outcome",
        "gate",
        "flow",
        "importing",
        "repeats",
        "repeating",
        "history",
        "scaling",
        "mlperf_logs",
        "mlperf_energy",
        "mlperf_scoring",
        "mlperf_tiny",
        "mlperf_trials",
        "mlperf_run",
        "mlperf_checking",
        "mlperf_submissions",
        "mlperf_packaging",
        "mlperf_system",
        "mlperf_comparing",
        "campaign",
        "calibrated",
        "estimating",
        "tracing",
        "calibrating",
        "validating",
        "ramping",
        "sweeping",
        "explaining",
        "offering",
        "tuning",
        "schemas",
    ),
    ("cli",),
)
ORDERED = {2, 5}
"""Layers whose modules may import those named before them; in others, neighbours may not."""

PLACES = {name: (level, at) for level, names in enumerate(LAYERS) for at, name in enumerate(names)}
PLACES |= {"": (-1, 0), "__main__": (len(LAYERS), 0)}
TRAINER_LIBRARIES = {"torch", "torchao"}
VAGUE_NAMES = {"utils", "helpers", "common"}
MAX_LINES = 400


def faults(package: Path) -> list[str]:
    """Everything that is wrong with the structure of `package`, one sentence each."""
    files = {dotted(path, package): path for path in sorted(package.rglob("*.py"))}
    imports = {name: list(imports_of(name, path, files)) for name, path in files.items()}
    found = [fault for name, path in files.items() for fault in form_faults(name, path)]
    for name, targets in imports.items():
        for target, at_top in targets:
            found += [f"{name} imports {target}: {why}" for why in breaches(name, target, at_top)]
    graph = {
        name: {t for t, _ in targets} - {"paceline", name} for name, targets in imports.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"imports in a circle: {' <- '.join(error.args[1])}")
    return found


def breaches(name: str, target: str, at_top: bool) -> list[str]:
    """The rules that one import of the module `name` breaks."""
    here, there, library = folder(name), folder(target), target.partition(".")[0]
    own = library == "paceline"
    foreign = not own and library not in sys.stdlib_module_names
    cheap = there in ("", "cli", *LAYERS[0]) if own else library == "typer"
    rules = {
        "own modules are named in full": target.startswith("."),
        "it is not in a layer below": own and there != here and not is_below(there, here),
        "the trainer is a program of its own": own and (here == "native") != (there == "native"),
        "torch is for the trainer, and nothing else is": foreign
        and (library in TRAINER_LIBRARIES) != (here == "native"),
        "the standard library must do here": foreign and here in ("", *LAYERS[0]),
        "at the top it slows --help": here == "cli" and at_top and (own or foreign) and not cheap,
    }
    return [why for why, broken in rules.items() if broken]


def is_below(there: str, here: str) -> bool:
    """True when modules of `here` may import from `there`; False for a folder without a layer."""
    if there not in PLACES or here not in PLACES:
        return False
    (level, at), (own_level, own_at) = PLACES[there], PLACES[here]
    return level < own_level or (level == own_level and level in ORDERED and at < own_at)


def form_faults(name: str, path: Path) -> Iterator[str]:
    """What is wrong with a file's name, place and length."""
    last = name.rpartition(".")[2]
    num_lines = len(path.read_text().splitlines())
    if folder(name) not in PLACES:
        yield f"{name} belongs to no layer"
    if num_lines > MAX_LINES:
        yield f"{name} has {num_lines} lines, more than {MAX_LINES}"
    if VAGUE_NAMES & set(name.split(".")):
        yield f"{name} has a name that says nothing"
    # The trainer's folder stands first on its own path, so its files are found before Python's.
    if name == f"paceline.native.{last}" and last in sys.stdlib_module_names:
        yield f"{name} hides the standard module {last} from the trainer"


def imports_of(name: str, path: Path, files: dict[str, Path]) -> Iterator[tuple[str, bool]]:
    """Each import of a file, also inside functions: its target, and whether it runs at import."""
    for node, at_top in import_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            members = [f"{base}.{alias.name}" for alias in node.names]
            targets = [member if member in files else base for member in members]
        else:
            targets = [alias.name for alias in node.names]
        for target in targets:
            beside = f"paceline.native.{target}"
            yield beside if folder(name) == "native" and beside in files else target, at_top


def import_nodes(
    node: ast.AST, at_top: bool = True
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements, and whether they run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_top
        deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        )
        yield from import_nodes(child, at_top and not deferred)


def dotted(path: Path, package: Path) -> str:
    """The import name of a file: `paceline.core.flops`."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def folder(name: str) -> str:
    """The folder or top module of the package that a dotted name lies in."""
    return f"{name}..".split(".")[1]


def test_the_package_keeps_its_layers() -> None:
    assert faults(PACKAGE) == []


SOUND = {
    "__init__.py": "__version__ = '1'",
    "__main__.py": "from paceline.cli import main",
    "units.py": "import math",
    "core/__init__.py": "",
    "core/flops.py": "import numpy.typing\nfrom paceline.units import GIB",
    "core/shape.py": "from paceline.core import flops",
    "catalog.py": "from paceline import __version__\nfrom paceline.core import flops",
    "recipe.py": "from paceline.catalog import find",
    "engines/nemo.py": "def steps():\n    from paceline.recipe import Recipe",
    "native/train.py": "import json, torch\nfrom config import Config",
    "native/config.py": "import dataclasses",
    "flow.py": "from paceline.engines import nemo",
    "cli/__init__.py": "import typer\nfrom paceline.cli import run",
    "cli/run.py": "import typer\ndef run():\n    import rich\n    from paceline import flow",
}


def made_up(place: Path, files: dict[str, str]) -> Path:
    """A package `paceline` of these files under `place`."""
    for name, source in files.items():
        path = place / "paceline" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return place / "paceline"


def test_a_sound_package_has_no_faults(tmp_path: Path) -> None:
    assert faults(made_up(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("units.py", "from paceline.core import flops", "imports paceline.core.flops: it is not"),
        ("units.py", "def f():\n    from paceline import flow", "imports paceline.flow: it is not"),
        ("units.py", "import numpy", "paceline.units imports numpy: the standard library must"),
        ("catalog.py", "from paceline.recipe import Recipe", "imports paceline.recipe: it is not"),
        ("engines/a.py", "from paceline.launchers import b", "paceline.launchers: it is not in"),
        ("engines/a.py", "from ..launchers import b", "imports ..launchers: own modules"),
        ("report/text.py", "import paceline.store.index", "imports paceline.store.index: it is"),
        ("outcome.py", "from paceline import flow", "paceline.outcome imports paceline.flow: it"),
        ("new_thing.py", "", "paceline.new_thing belongs to no layer"),
        ("flow.py", "from paceline.native import train", "train: the trainer is a program of its"),
        ("flow.py", "def f():\n    import torch.nn", "imports torch.nn: torch is for the trainer"),
        ("native/train.py", "import numpy", "paceline.native.train imports numpy: torch is for"),
        ("native/train.py", "from paceline.core import flops", "flops: the trainer is a program"),
        ("native/profile.py", "", "paceline.native.profile hides the standard module profile"),
        ("cli/run.py", "import rich", "paceline.cli.run imports rich: at the top it slows"),
        ("cli/run.py", "from paceline import flow", "imports paceline.flow: at the top it slows"),
        ("cli/run.py", "try:\n    import yaml\nfinally:\n    pass", "imports yaml: at the top"),
        ("core/flops.py", "from paceline.core import shape", "imports in a circle: paceline.core"),
        ("native/config.py", "def f():\n    import train", "imports in a circle: paceline.native"),
        ("core/helpers.py", "", "paceline.core.helpers has a name that says nothing"),
        ("core/flops.py", "a = 1\n" * 401, "paceline.core.flops has 401 lines, more than 400"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, file: str, source: str, fault: str) -> None:
    found = faults(made_up(tmp_path, SOUND | {file: source}))

    assert any(fault in one for one in found), found
