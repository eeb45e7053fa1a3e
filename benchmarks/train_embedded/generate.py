"""Write the synthetic corpora: stories.txt and chat.txt.

The seeds of the held-out files differ from the seeds of the training files, so held-out texts
share templates and facts with training, but are other draws.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

from .chat import ChatGenerator
from .plots import ALL_PLOTS
from .stories import make_scene, tell

DOCUMENT_SEPARATOR = "\n\x1e\n"


def make_chat_generator(facts_dir: Path, seed: int) -> ChatGenerator:
    """Return a generator over the fact tables that prepare.py wrote."""
    return ChatGenerator(
        rng=random.Random(seed),
        definitions=json.loads((facts_dir / "definitions.json").read_text(encoding="utf-8")),
        countries=json.loads((facts_dir / "countries.json").read_text(encoding="utf-8")),
    )


def write_documents(path: Path, make_document: Callable[[], str], count: int) -> None:
    """Write `count` documents, separated by a line that holds only the record separator."""
    text = DOCUMENT_SEPARATOR.join(make_document() for _ in range(count))
    path.write_text(text, encoding="utf-8")
    print(f"{path.name} documents={count} megabytes={len(text) / 1e6:.2f}")


def story_maker(seed: int) -> Callable[[], str]:
    """Return a function that returns another story at every call."""
    rng = random.Random(seed)
    return lambda: tell(make_scene(rng), ALL_PLOTS)


def parse_args() -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpora", type=Path, required=True, help="folder that prepare.py wrote")
    parser.add_argument("--num-stories", type=int, default=16000)
    parser.add_argument("--num-chats", type=int, default=60000)
    parser.add_argument("--num-held-out", type=int, default=200, help="documents of each kind")
    parser.add_argument("--seed", type=int, default=4242)
    return parser.parse_args()


def main() -> None:
    """Write the training and held-out documents of both synthetic domains."""
    args = parse_args()
    for suffix, seed, scale in (("", args.seed, 1), (".heldout", args.seed + 1, 0)):
        num_stories = args.num_stories if scale else args.num_held_out
        num_chats = args.num_chats if scale else args.num_held_out
        stories_path = args.corpora / f"stories{suffix}.txt"
        write_documents(stories_path, story_maker(seed), num_stories)
        chat = make_chat_generator(args.corpora, seed)
        write_documents(args.corpora / f"chat{suffix}.txt", chat.conversation, num_chats)


if __name__ == "__main__":
    main()
