"""Foreign input is opened in one place; every other module that opens a file says why it may."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline

PACKAGE = Path(paceline.__file__).parent
READERS = {
    "files/documents.py": "the bounded reader of files",
    "files/programs.py": "the bounded reader of programs",
    "files/temporary.py": "writes",
    "files/archive.py": "reads a regular file through tarfile, within limits",
}
EXEMPT = {
    "files of this package": (
        "engines/deepspeed_chat/launch.py",
        "engines/launch/environments.py",
        "engines/launch/programs.py",
        "estimate/fit/evidence.py",
        "files/references.py",
        "machines/ray/run.py",
        "machines/ssh/remote.py",
        "profiles/tools.py",
        "profiles/torch_traces.py",
        "report/html.py",
        "schemas.py",
    ),
    "files of the system: /proc, /sys, /etc": (
        "files/run_folder.py",
        "machines/probe/container.py",
        "machines/probe/gemm.py",
        "machines/probe/host.py",
        "machines/probe/inventory.py",
    ),
    "starts a program whose output goes to a file or to the terminal": (
        "cli/reproduce.py",
        "cli/watch.py",
        "machines/local.py",
        "machines/probe/telemetry.py",
    ),
    "reads messages of limited length from a socket": ("machines/ssh/session.py",),
    "opens /dev/null": ("cli/terminal.py",),
    "has a limit of bytes of its own": (
        "files/hf_hub.py",
        "files/yaml_file.py",
        "logs/parser.py",
    ),
    "reads what the command itself has just written": (
        "mlperf/check/compliance.py",
        "mlperf/run/trials.py",
        "runs/command_pairs.py",
        "runs/log_import.py",
        "staging/node_copies.py",
    ),
    "reads files of any size in blocks, or files of known size": (
        "files/recipe.py",
        "mlperf/run/tiny_data.py",
        "runs/bundles/verification.py",
        "runs/data_files.py",
        "runs/run_environment.py",
    ),
    "reads staged files, which were verified": (
        "staging/conversions/flux.py",
        "staging/conversions/layouts.py",
        "staging/conversions/packed.py",
        "staging/conversions/stdlib_corpus.py",
        "staging/conversions/tokenization.py",
        "staging/conversions/webdataset.py",
        "staging/hub_cache.py",
        "staging/stager.py",
        "staging/transfer.py",
        "staging/verification.py",
    ),
}
"""Modules that open files without the reader, by the reason."""
ENTIRELY = ("trainer/", "machines/node/")
"""Programs of their own, without the package's modules."""
READING = {"read_text", "read_bytes", "urlopen", "check_output", "getoutput"}
MODULE_CALLS = {
    ("gzip", "open"),
    ("sqlite3", "connect"),
    ("subprocess", "run"),
    ("subprocess", "Popen"),
    ("os", "popen"),
    ("io", "open"),
}


def opened(tree: ast.AST) -> set[str]:
    """Return the calls in a module that open a file or start a program by themselves."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id == "open":
            names.add("open")
        if not isinstance(function, ast.Attribute):
            continue
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
        modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
        reads = function.attr == "open" and any(str(mode).startswith("r") for mode in modes)
        if function.attr in READING or reads or (owner, function.attr) in MODULE_CALLS:
            names.add(f"{owner}.{function.attr}" if owner else function.attr)
    return names


def test_nothing_else_opens_foreign_input() -> None:
    modules = {
        path.relative_to(PACKAGE).as_posix(): opened(ast.parse(path.read_text()))
        for path in PACKAGE.rglob("*.py")
        if not path.name.endswith("_program.py")
    }
    found = {
        name: calls
        for name, calls in modules.items()
        if calls and name not in READERS and not name.startswith(ENTIRELY)
    }
    exempt = {name for names in EXEMPT.values() for name in names}
    assert {name: found[name] for name in found.keys() - exempt} == {}
    assert exempt - found.keys() == set(), "they use the reader now"


def test_what_opens_a_file_is_found() -> None:
    assert opened(ast.parse("path.read_text(); path.open('rb'); open('a')")) == {
        "path.read_text",
        "path.open",
        "open",
    }
    assert opened(ast.parse("path.open('wb'); read_text(path); path.write_text('')")) == set()
