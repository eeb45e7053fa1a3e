"""The shipped model is the recorded one, and predicts held-out text as well as recorded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parent.parent
MODEL_DIR = ROOT / "moeserve" / "assets" / "embedded"
SAMPLE = ROOT / "tests" / "data" / "embedded_sample.json"
# Float32 sums in another order move the loss by about 1e-5; another model moves it by far more.
LOSS_TOLERANCE = 0.01


@pytest.fixture(scope="module")
def sample() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(SAMPLE.read_text())
    return recorded


def test_weights_are_the_recorded_ones(sample: dict[str, Any]) -> None:
    digest = hashlib.sha256((MODEL_DIR / "model.safetensors").read_bytes()).hexdigest()
    assert digest == sample["sha256"]
    assert digest in (MODEL_DIR / "MODEL_CARD.md").read_text()


def test_model_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 35_000_000


def test_held_out_loss_is_the_recorded_one(sample: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    domains = sample["domains"]
    token_ids = torch.tensor([domain["windows"] for domain in domains.values()])
    num_domains, num_windows, _ = token_ids.shape
    inputs, targets = token_ids[..., :-1].flatten(0, 1), token_ids[..., 1:]
    with torch.inference_mode():
        logits = model(inputs).logits.unflatten(0, (num_domains, num_windows))
    for name, domain_logits, domain_targets in zip(domains, logits, targets, strict=True):
        loss = F.cross_entropy(domain_logits.flatten(0, 1), domain_targets.flatten()).item()
        assert loss == pytest.approx(domains[name]["loss"], abs=LOSS_TOLERANCE), name


def test_chat_template_and_special_tokens_fit_together() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    config = json.loads((MODEL_DIR / "config.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    turn = tokenizer.encode("<|im_start|>user\nHello!<|im_end|>\n").ids
    assert turn[0] == tokenizer.token_to_id("<|im_start|>") == 1
    assert config["eos_token_id"] in turn
    assert tokenizer.get_vocab_size() == config["vocab_size"]
