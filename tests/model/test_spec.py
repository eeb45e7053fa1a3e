"""Reading ``config.json``: both spellings, defaults, and every refusal by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from helpers_checkpoints import ARCHITECTURES
from hypothesis import given
from hypothesis import strategies as st

from moeserve.model.architectures import ARCHITECTURES as SUPPORTED
from moeserve.model.spec import ModelSpec, read_spec, spec_from_config

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 24,
    "intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
}


def read(drop: tuple[str, ...] = (), **changes: Any) -> ModelSpec:
    return spec_from_config({k: v for k, v in (QWEN3 | changes).items() if k not in drop})


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_transformers_writes(tmp_path, arch):
    """A whole config of each architecture, as ``save_pretrained`` writes it."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(arch, **sizes, num_key_value_heads=2)
    config.architectures = [next(n for n, a in SUPPORTED.items() if a.model_type == arch)]
    config.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert spec.num_experts == config.num_experts
    assert spec.top_k == config.num_experts_per_tok
    assert spec.head_dim == getattr(config, "head_dim", None) or 16
    assert spec.rope.rope_theta == config.rope_parameters["rope_theta"]
    assert spec.moe_layers == (0, 1, 2)
    assert spec.sliding_windows == (None,) * 3
    assert spec.renormalize == (arch == "mixtral" or config.norm_topk_prob)
    assert spec.qkv_bias == (arch == "qwen2_moe")
    assert spec.output_bias is False


def test_both_spellings():
    want = read(rope_theta=5e5)
    assert read(("num_experts",), num_local_experts=8, rope_theta=5e5) == want
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 5e5}) == want
    assert read(rope_theta=5e5, rope_scaling=None) == want
    linear = read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    assert linear.rope.factor == 2.0
    assert read(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}) == linear
    assert read(torch_dtype="bfloat16") == read(dtype="bfloat16")
    assert read().dtype == "float32"


def test_defaults():
    spec = read(("head_dim", "num_key_value_heads", "architectures"), hidden_size=64)
    assert (spec.head_dim, spec.num_kv_heads, spec.architecture) == (16, 4, "Qwen3MoeForCausalLM")
    assert read(head_dim=None).head_dim == 8
    assert read(eos_token_id=[1, 2]).eos_token_ids == (1, 2)
    assert read(("eos_token_id",)).eos_token_ids == ()
    assert read(bos_token_id=0).bos_token_id == 0


def test_layers_with_experts():
    assert read(decoder_sparse_step=2).moe_layers == (1, 3)
    assert read(mlp_only_layers=[0, 2]).moe_layers == (1, 3)
    assert read(decoder_sparse_step=2, mlp_only_layers=[1]).moe_layers == (3,)


def test_windows():
    assert read(sliding_window=7).sliding_windows == (None,) * 4
    assert read(sliding_window=7, use_sliding_window=True).sliding_windows == (7,) * 4
    qwen2 = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": 8,
        "sliding_window": 7,
        "use_sliding_window": True,
    }
    assert read(**qwen2, max_window_layers=2).sliding_windows == (7, None, None, None)
    kinds = ["full_attention", "sliding_attention"] * 2
    assert read(**qwen2, layer_types=kinds).sliding_windows == (None, 7, None, 7)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("hidden_size", -1, "an integer from 1"),
        ("hidden_size", 1e9, "an integer from 1"),
        ("hidden_size", True, "an integer from 1"),
        ("vocab_size", "many", "an integer from 1"),
        ("num_hidden_layers", 10**6, "an integer from 1 to 65536"),
        ("num_experts", 0, "an integer from 1"),
        ("num_experts_per_tok", 9, "an integer from 1 to 8"),
        ("num_key_value_heads", 3, "must divide num_attention_heads = 4"),
        ("num_key_value_heads", 8, "an integer from 1 to 4"),
        ("head_dim", 15, "must be even"),
        ("rms_norm_eps", 0, "a positive number"),
        ("rms_norm_eps", float("nan"), "a positive number"),
        ("hidden_act", "gelu", "one of silu"),
        ("dtype", "int8", "one of float32, bfloat16, float16"),
        ("norm_topk_prob", "yes", "true or false"),
        ("tie_word_embeddings", 1, "true or false"),
        ("eos_token_id", [1, -2], "non-negative integers"),
        ("mlp_only_layers", [4], "there are 4 layers"),
        ("mlp_only_layers", [0, 1, 2, 3], "leave no layer with experts"),
        ("decoder_sparse_step", 5, "leave no layer with experts"),
        ("rope_parameters", 3, "an object"),
        ("rope_parameters", {"rope_type": "longrope"}, "one of default, linear, llama3, yarn"),
        ("rope_scaling", {"type": "linear"}, "factor: missing"),
        ("rope_theta", -1.0, "a positive number"),
        ("partial_rotary_factor", 0.5, "must be 1"),
        ("quantization_config", {"bits": 4}, "not supported"),
        ("architectures", ["LlamaForCausalLM"], "must be one of Qwen3MoeForCausalLM"),
        ("architectures", [["x"]], "must be one of Qwen3MoeForCausalLM"),
    ],
)
def test_refusals_name_the_field(field, value, wanted):
    with pytest.raises(ValueError, match=wanted) as error:
        read(**{field: value})
    assert field in str(error.value) or field in ("rope_scaling", "rope_parameters")


@pytest.mark.parametrize("field", ["hidden_size", "num_experts_per_tok", "moe_intermediate_size"])
def test_missing_fields(field):
    with pytest.raises(ValueError, match=f"{field}: missing"):
        read((field,))


def test_window_without_width():
    with pytest.raises(ValueError, match="sliding_window: missing"):
        read(use_sliding_window=True)


def test_odd_hidden_size():
    with pytest.raises(ValueError, match="hidden_size = 30: must be a multiple of num_attention"):
        read(("head_dim",), hidden_size=30)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_unreadable_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json: "):
        read_spec(tmp_path)


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: No such file"):
        read_spec(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = (*QWEN3, "rope_parameters", "rope_scaling", "mlp_only_layers", "sliding_window", "dtype")


@given(st.sampled_from(FIELDS), json_values)
def test_any_value_is_read_or_refused_as_a_value_error(field, value):
    try:
        spec = read(**{field: json.loads(json.dumps(value))})
    except ValueError:
        return
    assert spec.num_heads % spec.num_kv_heads == 0
