"""``moeserve chat``: a conversation in the terminal, answers streaming in."""

from __future__ import annotations

from rich.console import Console

from moeserve import config
from moeserve.cli.offline import open_llm
from moeserve.llm import LLM
from moeserve.messages import SamplingParams


def run(
    serve_config: config.ServeConfig, *, system: str | None, max_tokens: int, temperature: float
) -> None:
    """Reads lines and answers until an empty line, the end of input or Ctrl-C between answers."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    chat = [{"role": "system", "content": system}] if system else []
    with open_llm(serve_config) as llm:
        while True:
            try:
                line = console.input("[bold cyan]you>[/] ").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if not line:
                return
            chat.append({"role": "user", "content": line})
            chat.append({"role": "assistant", "content": _answer(llm, console, chat, params)})


def _answer(llm: LLM, console: Console, chat: list[dict[str, str]], params: SamplingParams) -> str:
    """Prints the answer as it comes and returns it; Ctrl-C cuts it short."""
    text = ""
    try:
        prompt = {"prompt_token_ids": llm.chat_prompt(chat)}
        for piece in llm.stream(prompt, params):
            console.print(piece, end="")
            text += piece
    except KeyboardInterrupt:
        pass  # leaving the loop aborts the request
    except ValueError as error:
        console.print(f"[{error}]", end="")
    console.print()
    return text
