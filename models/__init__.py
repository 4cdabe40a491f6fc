"""The transformer, from scratch: what a config says, which tensors it needs, and the forward pass.

    config.py, fields.py, rope_config.py   the shape of a model, and how a Hugging Face config.json is read
    rope.py                                rotary position tables
    plan.py                                which tensors become which parameters
    registry.py                            the families, each in one small file: llama.py
    decoder.py                             the forward pass, on whatever op set it is handed
    calibration.py                         the same in plain NumPy, for a look at what its layers read

Nothing here knows of the engine or of a kernel.
"""

from .config import ModelConfig, RopeConfig
from .plan import Parameter, Plan, TensorSpec
from .registry import parameters, read_config

__all__ = ["ModelConfig", "Parameter", "Plan", "RopeConfig", "TensorSpec", "parameters", "read_config"]
