"""The families that there are, and the way from a config's architecture to its family."""

from __future__ import annotations

from typing import Protocol

from . import llama
from .config import ModelConfig
from .fields import Fields, refuse
from .plan import Plan


class Family(Protocol):
    """A module that knows one family of architectures."""

    ARCHITECTURES: tuple[str, ...]

    def read_config(self, fields: Fields, architecture: str) -> ModelConfig: ...

    def parameters(self, config: ModelConfig) -> Plan: ...


FAMILIES: dict[str, Family] = {name: family for family in (llama,) for name in family.ARCHITECTURES}


def read_config(fields: Fields) -> ModelConfig:
    """The model that a Hugging Face ``config.json`` describes, told by ``architectures[0]``.

    Raises ValueError naming the key, its value and what is allowed.
    """
    names = fields.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else names
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise refuse("architectures", names, ", ".join(FAMILIES))
    return FAMILIES[architecture].read_config(fields, architecture)


def parameters(config: ModelConfig) -> Plan:
    """The parameters of a model and the tensors that they are made of."""
    return FAMILIES[config.architecture].parameters(config)
