"""Do LangChain and LiteLLM get from a server what they expect? Prints one line per check.

Runs in an environment of its own with ``langchain-openai`` and ``litellm``; exits with 1 if a check
fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

QUESTION = "Tell me a story about a fox."
BEGINNING = "Once upon a time"


def check_langchain(base_url: str, model: str) -> Iterator[tuple[str, bool]]:
    """Names of checks and whether they passed."""
    from langchain_openai import ChatOpenAI, OpenAI

    settings: dict[str, Any] = {
        "model": model, "base_url": base_url, "api_key": "none", "temperature": 0,
        "max_tokens": 24, "max_retries": 0,
    }  # fmt: skip
    chat = ChatOpenAI(**settings)
    answer = chat.invoke(QUESTION)
    text = str(answer.content)
    yield "chat", bool(text) and (answer.usage_metadata or {})["output_tokens"] <= 24
    yield "chat stream", "".join(str(part.content) for part in chat.stream(QUESTION)) == text
    yield "chat batch", [str(one.content) for one in chat.batch([QUESTION] * 3)] == [text] * 3
    stopped = chat.bind(stop=[text[20:24]]).invoke(QUESTION)
    yield "chat stop", stopped.content == text[: text.index(text[20:24])]
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata
    yield "chat logprobs", "".join(t["token"] for t in logprobs["logprobs"]["content"]) == text
    completion = OpenAI(**settings)
    whole = completion.invoke(BEGINNING)
    yield "completion", bool(whole)
    yield "completion stream", "".join(completion.stream(BEGINNING)) == whole
    yield "completion batch", completion.batch([BEGINNING] * 2) == [whole] * 2


def check_litellm(base_url: str, model: str) -> Iterator[tuple[str, bool]]:
    """Names of checks and whether they passed."""
    import litellm

    settings: dict[str, Any] = {
        "api_base": base_url, "api_key": "none", "temperature": 0, "max_tokens": 24,
    }  # fmt: skip
    chat = {**settings, "messages": [{"role": "user", "content": QUESTION}]}
    for provider in ("openai", "hosted_vllm"):
        name = f"{provider}/{model}"
        text = litellm.completion(model=name, **chat).choices[0].message.content
        parts = litellm.completion(model=name, stream=True, **chat)
        streamed = "".join(part.choices[0].delta.content or "" for part in parts)
        yield f"{provider} chat", bool(text)
        yield f"{provider} chat stream", streamed == text
    name = f"text-completion-openai/{model}"
    both = litellm.text_completion(model=name, prompt=[BEGINNING] * 2, **settings)
    yield "completion of two prompts", both.choices[0].text == both.choices[1].text != ""
    try:
        litellm.completion(model="openai/not-here", **chat)
        yield "unknown model", False
    except litellm.NotFoundError:
        yield "unknown model", True


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="embedded")
    arguments = parser.parse_args()
    all_passed = True
    for client, check in (("langchain", check_langchain), ("litellm", check_litellm)):
        for name, passed in check(arguments.base_url, arguments.model):
            print(f"{client}: {name}: {'ok' if passed else 'FAILED'}", flush=True)
            all_passed &= passed
    sys.exit(not all_passed)


if __name__ == "__main__":
    main()
