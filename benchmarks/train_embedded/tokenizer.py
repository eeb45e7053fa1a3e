"""Train the byte-level BPE tokenizer, and encode the corpora to arrays of token ids.

train   corpora/*.txt -> tokenizer.json
encode  corpora/*.txt -> tokens/DOMAIN.{train,heldout}.bin, uint16, 0 before every document
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .generate import DOCUMENT_SEPARATOR

REAL_DOMAINS = ("prose", "speech", "plays", "dictionary", "world", "code", "docs", "jargon")
SYNTHETIC_DOMAINS = ("stories", "chat")
DOMAINS = (*SYNTHETIC_DOMAINS, *REAL_DOMAINS)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Words, single digits, punctuation, line ends, blanks.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Characters of each domain that the tokenizer sees, so that no domain drowns the others.
TRAINING_CHARACTERS = {"speech": 4_000_000, "docs": 5_000_000, "stories": 3_000_000}
DEFAULT_TRAINING_CHARACTERS = 6_000_000


def read_documents(corpora: Path, name: str, *, num_characters: int | None = None) -> list[str]:
    """Return the documents of one file, of its first characters only if so told."""
    text = (corpora / f"{name}.txt").read_text(encoding="utf-8")
    return text[:num_characters].split(DOCUMENT_SEPARATOR)


def train_tokenizer(corpora: Path, *, vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on a part of every domain."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=10,
    )
    tokenizer.train_from_iterator(training_texts(corpora), trainer)
    return tokenizer


def training_texts(corpora: Path) -> Iterator[str]:
    """Yield the documents that the tokenizer is trained on, without special tokens."""
    for domain in (*REAL_DOMAINS, *SYNTHETIC_DOMAINS):
        limit = TRAINING_CHARACTERS.get(domain, DEFAULT_TRAINING_CHARACTERS)
        for document in read_documents(corpora, domain, num_characters=limit):
            for token in SPECIAL_TOKENS:
                document = document.replace(token, "")
            yield document


def split_documents(corpora: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each domain with its training and its held-out documents.

    Of real text every 50th document is held out, at most 200. One generator shuffles all
    domains in their order, so the split depends on the number of documents alone.
    """
    rng = random.Random(0)
    for domain in REAL_DOMAINS:
        documents = read_documents(corpora, domain)
        rng.shuffle(documents)
        num_held_out = max(1, min(len(documents) // 50, 200))
        yield domain, documents[num_held_out:], documents[:num_held_out]
    for domain in SYNTHETIC_DOMAINS:
        held_out = read_documents(corpora, f"{domain}.heldout")
        yield domain, read_documents(corpora, domain), held_out


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """Return the token ids of all documents, each after a 0."""
    token_ids: list[int] = []
    for start in range(0, len(documents), 2000):
        for encoding in tokenizer.encode_batch(documents[start : start + 2000]):
            token_ids += [0, *encoding.ids]
    return np.array(token_ids, dtype=np.uint16)


def encode_corpora(tokenizer: Tokenizer, corpora: Path, folder: Path) -> None:
    """Write the training and held-out token ids of every domain."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain, training, held_out in split_documents(corpora):
        for split, documents in (("train", training), ("heldout", held_out)):
            token_ids = encode_documents(tokenizer, documents)
            token_ids.tofile(folder / f"{domain}.{split}.bin")
            print(
                f"{domain}.{split} documents={len(documents)} tokens={len(token_ids)}", flush=True
            )


def parse_args() -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["train", "encode"])
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--tokens", type=Path, help="folder for the arrays; for encode")
    parser.add_argument("--vocab-size", type=int, default=4096)
    args = parser.parse_args()
    if args.action == "encode" and args.tokens is None:
        parser.error("encode needs --tokens")
    return args


def main() -> None:
    """Train a tokenizer, or encode the corpora with one."""
    args = parse_args()
    if args.action == "train":
        tokenizer = train_tokenizer(args.corpora, vocab_size=args.vocab_size)
        tokenizer.save(str(args.tokenizer))
    else:
        encode_corpora(Tokenizer.from_file(str(args.tokenizer)), args.corpora, args.tokens)


if __name__ == "__main__":
    main()
