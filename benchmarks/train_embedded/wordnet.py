"""Dictionary entries and short definitions from the WordNet 3.0 database files."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
NOUN_CLASSES = {
    "05": "animal",
    "06": "artifact",
    "08": "body",
    "13": "food",
    "17": "object",
    "19": "phenomenon",
    "20": "plant",
    "27": "substance",
}
# Entries that a demonstration should not produce; the list errs on the side of leaving out.
UNWANTED = re.compile(
    r"\b(sex|sexual|penis|vagina|nigg|slut|whore|fuck|shit|rape|genital|coitus|intercourse"
    r"|prostitut|ethnic slur|offensive|obscene|disparag|coloured|negro|jew)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synset:
    """One meaning; `broader` is the key of its first more general noun."""

    words: list[str]
    definition: str
    examples: list[str]
    broader: tuple[str, str] | None
    noun_class: str
    is_wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WordNet:
    """Meanings by (file, offset), the senses of every word, and how often words occur."""

    synsets: dict[tuple[str, str], Synset]
    senses: dict[str, list[tuple[str, list[tuple[str, str]]]]]
    counts: Counter[str]
    noun_counts: Counter[str]


def read_wordnet(folder: Path) -> WordNet:
    """Return the database below a folder with data.noun, index.noun and so on."""
    synsets: dict[tuple[str, str], Synset] = {}
    senses: dict[str, list[tuple[str, list[tuple[str, str]]]]] = {}
    for file in FILES:
        for line in read_lines(folder / f"data.{file}"):
            offset, synset = parse_synset(line)
            synsets[file, offset] = synset
        for line in read_lines(folder / f"index.{file}"):
            fields = line.split()
            keys = [(file, offset) for offset in fields[-int(fields[2]) :]]
            senses.setdefault(fields[0].replace("_", " "), []).append((file, keys))
    counts, noun_counts = Counter[str](), Counter[str]()
    for line in (folder / "cntlist.rev").read_text().splitlines():
        sense, _, count = line.split()
        word, kind = sense.replace("_", " ").split("%")
        counts[word] += int(count)
        noun_counts[word] += int(count) * kind.startswith("1")
    return WordNet(synsets=synsets, senses=senses, counts=counts, noun_counts=noun_counts)


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a database file without its licence header."""
    yield from (line for line in path.read_text().splitlines() if not line.startswith("  "))


def parse_synset(line: str) -> tuple[str, Synset]:
    """Return the offset and the content of one line of a data file."""
    head, gloss = line.split(" | ", 1)
    fields = head.split()
    num_words = int(fields[3], 16)
    words = [re.sub(r"\(.*\)", "", fields[4 + 2 * i]).replace("_", " ") for i in range(num_words)]
    start = 5 + 2 * num_words
    pointers = [fields[start + 4 * i : start + 4 * i + 3] for i in range(int(fields[start - 1]))]
    nouns = [target for sign, target, kind in pointers if sign == "@" and kind == "n"]
    definition, *examples = re.split(r';\s*(?=")', gloss)
    synset = Synset(
        words=words,
        definition=definition.strip().rstrip(";"),
        examples=[example.strip().strip('"') for example in examples],
        broader=("noun", nouns[0]) if nouns else None,
        noun_class=NOUN_CLASSES.get(fields[1], ""),
        is_wanted=not UNWANTED.search(gloss),
    )
    return fields[0], synset


def dictionary_documents(wordnet: WordNet, *, num_rare: int = 14000) -> list[str]:
    """Return documents of eight entries: all common words, and some of the rare ones."""
    rng = random.Random(0)
    common, rare = [], []
    for word, senses in wordnet.senses.items():
        entry = dictionary_entry(wordnet, word, senses)
        if entry and wordnet.counts[word] >= 2:
            common.append(entry)
        elif entry and word.isalpha():
            rare.append(entry)
    rng.shuffle(rare)
    entries = common + rare[:num_rare]
    rng.shuffle(entries)
    return ["\n\n".join(entries[i : i + 8]) for i in range(0, len(entries), 8)]


def dictionary_entry(
    wordnet: WordNet, word: str, senses: list[tuple[str, list[tuple[str, str]]]]
) -> str:
    """Return the text of one entry, up to six meanings per part of speech."""
    lines = []
    for file, keys in senses:
        for number, key in enumerate(keys[:6], 1):
            synset = wordnet.synsets[key]
            if not synset.is_wanted:
                continue
            line = f"{number}. {synset.definition}." if len(keys) > 1 else f"{synset.definition}."
            if synset.examples:
                line += f' Example: "{synset.examples[0].rstrip(".")}."'
            others = [other for other in synset.words if other.lower() != word]
            if others and number <= 3:
                line += f" Synonyms: {', '.join(others[:4])}."
            lines.append(f"{word}, {FILES[file]}. {line}" if number == 1 else line)
    return "\n".join(lines)


def common_definitions(wordnet: WordNet, *, count: int = 700) -> list[dict[str, Any]]:
    """Return short definitions of the most frequent concrete nouns, the most frequent first.

    A word is taken when seven in ten of its counted uses are nouns and its first meaning
    as a noun is a concrete thing.
    """
    rows = []
    for word, senses in wordnet.senses.items():
        for file, keys in senses:
            synset = wordnet.synsets[keys[0]]
            if file != "noun" or not is_plain(word, synset):
                continue
            if wordnet.noun_counts[word] < 0.7 * max(1, wordnet.counts[word]):
                continue
            rows.append((wordnet.counts[word], definition_row(wordnet, word, synset)))
    rows.sort(key=lambda row: -row[0])
    return [row for _, row in rows[:count]]


def is_plain(word: str, synset: Synset) -> bool:
    """Return whether the word is the first name of a concrete thing with a short definition."""
    return bool(
        synset.is_wanted
        and synset.noun_class
        and re.fullmatch("[a-z ]{3,18}", word)
        and synset.words[0].lower() == word
        and len(synset.definition) < 100
    )


def definition_row(wordnet: WordNet, word: str, synset: Synset) -> dict[str, Any]:
    """Return the definition as the chat generator reads it."""
    others = [name for name in synset.words if name.lower() != word]
    return {
        "word": word,
        "definition": synset.definition,
        "synonyms": [name for name in others if re.fullmatch("[a-z ]+", name)],
        "kind": wordnet.synsets[synset.broader].words[0] if synset.broader else "",
        "class": synset.noun_class,
    }
