"""The command ``minipage``: generate, chat, inspect, demo-model. Commands load the engine only when they run."""

from .main import main

__all__ = ["main"]
