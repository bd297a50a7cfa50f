"""Reference pages of the docs, generated from the declarations in the code.

`python -m paceline.schemas docs/schemas` writes them between two marks in each page.
"""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperArgument

from paceline.cli.verbs import GROUPS, VERBS, Verb
from paceline.compare.comparability import COMPARED_SETTINGS, FIGURE_SETTINGS
from paceline.core.assets import Asset
from paceline.core.hardware import Dtype, FabricLevel, Site
from paceline.core.layout_checks import NATIVE_SIZE_RULES, RULES, SIZE_RULES
from paceline.core.metrics import METRICS
from paceline.core.units import GIB
from paceline.engines import engine_names, engine_requirements, log_formats
from paceline.files import catalog
from paceline.files.field_docs import FieldDoc, field_docs
from paceline.files.recipe import Recipe

GENERATED_BEGIN = "<!-- generated: python -m paceline.schemas docs/schemas -->"
GENERATED_END = "<!-- end -->"


def with_generated(page: str, text: str) -> str:
    """Return `page` with `text` between its two marks."""
    before, _, following = page.partition(GENERATED_BEGIN)
    _, end, after = following.partition(GENERATED_END)
    return f"{before}{GENERATED_BEGIN}\n{text}{end}{after}" if end else page


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    """Return `text` without `|`, which MkDocs and GitHub escape in different ways inside code."""
    code = re.sub(r"`([^`]*\|[^`]*)`", lambda span: f"<code>{html.escape(span[1])}</code>", text)
    return code.replace("|", "&#124;")


MIN_SHARED = 2
"""Number of verbs from which an option or argument is described once for all of them."""
NEARLY_EVERYWHERE = ("`--format`", "`--json`", "`--runs-dir`")
"""Shared options that the page explains at its top and no command lists."""
ARGUMENTS = "Arguments"
"""Heading of the arguments that several commands share."""
MAX_EXAMPLES = 3
"""Number of examples of a command; `--help` has all of them."""
Row = tuple[str, str, str]
"""Names with placeholder, meaning and default of an option or argument."""


def command_reference() -> str:
    """Return every verb with its help, examples and options; shared options come first."""
    tables = [*VERBS.values(), *GROUPS.values()]
    commands = [verb.command() for table_ in tables for verb in table_ if verb.source != "group"]
    shared = _shared_rows(commands)
    parts: list[str] = []
    for heading, verbs in VERBS.items():
        links = [f"[`{verb.name}`](#paceline-{verb.name})" for verb in verbs]
        parts.append(f"- **{heading}**: {', '.join(links)}.")
    intro = "They mean the same in every command that has them."
    parts += ["\n## Shared options\n", f"{intro}\n"]
    for panel in dict.fromkeys(shared.values()):
        rows = [row for row, its_panel in shared.items() if its_panel == panel]
        rows = [row for row in rows if not any(_has_more_choices(other, row) for other in rows)]
        parts += [f"### {panel}\n", _row_list(rows)]
    for verb in (verb for verbs in VERBS.values() for verb in verbs):
        if verb.source == "group":
            parts += [f"## `paceline {verb.name}`\n", f"{verb.line}\n"]
        else:
            parts += _verb(verb, f"paceline {verb.name}", shared)
        for member in GROUPS.get(verb.name, ()):
            parts += _verb(member, f"paceline {verb.name} {member.name}", shared)
    return "\n".join(parts)


def _shared_rows(commands: Sequence[Any]) -> dict[Row, str]:
    """Return what several commands have in the same words, with its panel."""
    panels: dict[Row, list[str]] = {}
    for param in (param for command in commands for param in command.params):
        panel = ARGUMENTS if isinstance(param, TyperArgument) else param.rich_help_panel or ""
        panels.setdefault(_row(param), []).append(panel)
    shared = {row: each for row, each in panels.items() if len(each) >= MIN_SHARED}
    panel_by_row = {row: next(filter(None, each), "General") for row, each in shared.items()}
    return {
        row: panel_by_row[row] for row in sorted(panel_by_row, key=lambda row: panel_by_row[row])
    }


def _has_more_choices(row: Row, other: Row) -> bool:
    return row[1:] == other[1:] and row[0].startswith(f"{other[0]}, ")


def _row_list(rows: Sequence[Row]) -> str:
    """Return options or arguments as a Markdown list: names, meaning and default."""
    ends = {"": "", "required": " Required."}
    lines = [
        f"- {names}: {meaning}{ends.get(default, f' Default {default}.')}"
        for names, meaning, default in rows
    ]
    return "\n".join(lines) + "\n"


def _row(param: Any) -> Row:
    meaning = " ".join((param.help or "").split())
    if isinstance(param, TyperArgument):
        return f"`{_metavar(param)}`", meaning, ""
    return _option_names(param), meaning, _option_default(param)


def _verb(verb: Verb, name: str, shared: Mapping[Row, str]) -> Iterator[str]:
    """Yield heading, help, examples, arguments and options of one verb."""
    command = verb.command()
    arguments = [param for param in command.params if isinstance(param, TyperArgument)]
    yield f"## `{name}`\n"
    if arguments:
        yield f"Arguments: `{' '.join(map(_argument_usage, arguments))}`\n"
    yield _help(command.help or verb.line)
    rows = [_row(param) for param in command.params]
    if own_rows := [row for row in rows if row[1] and row not in shared]:
        yield _row_list(own_rows)
    if references := _references(rows, shared):
        yield f"Shared options: {references}.\n"


def _references(rows: Sequence[Row], shared: Mapping[Row, str]) -> str:
    """Return the shared options among `rows`, with a link to their panel if many or ambiguous."""
    single: list[str] = []
    of_panels: list[str] = []
    for panel in dict.fromkeys(shared.values()):
        members = [_first_name(row) for row, its_panel in shared.items() if its_panel == panel]
        others = {_first_name(row) for row, its_panel in shared.items() if its_panel != panel}
        names = [_first_name(row) for row in rows if shared.get(row) == panel]
        names = [name for name in names if name not in NEARLY_EVERYWHERE]
        absent = sorted({*members} - {*names, *NEARLY_EVERYWHERE})
        link = f"[{panel}](#{panel.lower().replace(' ', '-')})"
        if not names or panel == ARGUMENTS:
            continue
        if not absent:
            of_panels.append(f"all of {link}")
        elif len(absent) < len(names):
            of_panels.append(f"{link} except {', '.join(absent)}")
        elif others.isdisjoint(names):
            single += names
        else:
            of_panels.append(f"{', '.join(names)} of {link}")
    return "; ".join([*([", ".join(single)] if single else []), *of_panels])


def _first_name(row: Row) -> str:
    return row[0].split("`")[1].join("``")


def _help(text: str) -> str:
    """Return the first paragraph of a help text as Markdown, and its first examples."""
    prose: list[str] = []
    examples: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = paragraph.splitlines()
        if paragraph.strip() == "Examples:":
            continue
        if all(line.startswith("  ") for line in lines):
            example = " ".join(line.strip() for line in lines) if _continues(lines) else None
            examples += [example] if example else [line.strip() for line in lines]
        else:
            prose.append(" ".join(line.strip() for line in lines) + "\n")
    commands = [re.sub(r"\s{2,}(?=\S)", "  # ", line, count=1) for line in examples[:MAX_EXAMPLES]]
    block = ["```bash\n" + "\n".join(commands) + "\n```\n"] if examples else []
    return "\n".join([*prose[:1], *block])


def _continues(lines: Sequence[str]) -> bool:
    """Return True if only the first line of an example starts a command."""
    return not any(line.strip().startswith("paceline ") for line in lines[1:])


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name or "").upper()


def _argument_usage(argument: Any) -> str:
    name = _metavar(argument).removesuffix("...").strip(" []") + (
        "..." if argument.nargs == -1 else ""
    )
    return name if argument.required else f"[{name}]"


def _option_names(option: Any) -> str:
    """Return the names of an option with the placeholder of its value."""
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    if option.is_flag:
        return names
    kind = option.type_descriptor.annotation
    if get_origin(kind) in (list, tuple):
        kind = get_args(kind)[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        value = ", ".join(f"`{member.value}`" for member in kind)
    elif get_origin(kind) is Literal:
        value = ", ".join(f"`{choice}`" for choice in get_args(kind))
    else:
        value = f"`{option.metavar}`"
    return f"{names} {value}"


def _option_default(option: Any) -> str:
    value = option.default
    if option.required:
        return "required"
    if value in (None, False, (), []):
        return ""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, list | tuple):
        value = ",".join(str(item) for item in value)
    return f"`{value}`"


def field_table(docs: Sequence[FieldDoc]) -> str:
    """Return fields with value and meaning as Markdown."""
    rows = [(f"`{doc.field}`", _value(doc), doc.meaning) for doc in docs]
    return table(("field", "value", "meaning"), rows)


def _value(doc: FieldDoc) -> str:
    """Return the default of a field with its choices, or its type if it has no default."""
    if doc.default == "unset":
        return f"unset, {doc.type}" if "`" in doc.type else doc.type
    if doc.default == "required":
        return f"{doc.type}, required"
    default = f"`{doc.default}`"
    others = [choice for choice in doc.type.split(", ") if choice != default]
    return ", ".join([default, *others]) if "`" in doc.type else default


RECIPE_SECTIONS: Mapping[str, str] = {
    "": "General",
    "training": "Training",
    "data": "Data",
    "layout": "Layout",
    "model": "Model",
    "lora": "LoRA",
    "checkpoint": "Checkpoints",
    "mlperf": "MLPerf log",
}
"""Headings of the groups of recipe fields."""


def recipe_field_tables() -> str:
    """Return every field that `--set` takes, one table for each group."""
    docs = field_docs(Recipe)
    parts: list[str] = []
    for group, heading in RECIPE_SECTIONS.items():
        members = [doc for doc in docs if doc.field.rpartition(".")[0].split(".")[0] == group]
        parts += [f"### {heading}\n", field_table(members)]
    parts += ["### Entries of `assets`\n", field_table(field_docs(Asset))]
    return "\n".join(parts)


def cluster_field_tables() -> str:
    """Return every field of a cluster file."""
    docs = field_docs(Site)
    groups = {
        "": "General",
        "slurm": "Slurm",
        "ssh": "SSH",
        "ray": "Ray",
        "kubernetes": "Kubernetes",
    }
    parts: list[str] = []
    for group, heading in groups.items():
        members = [doc for doc in docs if doc.field.rpartition(".")[0] == group]
        parts += [f"### {heading}\n", field_table(members)]
    parts += ["### Levels of `fabric`\n", field_table(field_docs(FabricLevel))]
    return "\n".join(parts)


def device_tables() -> str:
    """Return the devices and links of the catalog."""
    dtypes: tuple[Dtype, ...] = ("fp16", "bf16", "fp8", "mxfp4", "nvfp4")
    peaks = [
        (
            f"`{device.name}`",
            *(_scaled(device.peak_flops_per_s(dtype), 1e12) for dtype in dtypes),
            _scaled(device.memory_bytes, GIB),
            _scaled(device.memory_bytes_per_s, 1e12),
        )
        for device in catalog.devices()
    ]
    links = {
        kind: table(
            ("link", "GB/s"),
            [
                (f"`{link.name}`", _scaled(link.bytes_per_s, 1e9))
                for link in catalog.links()
                if link.kind == kind
            ],
        )
        for kind in ("intra", "inter")
    }
    return "\n".join(
        [
            "### Devices\n",
            table(("device", *dtypes, "GiB", "TB/s"), peaks),
            "### Links inside a node\n",
            links["intra"],
            "### Links between nodes\n",
            links["inter"],
        ]
    )


def _scaled(value: float | None, unit: float) -> str:
    if value is None:
        return ""
    scaled = value / unit
    return f"{scaled:,.0f}" if scaled >= 1000 else f"{scaled:.4g}"


def metric_table() -> str:
    """Return the metrics that are computed from steps."""
    rows = [(f"`{name}`", kind.title, kind.describes) for name, kind in METRICS.items()]
    return table(("name", "title", "meaning"), rows)


def layout_tables() -> str:
    """Return the refused combinations with their remedies, and the conditions on sizes."""
    rules = [
        (
            " with ".join(f"`{name}`" for name in sorted(rule.features)),
            _engines(rule.native),
            rule.reason.rpartition(": ")[2],
        )
        for rule in RULES
    ]
    conditions = [
        ((condition.__doc__ or "").splitlines()[0].rstrip("."), _engines(native))
        for native, group in ((False, SIZE_RULES), (True, NATIVE_SIZE_RULES))
        for condition in group
    ]
    combinations = table(("refused combination", "engine", "remedy"), rules)
    return "\n".join([combinations, table(("condition on sizes", "engine"), conditions)])


def _engines(native: bool) -> str:
    return "native" if native else "all"


def log_format_table() -> str:
    """Return the log formats that `parse` recognizes, by the FLOPs convention that they print."""
    programs: dict[str, list[str]] = {}
    for name, kind in sorted(log_formats().items()):
        convention = f"`{kind.convention}`" if kind.convention else "none"
        programs.setdefault(convention, []).append(f"`{name}`")
    rows = [(convention, ", ".join(names)) for convention, names in sorted(programs.items())]
    return table(("FLOPs convention", "`--engine`"), rows)


ENGINE_PAGES = {"native": "`native`", "megatron_deepspeed": "[`megatron_deepspeed`](megatron.md)"}
"""Cells of engines that have no page of their own."""


def engine_table() -> str:
    """Return the versions of programs that the engines have started for real."""
    rows = [
        (
            "" if index else ENGINE_PAGES.get(name, f"[`{name}`]({name}.md)"),
            each.program,
            each.cpu,
            each.gpu,
        )
        for name in engine_names()
        for index, each in enumerate(engine_requirements(name).tested_programs)
    ]
    return table(("engine", "version", "started on CPUs", "on GPUs"), rows)


def comparison_key_table() -> str:
    """Return the settings that must be equal in a comparison."""
    return table(
        ("key", "meaning"),
        [(f"`{key}`", text) for key, text in {**COMPARED_SETTINGS, **FIGURE_SETTINGS}.items()],
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/cli.md": command_reference,
    "reference/exit-codes.md": comparison_key_table,
    "reference/recipe-fields.md": recipe_field_tables,
    "reference/cluster-file.md": cluster_field_tables,
    "reference/devices.md": device_tables,
    "reference/metrics.md": metric_table,
    "dev/layout-rules.md": layout_tables,
    "reference/log-formats.md": log_format_table,
    "reference/engines/index.md": engine_table,
}
"""Pages of the docs by path, and the function that generates their marked part."""
