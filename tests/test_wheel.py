"""The wheel: what is in it, and that what it declares is enough to plan, and with [train] to train.

It is installed into environments that hold nothing but the distributions it asks for: links to those of this
environment, found by following what each of them declares. So nothing is downloaded, `tightfit` can only come from the
wheel, and a dependency that is used but not declared is missed.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import tightfit
from tests.train.jobs import tiny_job

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
LIMIT_S = 300
"""For one program, on a machine that does much else."""
pytestmark = pytest.mark.skipif(find_spec("pip") is None, reason="no pip in this environment to build a wheel with")


def run(command: list[str], folder: Path) -> str:
    """What the command writes to stdout, if all goes well; paths and settings of this process do not reach it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    made = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=LIMIT_S)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as setuptools leaves its own files beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("tightfit", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(source / "dist")]
    run([*PIP, "wheel", *options, "."], source)
    (found,) = (source / "dist").glob("*.whl")
    return found


def needed(name: str, extras: frozenset[str], seen: set[tuple[str, str]]) -> Iterator[Distribution]:
    """The distribution and all it declares, here and now, for these extras."""
    found = distribution(name)
    yield found
    for extra in ("", *extras):
        if (found.name, extra) in seen:
            continue
        seen.add((found.name, extra))
        for requirement in map(Requirement, found.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield from needed(requirement.name, frozenset(requirement.extras), seen)


def link_into(packages: Path, declared: Iterator[Distribution]) -> None:
    """Every folder and file that these distributions have in their site-packages."""
    for found in declared:
        assert found.files is not None, f"{found.name} does not say what belongs to it"
        for name in {path.parts[0] for path in found.files} - {"..", "__pycache__"}:
            target = packages / name
            if not target.exists():
                target.symlink_to(Path(str(found.locate_file(name))).resolve())


@dataclass(frozen=True)
class Environment:
    """One that has `tightfit` and what it declares, for some extras."""

    folder: Path

    @classmethod
    def made(cls, folder: Path, wheel: Path, *extras: str) -> "Environment":
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
        run(
            [*PIP, "--python", str(folder / "bin/python"), "install", "--quiet", "--no-deps", "--no-index", str(wheel)],
            folder.parent,
        )
        environment = cls(folder)
        metadata = HeaderParser().parsestr(zipfile.ZipFile(wheel).read(f"{stem(wheel)}.dist-info/METADATA").decode())
        seen: set[tuple[str, str]] = set()
        for requirement in map(Requirement, metadata.get_all("Requires-Dist", [])):
            if any(requirement.marker is None or requirement.marker.evaluate({"extra": e}) for e in ("", *extras)):
                link_into(environment.packages, needed(requirement.name, frozenset(requirement.extras), seen))
        return environment

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def run(self, program: str, *arguments: str) -> str:
        return run([str(self.folder / "bin" / program), *arguments], self.folder)


def stem(wheel: Path) -> str:
    return "-".join(wheel.name.split("-")[:2])


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "tightfit").rglob("*") if path.is_file()}
    sources = {name for name in sources if "__pycache__" not in name}
    names = set(zipfile.ZipFile(wheel).namelist())
    described = {name for name in names if name.startswith(f"{stem(wheel)}.dist-info/")}
    assert names - described == sources, "no tests, no benchmarks, and every data file"
    assert {"tightfit/py.typed", "tightfit/jobs/stdlib.yaml"} <= names
    assert f"{stem(wheel)}.dist-info/licenses/LICENSE" in described


def test_planning_needs_only_what_the_base_declares(wheel: Path, tmp_path: Path) -> None:
    environment = Environment.made(tmp_path / "base", wheel)
    assert environment.run("python", "-c", "import tightfit; print(tightfit.__file__)").startswith(str(tmp_path))
    assert not [name for name in ("torch", "numpy", "transformers") if (environment.packages / name).exists()]
    assert environment.run("tightfit", "--version").strip() == tightfit.__version__ == wheel.name.split("-")[1]
    assert "fits" in environment.run("tightfit", "plan", "llama-3.2-1b", "--on", "RTX4090").splitlines()[0]


@pytest.mark.thorough
def test_training_needs_only_what_its_extra_declares(
    wheel: Path, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    try:
        environment = Environment.made(tmp_path / "train", wheel, "train")
    except PackageNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed here: pip install '.[train]'")
    job = tiny_job(tmp_path / "run", corpus, token_cache, steps=1, device="cpu")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json")))
    assert "1 of 1" in environment.run("tightfit", "train", str(tmp_path / "job.yaml"))
    assert (tmp_path / "run" / "checkpoints" / "step-00000001" / "model.safetensors").is_file()
