"""Are lm-eval's numbers, taken over HTTP, those of transformers on the same checkpoint?

Reads the samples that ``lm_eval run --log_samples`` left for the two tasks in ``lm_eval/`` and
computes each again in float32: log-probabilities, greedy flags and generated texts. Prints one
JSON line and exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

TOLERANCE = 1e-3  # of a log-probability of one token
MAX_NEW_TOKENS = 16  # as in moeserve_generate.yaml
STOPS = (".", "\n")


class Reference:
    """A checkpoint in transformers, float32."""

    def __init__(self, model: str) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32
        ).eval()

    def score(self, context: str, continuation: str) -> tuple[list[float], bool]:
        """The log-probability of each token of ``continuation``; whether all are the likeliest."""
        num_context = len(self._tokenizer.encode(context))
        token_ids = self._tokenizer.encode(context + continuation)
        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids])).logits[0, num_context - 1 : -1]
        targets = torch.tensor(token_ids[num_context:])
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return logprobs.tolist(), bool((logits.argmax(-1) == targets).all())

    def generate(self, prompt: str) -> str:
        """The greedy continuation up to the first of ``STOPS``."""
        inputs = self._tokenizer(prompt, return_tensors="pt").input_ids
        output = self._model.generate(inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new = output[0, inputs.shape[1] :]
        text = str(self._tokenizer.decode(new, skip_special_tokens=True))
        for stop in STOPS:
            text = text.split(stop)[0]
        return text


def samples(folder: Path, task: str) -> Iterator[dict[str, Any]]:
    """The samples of a task's newest run.

    Raises:
        FileNotFoundError: lm-eval has left none.
    """
    files = sorted(folder.rglob(f"samples_{task}_*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{folder}: no samples_{task}_*.jsonl; run lm_eval first")
    yield from map(json.loads, files[-1].read_text().splitlines())


def compare(folder: Path, reference: Reference) -> dict[str, Any]:
    """Counts, the largest difference per token, and what differs besides."""
    num_requests, largest = 0, 0.0
    differing: list[str] = []
    for sample in samples(folder, "moeserve_choice"):
        for asked, answers in zip(sample["arguments"].values(), sample["resps"], strict=True):
            logprobs, is_greedy = reference.score(asked["arg_0"], asked["arg_1"])
            (given, given_greedy), *_ = answers
            num_requests += 1
            largest = max(largest, abs(float(given) - sum(logprobs)) / len(logprobs))
            if str(given_greedy) != str(is_greedy):
                differing.append(asked["arg_0"] + asked["arg_1"])
    num_texts = 0
    for sample in samples(folder, "moeserve_generate"):
        prompt = sample["arguments"]["gen_args_0"]["arg_0"]
        num_texts += 1
        if sample["resps"][0][0] != reference.generate(prompt):
            differing.append(prompt)
    return {
        "loglikelihood_requests": num_requests,
        "largest_difference_per_token": largest,
        "texts": num_texts,
        "differing": differing,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="--output_path of lm_eval")
    parser.add_argument("--model", default="moeserve/assets/embedded")
    arguments = parser.parse_args()
    result = compare(arguments.folder, Reference(arguments.model))
    print(json.dumps(result))
    sys.exit(bool(result["differing"] or result["largest_difference_per_token"] > TOLERANCE))


if __name__ == "__main__":
    main()
