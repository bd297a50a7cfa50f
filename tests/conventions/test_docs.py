"""The documents speak of everything that exists, and what they show is true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paceline.cli.verbs import GROUPS, VERBS
from paceline.compare.comparability import COMPARED_SETTINGS, FIGURE_SETTINGS
from paceline.core.flops import CONVENTIONS
from paceline.core.hardware import FabricLevel, Site
from paceline.core.layout_checks import RULES
from paceline.core.metrics import METRICS
from paceline.files.field_docs import field_docs
from paceline.files.recipe import Recipe, override_keys, recipe_names
from paceline.reference import (
    GENERATED_BEGIN,
    GENERATED_END,
    PAGES,
    command_reference,
    layout_tables,
    with_generated,
)
from paceline.schemas import schema_texts
from tests.command import paceline
from tests.logs.example import megatron_log

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_every_verb_is_in_the_command_reference():
    text = command_reference()
    tables = {"": VERBS.values(), **{f"{group} ": [verbs] for group, verbs in GROUPS.items()}}
    names = [f"{group}{verb.name}" for group, all_ in tables.items() for t in all_ for verb in t]
    assert [name for name in names if f"\n## `paceline {name}`\n" not in text] == []


def test_every_option_is_in_the_command_reference():
    text = command_reference()
    verbs = [verb for table in (*VERBS.values(), *GROUPS.values()) for verb in table]
    commands = [verb.command() for verb in verbs if verb.source != "group"]
    names = {name for command in commands for param in command.params for name in param.opts}
    assert [name for name in names if name.startswith("--") and f"`{name}`" not in text] == []


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_explained(metric: str):
    assert f"`{metric}`" in read("reference/metrics.md")


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_convention_is_explained(convention: str):
    assert f"`{convention}`" in read("concepts/which-mfu.md")


def test_every_field_of_a_file_has_a_description():
    fields = [*field_docs(Recipe), *field_docs(Site), *field_docs(FabricLevel)]
    assert {doc.field for doc in field_docs(Recipe)} == set(override_keys())
    assert [doc.field for doc in fields if not doc.meaning] == []


def packages() -> list[str]:
    """The package's folders, as `cli/`, and the modules next to them."""
    tops = [*(ROOT / "paceline").glob("[a-z]*/"), *(ROOT / "paceline").glob("[a-z]*.py")]
    return sorted(f"{path.name}/" if path.is_dir() else path.name for path in tops)


@pytest.mark.parametrize("package", packages())
def test_every_package_is_in_the_architecture(package: str):
    assert f"\n| `{package}` |" in read("dev/architecture.md")


def test_the_schemas_in_the_docs_are_todays():
    texts = schema_texts()
    assert {name: (ROOT / "docs" / "schemas" / name).read_text() for name in texts} == texts


@pytest.mark.parametrize("name", PAGES)
def test_the_generated_part_of_a_page_is_current(name: str):
    page, text = read(name), PAGES[name]()
    assert text in page and with_generated(page, text) == page


def test_all_refused_layouts_are_in_their_table():
    text = layout_tables()
    assert all("`" + "` with `".join(sorted(rule.features)) + "`" in text for rule in RULES)
    assert all(rule.reason.rpartition(": ")[2] in text for rule in RULES)


def test_only_the_generated_part_of_a_page_is_replaced():
    page = f"# Layouts\n{GENERATED_BEGIN}\nold\n{GENERATED_END}\nafter\n"
    current = with_generated(page, "new\n")
    assert current == f"# Layouts\n{GENERATED_BEGIN}\nnew\n{GENERATED_END}\nafter\n"
    assert with_generated("no marks", "new") == "no marks"


def documents() -> list[Path]:
    roots = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
    return [*(ROOT / name for name in roots), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path):
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_every_page_that_the_code_names_exists():
    places = [
        path for top in ("paceline", "benchmarks", "tests") for path in (ROOT / top).rglob("*.py")
    ]
    named = {
        (str(path.relative_to(ROOT)), page)
        for path in places
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text("utf-8"))
    }
    assert [entry for entry in sorted(named) if not (ROOT / entry[1]).exists()] == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "dev" / "decisions").glob("0*.md")), ids=lambda p: p.name
)
def test_a_decision_is_short(path: Path):
    assert len(path.read_text().splitlines()) <= 40


def shell_lines(text: str) -> list[str]:
    """The commands of a document's `sh` blocks and tables."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)
    whole = [block.replace("\\\n", " ") for block in blocks]
    lines = [line.split("#")[0].strip() for block in whole for line in block.splitlines()]
    return [
        *[line for line in lines if line.startswith("paceline ")],
        *re.findall(r"\| `(paceline run [^`]+|paceline mlperf [^`]+)` \|", text),
    ]


PLANNED = {
    "deepspeed_chat": " · deepspeed_chat · 512 x H100-SXM",
    "megatron_deepspeed": "gpt-1b3 · megatron_deepspeed · 8 x V100-SXM2-32GB",
    "mlperf": "exec sbatch --parsable --no-requeue",
    "nemo": "megatron_gpt_pretraining.py",
}
LLMB = "llmb-run submit -w pretrain_llama3.1"
"""What the plan of each published benchmark shows, by its engine."""
GUIDES = [
    line
    for path in sorted((ROOT / "docs" / "how-to").glob("reproduce-*.md"))
    for line in shell_lines(path.read_text())
    if "--engine " in line and "--cluster " in line
]
MINUTES_OR_RESULTS = [["mlperf", verb] for verb in ("run", "score", "check")]


@pytest.mark.parametrize("line", [*shell_lines(README), *GUIDES])
def test_every_command_of_the_readme_and_the_benchmark_guides_is_understood(
    line: str, tmp_path: Path
):
    """Commands are run as a dry run where they would train; all must be valid and known."""
    (tmp_path / "train.log").write_text(megatron_log([5.7] * 20))
    (tmp_path / "logs").mkdir()
    for suffix in (".bin", ".idx"):
        (tmp_path / "pile_text_document").with_suffix(suffix).touch()
    (tmp_path / "hosts.txt").write_text("node[001-064] slots=8\n")
    arguments = shlex.split(line.replace("/data/pile_text", "pile_text"))[1:]
    engine = arguments[arguments.index("--engine") + 1] if "--engine" in arguments else None
    if engine == "mlperf":
        arguments = ["mlperf", "run", "--dry-run", *with_config(arguments[2:], tmp_path)]
    elif arguments[0] in ("run", "scale", "sweep", "tune"):
        arguments[1:1] = ["--dry-run"]
    elif (
        arguments[0] in ("ab", "check", "probe")
        or "--local" in arguments
        or "compare" in arguments
        or arguments[:2] in MINUTES_OR_RESULTS
    ):
        arguments += ["--help"]  # there are no hosts and no results here, and no minutes
    if "--trace-memory" in arguments:
        arguments.remove("--trace-memory")  # its own tests follow smaller models
    done = paceline(*arguments, cwd=tmp_path)
    too_large = done.returncode == 1 and "cannot fit" in done.stderr
    no_runs_yet = done.returncode == 1 and "paceline run tiny-llama" in done.stderr
    assert done.returncode == 0 or too_large or no_runs_yet, done.stderr
    if engine in PLANNED:
        shown = LLMB if "form=llmb" in line else PLANNED[engine]
        assert done.returncode == 0 and shown in done.stdout + done.stderr


def test_each_published_benchmark_has_a_command_with_its_engine():
    assert all(any(f"--engine {name} " in f"{line} " for line in GUIDES) for name in PLANNED)


def with_config(arguments: list[str], folder: Path) -> list[str]:
    """The arguments of `mlperf run`, with the submission's folder in `folder`."""
    submission = ROOT / "tests" / "engines" / "mlperf_container"
    (folder / "8b").mkdir()
    (folder / "8b" / "config_common.sh").symlink_to(submission / "config_common.sh")
    text = (submission / "config_BED_2x2x8xtp1pp1cp1_8b.sh").read_text()
    of_the_site = {"DGXNNODES": 18, "DGXNGPU": 4, "MINIBS": 1, "CONTEXT_PARALLEL": 2}
    exports = "".join(f"export {name}={value}\n" for name, value in of_the_site.items())
    words = [word.replace("/lustre/8b", str(folder / "8b")) for word in arguments]
    (config,) = [word.partition("config=")[2] for word in words if "config=" in word]
    Path(config).write_text(text + exports)
    return words


def test_the_first_screen_names_both_set_up_commands():
    first_screen = "\n".join(README.splitlines()[:40])
    assert "make quickstart" in first_screen and "make test" in first_screen


def test_the_reference_lists_all_settings_that_a_comparison_can_allow():
    text = read("reference/exit-codes.md")
    assert [
        key for key in [*COMPARED_SETTINGS, *FIGURE_SETTINGS] if f"| `{key}` |" not in text
    ] == []


def test_every_recipe_is_in_the_docs():
    page = read("reference/workloads.md")
    assert [name for name in recipe_names() if f"`{name}`" not in page] == []


def test_the_readme_stays_short():
    assert len(README.split()) <= 900


MAX_WORDS = 32_000
"""Words of all pages for users together, generated ones included."""


def words(path: Path) -> int:
    """Words of a page as its reader counts them: no table borders, no recorded output."""
    text = re.sub(r"<!--.*?-->", "", path.read_text("utf-8"), flags=re.DOTALL)
    blocks = re.compile(r"^```console\n.*?^```$", re.DOTALL | re.MULTILINE)
    commands = re.findall(r"^\$ .*", "\n".join(blocks.findall(text)), re.MULTILINE)
    return len(re.findall(r"\S*[^\W_]\S*", "\n".join([blocks.sub("", text), *commands])))


def test_the_pages_for_users_stay_short():
    docs = ROOT / "docs"
    pages = [path for path in docs.rglob("*.md") if path.parts[len(docs.parts)] != "dev"]
    assert sum(map(words, pages)) <= MAX_WORDS


def test_the_project_url_is_that_of_pyproject():
    (repository,) = re.findall(
        r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M
    )
    texts = [path.read_text() for path in [*documents(), ROOT / "CITATION.cff"]]
    urls = {url for text in texts for url in re.findall(r"https://example\.org/[\w/-]+", text)}
    assert all(url.startswith(repository) for url in urls)


def test_every_file_in_the_architecture_exists():
    text = read("dev/architecture.md")
    files = re.findall(r"`(\w+/[\w/]+\.py)`", text)
    folders = {package.strip("/") for package in packages()}
    modules = re.findall(r"`((?:[a-z]\w+\.)+[a-z]\w+)`", text)
    files += [
        name.replace(".", "/")
        for name in modules
        if name.split(".")[0] in folders and ".json" not in name
    ]
    assert len(files) > 40
    assert [name for name in files if "NAME" not in name and not _exists(name)] == []


def _exists(name: str) -> bool:
    """Whether a file, folder, module or name inside a module exists."""
    places = [root / name for root in (ROOT, ROOT / "paceline", ROOT / "docs")]
    holder = (ROOT / "paceline" / name).parent.with_suffix(".py")
    inside = holder.is_file() and Path(name).name in holder.read_text()
    return inside or any(p.exists() or p.with_suffix(".py").exists() for p in places)
