"""``moeserve generate``: prompts in, texts out."""

from __future__ import annotations

import sys

from rich.console import Console

from moeserve import config
from moeserve.cli.offline import open_llm
from moeserve.messages import SamplingParams


def run(
    serve_config: config.ServeConfig, prompts: list[str], *, max_tokens: int, temperature: float
) -> None:
    """Prints each prompt with its continuation; the progress bar goes to stderr."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with open_llm(serve_config) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        for prompt, output in zip(prompts, outputs, strict=True):
            console.print(prompt, style="bold", end="")
            console.print(output.outputs[0].text)
