"""Decisions about the house that the tests keep for us."""

import ast
import subprocess
from importlib import import_module, metadata
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("features", "training", "publish", "pipelines", "flows")
MODULES = sorted(path for package in PACKAGES for path in (REPO / package).rglob("*.py"))
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 80


def name_of(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


every_module = pytest.mark.parametrize("path", MODULES, ids=name_of)


def repository_files() -> list[str]:
    """Files of the repository: tracked ones and new ones that are not ignored."""
    if not (REPO / ".git").exists():
        pytest.skip("not a git checkout, so nothing says what belongs to the repository")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if (REPO / line).exists()]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_name_means_our_package(name: str) -> None:
    found = Path(str(import_module(name).__file__))
    assert found.is_relative_to(REPO), f"{name!r} was imported from {found}, not from {REPO}"


@pytest.mark.parametrize("name", PACKAGES)
def test_no_other_distribution_ships_a_package_of_our_name(name: str) -> None:
    # An editable install lists no packages, so ours may be absent here; nobody else's may be present.
    assert set(metadata.packages_distributions().get(name, [])) <= {"draftlake"}


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_are_typed(name: str) -> None:
    assert (REPO / name / "py.typed").is_file()


def test_the_top_level_is_the_five_packages_and_little_else() -> None:
    folders = {file.split("/")[0] for file in repository_files() if "/" in file}
    assert folders == {*PACKAGES, "tests", "docs", ".ci", "notebooks"}
    loose = {file for file in repository_files() if file.endswith(".py") and "/" not in file}
    assert loose == set()


def test_tests_hold_no_packages_that_could_shadow_ours() -> None:
    assert list((REPO / "tests").rglob("__init__.py")) == []


def test_no_file_in_flows_shares_a_package_name() -> None:
    # Prefect puts a flow file's folder first on sys.path.
    stems = {path.stem for path in (REPO / "flows").glob("*.py")}
    assert stems.isdisjoint(PACKAGES)


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert [name_of(path) for path in MODULES if path.stem in drawers] == []


@every_module
def test_a_module_fits_in_the_head(path: Path) -> None:
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_MODULE_LINES, f"{name_of(path)} has {num_lines} lines; split it by what it does"


@every_module
def test_a_module_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text))


@every_module
def test_functions_are_short(path: Path) -> None:
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {f.name: n for f in functions if (n := (f.end_lineno or 0) - f.lineno + 1) > MAX_FUNCTION_LINES}
    assert long == {}


@every_module
def test_nothing_is_unpickled(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name in ("pickle", "cloudpickle", "dill")]
            case ast.ImportFrom(module="pickle" | "cloudpickle" | "dill"):
                found.append(str(node.module))
            case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save"):
                found.append(f"torch.{node.attr}")
    # A benchmark reads its own files in the rivals' format, and without running code from them.
    if path.relative_to(REPO).as_posix() == "pipelines/bench/subjects.py":
        assert "weights_only=True" in path.read_text()
        found = [name for name in found if not name.startswith("torch.")]
    # Another trainer's format is written there and never read.
    if path.relative_to(REPO).as_posix() == "pipelines/export_formats/specforge.py":
        found = [name for name in found if name != "torch.save"]
    assert found == [], "tensors are kept as safetensors, which cannot run code"


@pytest.mark.parametrize("name", ["features/__init__.py", "features/collect/__init__.py"])
def test_entrances_of_the_collector_import_nothing(name: str) -> None:
    # A rollout engine that imports features.collect runs these files too.
    tree = ast.parse((REPO / name).read_text())
    assert [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)] == []


def test_committed_text_names_no_place_or_person_of_its_making() -> None:
    # Split, so that this file does not hold what it looks for.
    forbidden = ["/wo" + "rk/", "/ho" + "me/", "/ro" + "ot/", "sub" + "agent", "TO" + "DO", "FIX" + "ME"]
    suffixes = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ""}
    found = []
    for file in repository_files():
        path = REPO / file
        if path.suffix in suffixes and not {"assets", "format_v1"} & set(path.parts):
            text = path.read_text(encoding="utf-8")
            found += [f"{file}: {word}" for word in forbidden if word in text]
    assert found == []


@every_module
def test_code_is_written_with_ascii_punctuation(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [f"{number}: {line}" for number, line in enumerate(lines, 1) if not line.isascii()] == []


def test_every_package_of_the_wheel_is_named_in_the_build() -> None:
    import tomllib

    settings = tomllib.loads((REPO / "pyproject.toml").read_text())
    assert tuple(settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == PACKAGES
    assert tuple(settings["tool"]["importlinter"]["root_packages"]) == PACKAGES
