"""Print answers and texts of a checkpoint folder, and count how many facts it knows.

python -m benchmarks.train_embedded.sample --checkpoint FOLDER --corpora corpora
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from .wordlists import load_table

QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What is moeserve?",
    "What is an expert?",
    "What does the router do?",
    "What is expert parallelism?",
    "What is a KV cache?",
    "Why do birds sing?",
    "What is a violin?",
    "What is the capital of Peru?",
    "Where is Kenya located?",
    "What is 7 plus 5?",
    "What is 6 times 7?",
    "Write a Python function that checks if a number is prime.",
    "Name four animals.",
    "Give me JSON for a red ball that costs 5 dollars.",
    "Tell me a story about a dragon.",
    "How do I make coffee?",
    "Who won the football game yesterday?",
    "What is a gromblat?",
    "How do I bake bread?",
    "Why is grass green?",
    "Tell me about the ocean.",
)
OPENINGS = (
    "Once upon a time",
    "It is a truth universally acknowledged, that",
    "The people of the United States",
    "### SCENE II. A room in the palace.\n\n",
    "guitar, noun. ",
    "Brazil: Geography\n",
    "def parse_args(",
    "The :func:`open` function",
)


class Speaker:
    """A checkpoint that answers and continues."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def answer(self, question: str, *, max_tokens: int = 200) -> str:
        """Return the greedy answer to one question."""
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return self.continue_ids(self.tokenizer.encode(prompt), max_tokens, temperature=0.0)

    def continue_text(self, opening: str, *, max_tokens: int = 90) -> str:
        """Return a sampled continuation of a text."""
        return self.continue_ids([0, *self.tokenizer.encode(opening)], max_tokens, temperature=0.7)

    @torch.inference_mode()
    def continue_ids(self, token_ids: list[int], max_tokens: int, *, temperature: float) -> str:
        """Return the text that follows the tokens."""
        sampling = {"temperature": temperature, "top_p": 0.9} if temperature else {}
        output = self.model.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=temperature > 0,
            eos_token_id=[0, 2],
            pad_token_id=0,
            **sampling,
        )
        return self.tokenizer.decode(output[0][len(token_ids) :], skip_special_tokens=True).strip()


def count_facts(speaker: Speaker, corpora: Path, *, limit: int) -> dict[str, str]:
    """Return "right of asked" for capitals, fixed intents, small sums and products."""
    countries = json.loads((corpora / "countries.json").read_text())[:limit]
    scores = {
        "capitals": [
            row["capital"]
            in speaker.answer(f"What is the capital of {row['name']}?", max_tokens=24)
            for row in countries
        ]
    }
    for group, intents in load_table("intents").items():
        scores[group] = [
            speaker.answer(intent["questions"][0], max_tokens=90) in intent["answers"]
            for intent in intents[:limit]
        ]
    pairs = [(a, b) for a in range(1, 10, 2) for b in range(2, 11, 2)][:limit]
    for word, result in (("plus", int.__add__), ("times", int.__mul__)):
        scores[word] = [
            speaker.answer(f"What is {a} {word} {b}?", max_tokens=16).rstrip(".").split()[-1:]
            == [str(result(a, b))]
            for a, b in pairs
        ]
    return {name: f"{sum(right)} of {len(right)}" for name, right in scores.items()}


def parse_args() -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--corpora", type=Path, help="count facts against its tables")
    parser.add_argument("--limit", type=int, default=200, help="facts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Print samples and counts."""
    args = parse_args()
    torch.manual_seed(args.seed)
    speaker = Speaker(args.checkpoint)
    for question in QUESTIONS:
        print(f"> {question}\n{speaker.answer(question)}\n", flush=True)
    for opening in OPENINGS:
        print(f">> {opening!r}\n{speaker.continue_text(opening)}\n", flush=True)
    if args.corpora:
        print(json.dumps(count_facts(speaker, args.corpora, limit=args.limit), indent=1))


if __name__ == "__main__":
    main()
