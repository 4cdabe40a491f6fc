"""How the fields of a Hugging Face ``config.json`` are read.

Every reader raises ValueError that names the key, its value and what is allowed; nothing is guessed from a value of the
wrong type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]  #: the content of a config.json

DTYPES = ("float32", "bfloat16", "float16")
MAX_INTEGER = 2**31 - 1  #: beyond any model, and what a float holds exactly
SMALLEST, LARGEST = 1e-30, 1e30  #: numbers that are sane at all, whose quotients and powers a float64 holds
MAX_LAYERS = 10_000  #: beyond any model; keeps a hostile config from making lists without end

#: Names in ``hidden_act`` -> the activation of the op set. All tanh forms are one formula.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


# ---- one field -----------------------------------------------------------------------------------------------------


def refuse(key: str, value: Any, allowed: str) -> ValueError:
    """The error for a key of the config whose value is not allowed."""
    shown = repr(value)
    return ValueError(f"{key} is {shown if len(shown) <= 80 else shown[:77] + '...'}; allowed: {allowed}")


def integer(
    fields: Fields, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER
) -> int:
    """An int in minimum..maximum; the default where the key is absent or null, an error where there is no default."""
    value = fields.get(key)
    if value is None:
        value = default
    allowed = f"an integer of at least {minimum} and at most {maximum}"
    if value is None:
        raise ValueError(f"{key} is missing; allowed: {allowed}")
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise refuse(key, value, allowed)
    return value


def optional_integer(fields: Fields, key: str, *, minimum: int) -> int | None:
    """An int of at least ``minimum``, or None where the key is absent or null."""
    return None if fields.get(key) is None else integer(fields, key, minimum=minimum)


def number(fields: Fields, key: str, default: float | None = None) -> float:
    """A float from SMALLEST to LARGEST; the default where the key is absent or null, an error where there is no default."""
    value = fields.get(key)
    allowed = f"a number from {SMALLEST:g} to {LARGEST:g}"
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{key} is missing; allowed: {allowed}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not SMALLEST <= value <= LARGEST:
        raise refuse(key, value, allowed)
    return float(value)


def flag(fields: Fields, key: str, default: bool) -> bool:
    """A bool; the default where the key is absent or null."""
    value = fields.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(key, value, "true or false")
    return value


# ---- what several families share -----------------------------------------------------------------------------------


def read_activation(fields: Fields) -> str:
    """The op set's name of the activation ``hidden_act``; silu where the key is absent."""
    name = fields.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACTIVATION_NAMES:
        raise refuse("hidden_act", name, ", ".join(ACTIVATION_NAMES))
    return ACTIVATION_NAMES[name]


def read_dtype(fields: Fields) -> str:
    """The float type that the weights are meant for: ``dtype`` or ``torch_dtype``; float32 where neither is there."""
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(key) or "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPES:
        raise refuse(key, value, ", ".join(DTYPES))
    return str(name)


def read_token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    """One token id or a list of them; () where the key is absent or null."""
    value = fields.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise refuse(key, value, "a token id of at least 0, or a list of them")
    return tuple(ids)


def read_head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    """D as the config says, or hidden / heads where it does not and that is whole."""
    if fields.get("head_dim") is not None:
        return integer(fields, "head_dim")
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size is {hidden_size} and num_attention_heads is {num_heads}; without a head_dim, hidden_size "
            "must be a multiple of num_attention_heads"
        )
    return hidden_size // num_heads


def read_kv_heads(fields: Fields, num_heads: int) -> int:
    """KVH, which must divide the query heads; as many as these where the key is absent."""
    count = integer(fields, "num_key_value_heads", num_heads)
    if num_heads % count:
        raise refuse("num_key_value_heads", count, f"a divisor of num_attention_heads, which is {num_heads}")
    return count


def read_windows(fields: Fields, num_layers: int, used_by_default: bool) -> tuple[int, ...]:
    """The attention window of each layer, 0 for none. A ``sliding_window`` counts where the config says it is used:

    * ``use_sliding_window`` false: nowhere;
    * ``layer_types``: in the layers that it calls "sliding_attention";
    * ``use_sliding_window`` true: from layer ``max_window_layers`` (0 where absent) on;
    * nothing said: everywhere for a family that always uses it (``used_by_default``, Mistral), else nowhere.
    """
    window = optional_integer(fields, "sliding_window", minimum=0) or 0
    if not window or not flag(fields, "use_sliding_window", used_by_default or fields.get("layer_types") is not None):
        return (0,) * num_layers
    types = fields.get("layer_types")
    if types is None:
        first = integer(fields, "max_window_layers", 0, minimum=0)
        return tuple(window if i >= first else 0 for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise refuse("layer_types", types, f"a list of {num_layers}, one a layer")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise refuse("layer_types", kind, "full_attention, sliding_attention")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
