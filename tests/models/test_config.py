"""Reading config.json: every spelling that is understood, and an error for everything that is not."""

from __future__ import annotations

from typing import Any

import pytest

from minipage.models import ModelConfig, parameters, read_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0}


def read(remove: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    """The test's config with some keys changed and some removed."""
    return read_config({key: value for key, value in {**CONFIG, **changes}.items() if key not in remove})


def test_plain_llama() -> None:
    """Every field of a usual config arrives, and what it leaves out has Llama's defaults."""
    config = read()
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("LlamaForCausalLM", 61, 32)
    assert (config.intermediate_size, config.num_layers, config.num_heads, config.num_kv_heads) == (48, 2, 4, 2)
    assert (config.head_dim, config.max_position_embeddings, config.norm_eps) == (8, 512, 1e-5)
    assert (config.rope.kind, config.rope.theta, config.rope.rotary_dim) == ("default", 50000.0, 8)
    assert (config.activation, config.dtype, config.windows) == ("silu", "bfloat16", (0, 0))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert not config.tie_word_embeddings
    assert not (config.attention_bias or config.attention_output_bias or config.mlp_bias)
    bare = read(("num_key_value_heads", "rms_norm_eps", "rope_theta", "torch_dtype", "bos_token_id", "eos_token_id"))
    assert (bare.num_kv_heads, bare.norm_eps, bare.rope.theta, bare.dtype) == (4, 1e-6, 10000.0, "float32")
    assert (bare.bos_token_id, bare.eos_token_ids) == (None, ())


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    """An explicit head_dim is taken; without one, hidden_size must be a multiple of the heads."""
    assert read(head_dim=16).head_dim == 16
    assert read(head_dim=16, hidden_size=33).hidden_size == 33
    with pytest.raises(ValueError, match="hidden_size is 33 and num_attention_heads is 4"):
        read(hidden_size=33)


def test_eos_as_a_list_and_biases() -> None:
    """eos_token_id may be a list; attention_bias means q, k, v and o alike; mlp_bias is its own flag."""
    config = read(eos_token_id=[2, 7], attention_bias=True, mlp_bias=True)
    assert config.eos_token_ids == (2, 7)
    assert config.attention_bias and config.attention_output_bias and config.mlp_bias


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        (None, "silu"),
    ],
)
def test_activations(name: str | None, expected: str) -> None:
    """The names of hidden_act map to the op set's activations."""
    assert read(hidden_act=name).activation == expected


def test_dtype_spellings() -> None:
    """The dtype is read from dtype or torch_dtype, the newer key first."""
    assert read(dtype="float16").dtype == "float16"
    assert read(torch_dtype="torch.float32").dtype == "float32"


# ---- rope ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "rope_theta": None},
        {"rope_parameters": {"rope_type": "linear", "type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_rope_spellings(changes: dict[str, Any]) -> None:
    """type and rope_type, rope_scaling and rope_parameters: all mean the same, and theta is found where it is."""
    rope = read(**changes).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 5e5)


def test_partial_rotary_factor() -> None:
    """Only that part of a head is rotated, wherever the key is; it must come out even."""
    assert read(head_dim=20, partial_rotary_factor=0.5).rope.rotary_dim == 10
    assert read(head_dim=100, rope_parameters={"partial_rotary_factor": 0.58}).rope.rotary_dim == 58
    with pytest.raises(ValueError, match=r"partial_rotary_factor is 0\.25"):
        read(head_dim=20, partial_rotary_factor=0.25)
    with pytest.raises(ValueError, match=r"partial_rotary_factor is 1\.5"):
        read(partial_rotary_factor=1.5)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 512),
        ({"type": "linear", "factor": 4}, 512),
        ({"type": "dynamic", "factor": 4.0}, 2048),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}, 512),
        ({**YARN, "original_max_position_embeddings": 128}, 512),
        ({**YARN, "original_max_position_embeddings": 512}, 2048),
        (YARN, 512),
    ],
)
def test_longest_sequence(scaling: dict[str, Any] | None, length: int) -> None:
    """max_position_embeddings is the limit, unless it is plainly the length before scaling; no factor counts twice."""
    assert read(rope_scaling=scaling).max_position_embeddings == length


def test_original_length_beside_the_rule() -> None:
    """original_max_position_embeddings counts at the top level too, and is max_position_embeddings where nothing says."""
    assert read(rope_scaling=YARN, original_max_position_embeddings=64).rope.original_max_position == 64
    assert read(rope_scaling=YARN).rope.original_max_position == 512
    without_factor = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128}
    assert read(rope_scaling=without_factor).rope.factor == 4.0


# ---- windows -------------------------------------------------------------------------------------------------------

SLIDING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (0, 0)),
        ("MistralForCausalLM", {}, (0, 0)),
        ("MistralForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, (0, 0)),
        ("LlamaForCausalLM", {"sliding_window": 8}, (0, 0)),
        ("LlamaForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (8, 8)),
        ("LlamaForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (0, 8)),
        ("LlamaForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, (0, 0)),
        ("LlamaForCausalLM", {"sliding_window": 8, "layer_types": SLIDING}, (8, 0)),
        ("LlamaForCausalLM", {"sliding_window": 8, "layer_types": SLIDING, "use_sliding_window": False}, (0, 0)),
        ("LlamaForCausalLM", {"layer_types": SLIDING}, (0, 0)),
    ],
)
def test_windows_count_where_the_config_says_so(
    architecture: str, changes: dict[str, Any], windows: tuple[int]
) -> None:
    """A sliding_window is used by Mistral, and elsewhere only by use_sliding_window, layer_types and max_window_layers."""
    assert read(architectures=[architecture], **changes).windows == windows


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["FooForCausalLM"]},
            r"architectures is \['FooForCausalLM'\]; allowed: LlamaForCausalLM, Mis",
        ),
        ({"architectures": None}, "architectures is None"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32'; allowed: an integer of at least 1"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000; allowed: an integer of at least 1 and at most",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; allowed: a divisor of num_attention_heads, which is 4"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"head_dim": 10**400}, "head_dim is 1000"),
        ({"max_position_embeddings": 10**400, "rope_scaling": YARN}, "max_position_embeddings is 1000"),
        (
            {"partial_rotary_factor": 1e308},
            "partial_rotary_factor is 1e[+]308; allowed: a number from 1e-30 to 1e[+]30",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 1e-320}}, "factor is 1e-320"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e308}}, "factor is 1e[+]308"),
        ({"rope_scaling": {**YARN, "beta_fast": 1e-320}}, "beta_fast is 1e-320"),
        ({"rope_scaling": {**YARN, "attention_factor": 1e308}}, "attention_factor is 1e[+]308"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; allowed: silu, swish, gelu"),
        ({"torch_dtype": "float64"}, "torch_dtype is 'float64'; allowed: float32, bfloat16, float16"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; allowed: true or false"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id is"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"head_dim": 7}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"rope_type": "foo", "factor": 2}},
            "rope_type is 'foo'; allowed: default, linear, dynamic, llama3",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters is"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "rotary dims is 2"),
        ({"rope_scaling": {**YARN, "attention_factor": "x"}}, "attention_factor is 'x'"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta is 1.0"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor",
        ),
        ({"rope_scaling": {"type": "freq_factors", "freq_factors": [1.0]}}, "freq_factors is"),
        ({"sliding_window": -4}, "sliding_window is -4"),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, "layer_types is .*; allowed: a list of 2"),
        (
            {"sliding_window": 4, "layer_types": ["full_attention", "linear_attention"]},
            "layer_types is 'linear_attention'",
        ),
    ],
)
def test_what_is_not_understood_is_refused(changes: dict[str, Any], message: str) -> None:
    """A ValueError names the key, its value and what is allowed; nothing is ignored or guessed."""
    with pytest.raises(ValueError, match=message):
        read(**changes)


# ---- the plan ------------------------------------------------------------------------------------------------------


def test_plan_of_a_llama() -> None:
    """The plan names every tensor of a plain Llama once, with its shape, stacked as the decoder wants it."""
    plan = parameters(read(head_dim=16))
    by_name = {parameter.name: parameter for parameter in plan.parameters}
    assert list(by_name) == [
        "embed",
        *(f"layers.{i}.{part}" for i in (0, 1) for part in ("input_norm", "qkv", "o", "post_norm", "gate_up", "down")),
        "norm",
        "lm_head",
    ]
    assert [(spec.name, spec.shape) for spec in by_name["layers.1.qkv"].tensors] == [
        ("model.layers.1.self_attn.q_proj.weight", (64, 32)),
        ("model.layers.1.self_attn.k_proj.weight", (32, 32)),
        ("model.layers.1.self_attn.v_proj.weight", (32, 32)),
    ]
    assert [spec.name for spec in by_name["layers.0.gate_up"].tensors] == [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ]
    assert by_name["layers.0.o"].tensors[0].shape == (32, 64)
    assert by_name["layers.0.down"].tensors[0].shape == (32, 48)
    assert {name for name, parameter in by_name.items() if parameter.role == "vector"} == {
        name for name in by_name if "norm" in name
    }
    assert [spec.padded for spec in by_name["embed"].tensors + by_name["lm_head"].tensors] == [True, True]


def test_plan_with_biases_and_a_tied_head() -> None:
    """Biases are stacked like their weights; a tied head is no parameter, and a lm_head in the file is superseded."""
    plan = parameters(read(attention_bias=True, mlp_bias=True, tie_word_embeddings=True))
    by_name = {parameter.name: parameter for parameter in plan.parameters}
    for name in ("qkv", "o", "gate_up", "down"):
        weight, bias = by_name[f"layers.0.{name}"], by_name[f"layers.0.{name}_bias"]
        assert bias.role == "vector"
        assert [spec.name for spec in bias.tensors] == [
            spec.name.replace(".weight", ".bias") for spec in weight.tensors
        ]
        assert [spec.shape for spec in bias.tensors] == [spec.shape[:1] for spec in weight.tensors]
    assert "lm_head" not in by_name
    assert plan.superseded == ("lm_head.weight",)
