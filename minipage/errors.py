"""The errors that minipage raises of its own. All bad input is a ValueError; each says what was wrong and what is allowed."""


class InvalidArgumentError(ValueError):
    """An argument, a request or a sampling parameter is not allowed; names it, its value and what is."""


class ModelLoadError(ValueError):
    """A checkpoint cannot be loaded; names the file, the tensor or key, what was found and what was wanted."""


class OutOfMemoryError(ValueError):
    """The device has no room for what was asked; says what is there, what is wanted and what to change."""


class RankError(RuntimeError):
    """Another rank of a model that several compute together has failed; names the rank and its error."""

    def __init__(self, rank: int, size: int, failure: str) -> None:
        super().__init__(f"rank {rank} of {size} failed: {failure}")
        self.rank = rank


def mebibytes(num_bytes: int) -> str:
    """A size as messages say it."""
    return f"{num_bytes / (1 << 20):,.1f} MiB"
