"""What is installed: the wheel is complete, imports stay light, and every version is pinned."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paceline import __version__

ROOT = Path(__file__).parents[2]
HEAVY = {
    "altair",
    "jinja2",
    "numpy",
    "psutil",
    "pydantic",
    "pynvml",
    "ruamel",
    "scipy",
    "sqlalchemy",
    "torch",
    "vl_convert",
}
TESTED_EXTRAS = ("native", "stage", "mlperf", "export", "dev", "test", "bench")


def missing_files(package: Path, packed: Iterable[str]) -> set[str]:
    """Files of a package folder that are not among the packed names."""
    here = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return here - set(packed)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that no earlier build can lend them a file."""
    sources = tmp_path_factory.mktemp("sources")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "paceline", sources / "paceline", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    return sources


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    return build_wheel(sources, sources)


def build_wheel(what: Path, folder: Path) -> Path:
    """Build the wheel of a source folder or archive in `folder`, without a network."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(what)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_source_distribution_builds_the_same_wheel(
    sources: Path, wheel: Path, tmp_path: Path
) -> None:
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    built = subprocess.run([sys.executable, "-c", program], cwd=sources, capture_output=True)
    assert built.returncode == 0, built.stderr
    (archive,) = tmp_path.glob("paceline-*.tar.gz")

    from_archive = build_wheel(archive, tmp_path)

    assert set(ZipFile(from_archive).namelist()) == set(ZipFile(wheel).namelist())


def test_the_wheel_runs_in_a_clean_environment_without_torch(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "bin/python"), "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    # The dependencies are those of this environment; a module without content hides its torch.
    (site / "tested.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "torch.py").write_text("raise ModuleNotFoundError('torch is hidden')\n")

    def run(*words: str) -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "COLUMNS": "200"}
        command = [str(tmp_path / "bin" / words[0]), *words[1:]]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("python", "-c", "import paceline; print(paceline.__file__)").startswith(str(site))
    assert run("paceline", "--version").startswith(f"paceline {__version__}\n")
    assert "tokens/s/GPU" in run(
        "paceline", "estimate", "llama31-8b", "--gpu", "H100", "--gpus", "8"
    )


def test_the_metadata_is_complete(wheel: Path) -> None:
    archive = ZipFile(wheel)
    (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    fields = message_from_bytes(archive.read(path))

    assert fields["Summary"] and fields["License-Expression"] == "Apache-2.0"
    assert fields["Description-Content-Type"] == "text/markdown"
    assert {"Author", "Maintainer", "Keywords", "Project-URL"} <= set(fields.keys())
    assert "Typing :: Typed" in fields.get_all("Classifier", [])
    required = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert required and not [line for line in required if line.startswith("torch")]


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    packed = ZipFile(wheel).namelist()

    assert missing_files(ROOT / "paceline", packed) == set()
    assert [name for name in packed if name.endswith("/licenses/LICENSE")]


def test_the_wheel_holds_nothing_but_the_package(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in ZipFile(wheel).namelist()}

    assert {re.sub(r"-.*\.", ".", top) for top in tops} == {"paceline", "paceline.dist-info"}


@pytest.mark.parametrize(
    "pattern",
    [
        "files/recipes/*.yaml",
        "files/catalog/*.yaml",
        "files/references/*.yaml",
        "report/templates/*",
        "trainer/*/*.py",
    ],
)
def test_the_package_has_files_of_each_kind(pattern: str) -> None:
    assert list((ROOT / "paceline").glob(pattern))


def test_a_file_left_out_of_the_wheel_is_noticed(tmp_path: Path) -> None:
    for name in ("__init__.py", "files/recipes/a.yaml", "files/recipes/__pycache__/b.pyc"):
        path = tmp_path / "paceline" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    assert missing_files(tmp_path / "paceline", ["paceline/__init__.py"]) == {
        "paceline/files/recipes/a.yaml"
    }


def test_the_packed_command_finds_its_recipes(wheel: Path, tmp_path: Path) -> None:
    ZipFile(wheel).extractall(tmp_path)
    command = [sys.executable, "-m", "paceline", "recipes", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}

    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)

    assert done.returncode == 0, done.stderr
    names = {path.stem for path in (ROOT / "paceline/files/recipes").glob("*.yaml")}
    assert names and names <= set(re.findall(r'"([\w-]+)"', done.stdout))


def heavy_modules(code: str) -> set[str]:
    """The heavy libraries that are loaded after a fresh interpreter has run `code`."""
    report = "import json, sys; json.dump(sorted(sys.modules), sys.stderr)"
    program = f"try:\n    {code}\nexcept SystemExit:\n    pass\n{report}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return HEAVY & {name.partition(".")[0] for name in json.loads(done.stderr)}


def test_importing_the_package_loads_no_heavy_library() -> None:
    assert heavy_modules("import paceline") == set()


def run_here(*arguments: str) -> str:
    """Code that runs the command line with these arguments."""
    return (
        f"import sys; sys.argv = {['paceline', *arguments]}; "
        "import paceline.__main__ as m; m.main()"
    )


def test_help_loads_no_heavy_library() -> None:
    assert heavy_modules(run_here("--help")) == set()


def test_a_light_verb_loads_only_what_typer_itself_loads() -> None:
    assert heavy_modules(run_here("--version")) <= {"pydantic"}


def test_a_heavy_library_is_noticed() -> None:
    assert heavy_modules("import paceline.core.value") == {"pydantic"}


def pins(text: str) -> dict[str, str]:
    """Pinned versions by canonical name; raises AssertionError for any other line."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
            assert match, f"not a plain pin: {line}"
            found[canonicalize_name(match[1])] = match[2]
    return found


def unpinned(pinned: dict[str, str], wanted: Iterable[Requirement]) -> set[str]:
    """Requirements, with all that they pull in, which no pin satisfies."""
    open_ends, seen, found = list(wanted), set[str](), set[str]()
    while open_ends:
        wish = open_ends.pop()
        name = canonicalize_name(wish.name)
        if not wish.specifier.contains(pinned.get(name, ""), prereleases=True):
            found.add(str(wish))
        if str(wish) not in seen:
            seen.add(str(wish))
            open_ends += needs_of(name, wish.extras)
    return found


def needs_of(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    """What an installed package needs here; nothing for one that is not installed."""
    try:
        needed = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for wish in map(Requirement, needed):
        wanted = wish.marker is None or any(
            wish.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        # A build of torch for CUDA pins the libraries of its own that it brings along.
        if wanted and not re.match(r"nvidia-(?!ml-py)|cuda-|triton", wish.name):
            yield wish


def test_every_package_of_the_tested_set_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["optional-dependencies"][extra] for extra in TESTED_EXTRAS]
    wanted = [Requirement(line) for lines in [project["dependencies"], *groups] for line in lines]

    assert unpinned(pins((ROOT / "constraints.txt").read_text()), wanted) == set()


def test_a_missing_or_wrong_pin_is_noticed() -> None:
    pinned = pins((ROOT / "constraints.txt").read_text())
    wanted = [Requirement("rich>=13.9")]

    assert unpinned(pinned, wanted) == set()
    assert unpinned(pinned | {"rich": "13.0"}, wanted) == {"rich>=13.9"}
    without = {name: version for name, version in pinned.items() if name != "pygments"}
    assert {re.split(r"\W", wish)[0].lower() for wish in unpinned(without, wanted)} == {"pygments"}


@pytest.mark.parametrize("line", ["torch==2.13.0+cpu", "torch>=2", "-e .", "a @ file:///b"])
def test_only_plain_pins_are_accepted(line: str) -> None:
    with pytest.raises(AssertionError):
        pins(line)


def test_the_citation_and_the_changelog_have_the_current_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {__version__} (" in (ROOT / "CHANGELOG.md").read_text()
