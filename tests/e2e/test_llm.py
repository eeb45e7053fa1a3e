"""Offline inference: the shape of the API, its parameters, its errors, its commands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from moeserve import LLM, SamplingParams
from moeserve.config import ConfigError
from moeserve.llm import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=30)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded", dtype="float32", batch_invariant=True, num_blocks=64) as made:
        yield made
        made.check()


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["Once upon a time", "The capital of", "def "]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert [o.prompt for o in together] == prompts
    assert [o.outputs[0].text for o in together] == [o.outputs[0].text for o in alone]
    assert all(o.finished and o.outputs[0].finish_reason in ("stop", "length") for o in together)


def test_token_ids_in_give_the_same_as_text(llm: LLM) -> None:
    text = "Once upon a time"
    prompt = {"prompt_token_ids": llm.tokenizer.encode(text)}
    [by_ids], [by_text] = (llm.generate([p], GREEDY, use_tqdm=False) for p in (prompt, text))
    assert by_ids.outputs[0].text == by_text.outputs[0].text
    assert by_ids.prompt_token_ids == by_text.prompt_token_ids


def test_streamed_pieces_are_the_text(llm: LLM) -> None:
    [whole] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    pieces = list(llm.stream("Once upon a time", GREEDY))
    assert "".join(pieces) == whole.outputs[0].text and len(pieces) > 5


def test_a_stream_left_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=900, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm.generate("x", GREEDY, use_tqdm=False)
    llm.check()


def test_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    [free] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[12:17]  # crosses token borders
    params = SamplingParams(temperature=0, max_tokens=30, stop=[stop])
    [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    choice = output.outputs[0]
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_samples_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=20)
    [first], [second] = (llm.generate("Once", params, use_tqdm=False) for _ in range(2))
    texts = [choice.text for choice in first.outputs]
    assert len(set(texts)) == 4
    assert texts == [choice.text for choice in second.outputs]
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]


def test_logprobs_belong_to_the_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=1)
    [output] = llm.generate({"prompt_token_ids": [9, 8, 7]}, params, use_tqdm=False)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert [lp.token_id for lp in choice.logprobs] == choice.token_ids
    assert all(lp.rank == 1 and lp.logprob == lp.top_logprobs[0] for lp in choice.logprobs)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [lp.token_id for lp in output.prompt_logprobs[1:] if lp] == [8, 7]


def test_second_time_the_prefix_is_cached(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(100, 180))}
    _, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens >= 64


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ({"prompt_token_ids": [4096]}, GREEDY, "4096"),
        ({"prompt_token_ids": [-1]}, GREEDY, "-1"),
        ({"text": "x"}, GREEDY, "prompt"),
        ("x", SamplingParams(stop_token_ids=[5000]), "stop_token_ids"),
        ("x", SamplingParams(logit_bias={4096: 1.0}), "logit_bias"),
    ],
)
def test_wrong_input_is_named(llm: LLM, prompt: object, params: SamplingParams, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(prompt, params, use_tqdm=False)  # type: ignore[arg-type]


def test_a_prompt_that_can_never_fit_is_refused_with_numbers(llm: LLM) -> None:
    # 64 blocks of 16 tokens are the model's whole context; a prompt of all of it leaves no room.
    with pytest.raises(RequestError, match="1024"):
        llm.generate({"prompt_token_ids": [5] * 1024}, GREEDY, use_tqdm=False)
    llm.generate("x", GREEDY, use_tqdm=False)  # others go on


def test_load_counts_every_token_once_per_choice(llm: LLM) -> None:
    before = sum(map(sum, llm.expert_load().values()))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm.generate({"prompt_token_ids": [7, 77, 777]}, params, use_tqdm=False)
    after = sum(map(sum, llm.expert_load().values()))
    assert after - before == (3 + 5) * 2 * 8  # tokens x top_k x layers


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    with LLM("embedded", skip_tokenizer_init=True, threads_per_rank=1) as bare:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        [output] = bare.generate({"prompt_token_ids": [1, 2]}, params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 30 and output.outputs[0].text == ""
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            bare.generate("x", GREEDY, use_tqdm=False)


def test_dummy_weights_need_only_a_config() -> None:
    with LLM("embedded", load_format="dummy", dtype="float32", threads_per_rank=1) as dummy:
        [output] = dummy.generate("x", GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids


def test_wrong_settings_start_nothing() -> None:
    children = len(psutil.Process().children())
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        LLM("embedded", blocksize=3)
    with pytest.raises(ValueError, match="ep = 17"):
        LLM("embedded", ep=17)
    assert len(psutil.Process().children()) == children


def command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moeserve", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def test_generate_command_prints_prompt_and_text() -> None:
    done = command("generate", "-p", "Once upon a time", "--max-tokens", "10", "--ep", "2")
    prompt, line = "Once upon a time", done.stdout.removesuffix("\n")
    assert line.startswith(prompt) and len(line) > len(prompt) + 10
    assert len(done.stdout.split()) > 6


def test_chat_command_answers_line_by_line() -> None:
    question = "What is the capital of Peru?"
    done = command("chat", "--temperature", "0", "--threads-per-rank", "1", stdin=f"{question}\n")
    answer = done.stdout.replace("you>", "").strip()
    assert len(answer.split()) > 2
