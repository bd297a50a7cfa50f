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
    "files of this package, which come with it": (
        "engines/launch/programs.py",
        "estimate/fit/evidence.py",
        "files/references.py",
        "machines/kubernetes/run.py",
        "machines/ray/submission.py",
        "machines/ssh/remote.py",
        "profiles/tools.py",
        "profiles/torch_traces.py",
        "report/html.py",
        "schemas.py",
    ),
    "files of the system: /proc, /sys, /etc, the standard library": (
        "files/run_folder.py",
        "machines/probe/container.py",
        "machines/probe/gemm.py",
        "machines/probe/host.py",
        "machines/probe/inventory.py",
        "staging/conversions/stdlib_corpus.py",
    ),
    "starts a program whose output goes to a file or to the terminal": (
        "cli/reproduce.py",
        "cli/watch.py",
        "machines/local.py",
        "machines/probe/telemetry.py",
        "runs/command_pairs.py",
        "staging/conversions/tokenization.py",
    ),
    "reads messages of limited length from a process that it holds": (
        "machines/kubernetes/client.py",
        "machines/ray/run.py",
        "machines/ssh/session.py",
    ),
    "opens /dev/null": ("cli/terminal.py",),
    "limits bytes and time of a download itself, below the package that stages": (
        "files/hf_hub.py",
    ),
    "reads the first bytes of a regular file": ("logs/parser.py",),
    "reads what the command itself has just written into a folder of its own": (
        "files/yaml_file.py",
        "mlperf/run/tiny_data.py",
        "runs/bundles/verification.py",
        "runs/log_import.py",
        "staging/node_copies.py",
    ),
    "reads files of a stage folder in blocks, lines or records": (
        "staging/conversions/layouts.py",
        "staging/conversions/packed.py",
        "staging/conversions/webdataset.py",
        "staging/hub_cache.py",
        "staging/transfer.py",
        "staging/verification.py",
    ),
    "decodes JSON in a stream or in a line of a log, within limits of its own": (
        "core/telemetry.py",
        "core/text.py",
        "engines/log_reading/mllog.py",
        "engines/log_reading/mlperf_system.py",
        "engines/log_reading/native_lines.py",
        "profiles/kineto.py",
    ),
    "decodes JSON of its own making": ("engines/megatron_deepspeed.py",),
}
"""Modules that open files or decode JSON without the reader, by the reason."""
ENTIRELY = ("trainer/", "machines/node/")
"""Programs of their own, without the package's modules."""
READING = {"read_text", "read_bytes", "urlopen", "check_output", "getoutput", "raw_decode"}
MODULE_CALLS = {
    ("gzip", "open"),
    ("sqlite3", "connect"),
    ("subprocess", "run"),
    ("subprocess", "Popen"),
    ("os", "popen"),
    ("io", "open"),
    ("json", "load"),
    ("json", "loads"),
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
        is_read = not node.args or any(str(mode).startswith("r") for mode in modes)
        reads = function.attr == "open" and is_read
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
    assert opened(ast.parse("path.read_text(); path.open('rb'); open('a'); json.loads('')")) == {
        "path.read_text",
        "path.open",
        "open",
        "json.loads",
    }
    assert opened(ast.parse("file.open(encoding='utf-8')")) == {"file.open"}
    assert opened(ast.parse("path.open('wb'); read_text(path); path.write_text('')")) == set()
