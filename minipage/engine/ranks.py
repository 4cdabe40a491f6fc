"""Tensor parallelism: rank 0 has the engine and decides; the others have a shard of the model and do as they are told.

What rank 0 sends is plain data, the work of a step or the rows whose logits are wanted. After each the ranks tell each other
whether it went well: where one has failed, that step fails on all, rank 0 raises, and all are ready for the next.
"""

from __future__ import annotations

import logging
import signal
import threading
import weakref
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ..config import EngineConfig
from ..device.base import Device
from ..device.communicator import Communicator
from ..device.cpu import physical_cores
from ..errors import InvalidArgumentError, RankError
from ..models.decoder import Decoder
from ..weights.shards import Tokens
from .engine import Engine
from .runner import Runner, Work

logger = logging.getLogger("minipage")


#: Set where this process has loaded a model together with others, or tried: they end with its engine, or without one.
_has_loaded = threading.Event()


def check_first(size: int) -> None:
    """Raise InvalidArgumentError where there are no other ranks any more."""
    if _has_loaded.is_set():
        raise InvalidArgumentError(
            f"tensor_parallel_size={size}: the other ranks end with the LLM that this program has had, or failed to load; "
            "allowed: one LLM of several ranks a program"
        )


def check_agreement(communicator: Communicator, model: str | None, config: EngineConfig) -> None:
    """Raise InvalidArgumentError where the ranks are not to load the same model with the same keywords."""
    for rank, (other_model, other) in enumerate(communicator.exchange((model, config))):
        pairs = [("model", model, other_model)]
        pairs += [(field.name, getattr(config, field.name), getattr(other, field.name)) for field in fields(config)]
        for name, mine, theirs in pairs:
            if mine != theirs:
                raise InvalidArgumentError(
                    f"rank {communicator.rank} has {name}={mine!r} and rank {rank} {theirs!r}; all must be given the same"
                )
    _has_loaded.set()


def with_threads(communicator: Communicator, config: EngineConfig) -> EngineConfig:
    """The config with its number of threads: ranks that run on the same cores share them."""
    sharing = communicator.num_sharing()
    return replace(config, num_threads=config.num_threads or max(1, physical_cores() // sharing))


def serve_rank_0(engine: Engine) -> None:
    """On another rank: compute what rank 0's engine does until that is closed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes: rank 0 says what becomes of it
    assert isinstance(engine.runner, ShardRunner)
    engine.runner.follow()
    engine.close()


class ShardRunner(Runner):
    """The runner of a rank. Rank 0's is used as any other; on the others :meth:`follow` does what that one does."""

    def __init__(
        self, device: Device, model: Decoder, *args: Any, tokens: Tokens, vocab_size: int, **keywords: Any
    ) -> None:
        """``tokens`` are those of this rank's embedding and head."""
        super().__init__(device, model, *args, rows_of=tokens.rows, **keywords)
        self._communicator = device.communicator
        self._vocab_size = vocab_size
        # Lets the other ranks end, at the latest when the interpreter does.
        self._end = weakref.finalize(self, self._communicator.send, None)
        if self._communicator.rank > 0:
            self._end.detach()

    def compute(self, work: Work) -> None:
        """All ranks do the work of a step. Raises RankError where another one failed."""
        try:
            self._communicator.send(work)
            self._compute_together(work)
        except BaseException:
            self._batch.forget()
            raise

    @property
    def samples(self) -> bool:
        """No: no rank has the logits of all tokens."""
        return False

    def logits(self, rows: list[int]) -> np.ndarray:
        """Logits [n, V] of rows of the last step, of which each rank computes those of its tokens."""
        self._communicator.send(rows)
        parts = self._logits_together(rows)
        assert parts is not None
        logits: np.ndarray = parts.swapaxes(0, 1).reshape(len(rows), -1)[:, : self._vocab_size]
        return logits

    def close(self) -> None:
        self._end()
        super().close()

    def follow(self) -> None:
        """Do what rank 0 does until it ends."""
        while (message := self._communicator.receive()) is not None:
            try:
                if isinstance(message, Work):
                    self._compute_together(message)
                else:
                    self._logits_together(message)
            except RankError:
                pass  # rank 0 knows, too, and tells whoever called it
            except Exception:
                logger.exception("rank %d failed in a step", self._communicator.rank)

    def _compute_together(self, work: Work) -> None:
        used, communicator = work.batch.shape, self._communicator
        num_tokens = (self._padded(used) or used).num_tokens
        last = communicator.num_gathers + self._model.num_reductions

        def compute() -> None:
            try:
                super(ShardRunner, self).compute(work)
            except BaseException:
                communicator.catch_up(last, (num_tokens, self._model.config.hidden_size))
                raise

        communicator.together(compute)

    def _logits_together(self, rows: list[int]) -> np.ndarray | None:
        """[size, n, tokens] on rank 0."""
        part = self._communicator.together(lambda: super(ShardRunner, self).logits(rows))
        return self._communicator.gather(part[:, :-1])
