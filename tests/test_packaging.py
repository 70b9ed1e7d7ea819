"""The wheel holds exactly the packages, and all of them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agentrl", "envs", "retriever")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("agentrl-*.whl"))


def in_packages(path: Path) -> bool:
    return "__pycache__" not in path.parts and path.is_file()


def test_the_wheel_holds_what_the_tree_holds(wheel: Path):
    tree = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*") if in_packages(path)}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == tree


def test_every_package_folder_is_a_package():
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()) == []


def test_the_wheel_carries_its_licence_and_its_command(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name.rsplit(".dist-info/", 1)[-1]: name for name in archive.namelist() if ".dist-info/" in name}
        assert b"Apache License" in archive.read(names["licenses/LICENSE"])
        assert b"agentrl = agentrl.cli:main" in archive.read(names["entry_points.txt"])
