"""What a wheel and the source distribution have."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOL = PROJECT["tool"]["setuptools"]
REPOSITORY = PROJECT["project"]["urls"]["Repository"]
# Folders with sources, and what commands leave in them or beside them.
FOLDERS = (".ci", ".github", "benchmarks", "convergence", "docs", "examples", "locks", "npu_trainer_kernels", "tests")
FILES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "mkdocs.yml",
    "pyproject.toml",
    "setup.py",
    "tox.ini",
)
MADE = ("__pycache__", "*.pyc", "*.egg-info", "runs")


def folders(of: str) -> set[str]:
    """Those of a folder that have Python files, as packages."""
    return {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / of).rglob("*.py")}


def test_every_folder_of_code_is_a_package_of_the_wheel():
    assert set(TOOL["packages"]) == folders("npu_trainer_kernels") | {"npu_trainer_kernels.benchmarks"}
    assert TOOL["package-dir"] == {"npu_trainer_kernels.benchmarks": "benchmarks"}
    assert folders("benchmarks") == {"benchmarks"}


def test_nothing_but_the_package_lands_in_site_packages():
    assert {name.partition(".")[0] for name in TOOL["packages"]} == {"npu_trainer_kernels"}


def test_every_file_of_data_is_in_the_wheel():
    package = ROOT / "npu_trainer_kernels"
    files = {file.relative_to(package) for file in package.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    data = {file.as_posix() for file in files if file.suffix != ".py"}
    packaged = {
        "/".join([*name.split(".")[1:], file]) for name, given in TOOL["package-data"].items() for file in given
    }
    assert data == packaged


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of the sources: building writes beside them."""
    copy = tmp_path_factory.mktemp("sources") / "copy"
    copy.mkdir()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns(*MADE))
    for file in (*FILES, "MANIFEST.in", ".gitignore"):
        shutil.copy(ROOT / file, copy / file)
    return copy


def built(sources: Path, what: str) -> Path:
    """A distribution of the sources."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{what}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(sources / what)], cwd=sources, capture_output=True, check=True)
    (archive,) = [file for file in (sources / what).iterdir() if file.name.endswith((".whl", ".tar.gz"))]
    return archive


@pytest.fixture(scope="module")
def sdist(sources) -> set[str]:
    """The files of a source distribution."""
    with tarfile.open(built(sources, "sdist")) as packed:
        return {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in packed.getnames()}


def test_the_wheel_has_the_code_with_its_data_and_nothing_else(sources):
    """What the source distribution has besides (results of benchmarks, pictures) would make it five times as large."""
    wheel = built(sources, "wheel")
    assert wheel.stat().st_size < 2_000_000  # its code is half of that
    with zipfile.ZipFile(wheel) as packed:
        found = {name for name in packed.namelist() if ".dist-info/" not in name}
    code = {file.relative_to(ROOT).as_posix() for file in (ROOT / "npu_trainer_kernels").rglob("*.py")}
    code |= {f"npu_trainer_kernels/{file.relative_to(ROOT).as_posix()}" for file in (ROOT / "benchmarks").glob("*.py")}
    data = {f"{name.replace('.', '/')}/{file}" for name, given in TOOL["package-data"].items() for file in given}
    assert found == code | data


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_source_distribution_has_every_file(sdist, folder):
    files = {file.relative_to(ROOT) for file in (ROOT / folder).rglob("*") if file.is_file()}
    made = re.compile(r"(^|/)(__pycache__|runs|[^/]*\.egg-info)(/|$)|\.pyc$|^convergence/results/")
    wanted = {file.as_posix() for file in files if not made.search(file.as_posix())}
    assert wanted
    assert wanted <= sdist


def test_the_source_distribution_has_the_pages_and_settings(sdist):
    assert {*FILES, "tests/closeness.py", "tests/conftest.py", "docs/index.md", "examples/_common.py"} <= sdist
    assert not [name for name in sdist if name.endswith(".pyc") or name.startswith((".venv", "convergence/results/"))]


# ---------------------------------------------------------------------------------------------------------------------
# The address of the repository
# ---------------------------------------------------------------------------------------------------------------------


def repository_hook():
    spec = importlib.util.spec_from_file_location("repository", ROOT / "docs" / "repository.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


def test_the_address_of_the_repository_is_in_one_line():
    assert (ROOT / "pyproject.toml").read_text().count(REPOSITORY) == 1
    assert set(PROJECT["project"]["urls"]) == {"Repository"}


def test_pages_and_site_have_no_other_address_of_the_repository():
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "mkdocs.yml",
        *(ROOT / ".github").rglob("*.yml"),
    ]
    for page in pages:
        found = re.findall(r"https?://[^\s)\"'>`]*npu[_-]trainer[_-]kernels", page.read_text(encoding="utf-8"))
        assert set(found) <= {REPOSITORY}, page
    assert not re.search(r"^repo_url", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert "hooks: [docs/repository.py]" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize(("line", "link"), [
    ("https://example.invalid/npu_trainer_kernels", None),
    ("https://somewhere.example/npu_trainer_kernels", "https://somewhere.example/npu_trainer_kernels"),
])  # fmt: skip
def test_the_site_links_to_the_address_once_there_is_one(tmp_path, monkeypatch, line, link):
    hook = repository_hook()
    (tmp_path / "pyproject.toml").write_text(f'[project.urls]\nRepository = "{line}"\n')
    monkeypatch.setattr(hook, "PROJECT", tmp_path / "pyproject.toml")
    assert hook.on_config(SimpleNamespace(repo_url="")).repo_url == link


def test_an_index_shows_the_readme_with_absolute_links(sources):
    text, address = (ROOT / "README.md").read_text(encoding="utf-8"), "https://somewhere.example/us"
    absolute = repository_hook().absolute
    shown = absolute(text, address)
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", text)) > 30
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    for kind, link in re.findall(rf"(!?)\[[^\]]*\]\({address}/((?:raw|blob)/main/[^)#]+)", shown):
        form, _, path = link.partition("/main/")
        assert (form, (ROOT / path).exists()) == ("raw" if kind else "blob", True), link
    assert absolute(text, None) == text
    # What is built has it by the address of that line.
    made = sources.parent / "addressed"
    shutil.copytree(sources, made, ignore=shutil.ignore_patterns("sdist", "wheel", "build", "results", "figures"))
    line = (made / "pyproject.toml").read_text().replace(REPOSITORY, address)
    (made / "pyproject.toml").write_text(line)
    with zipfile.ZipFile(built(made, "wheel")) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        meta = packed.read(name).decode()
    assert meta.partition("\n\n")[2].strip() == shown.strip()
    assert "Description-Content-Type: text/markdown" in meta


def test_the_hook_reads_this_project():
    assert repository_hook().PROJECT.resolve() == (ROOT / "pyproject.toml").resolve()
