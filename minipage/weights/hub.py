"""What a user calls a model, to a path: a folder, a file, an id of the Hugging Face hub, or the demo model."""

from __future__ import annotations

import os
import re

from ..errors import ModelLoadError
from .demo_model import demo_model_path

#: What is fetched of a repository: never pickles, nor weights in other layouts.
FETCHED = ["*.json", "*.jinja", "model.safetensors", "model-*.safetensors"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
ALLOWED = "a folder in Hugging Face layout, a .gguf file, a hub id (org/name), or None or 'demo' for the demo model"


def resolve_model(model: str | None) -> str:
    """The local path of a model, fetched first where that is needed.

    Raises ModelLoadError where there is no such path, and where the hub cannot give it, saying what to do.
    """
    if model is None or model == "demo":
        return str(demo_model_path())
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        raise ModelLoadError(f"model={model!r} is not allowed; allowed: {ALLOWED}")
    path = os.path.expanduser(os.fspath(model))
    if os.path.exists(path):
        return path
    if looks_like_path(path):
        raise ModelLoadError(f"model={model!r}: there is no such file or folder; allowed: {ALLOWED}")
    if not HUB_ID.fullmatch(path):
        raise ModelLoadError(f"model={model!r} is neither a path that exists nor a hub id; allowed: {ALLOWED}")
    return fetch_from_hub(path)


def looks_like_path(model: str) -> bool:
    """Whether a name was meant as a path, so that the hub need not be asked: it starts like one, has a file's ending or
    several parts, or begins with a folder that exists."""
    return (
        model.startswith((".", os.sep, "~"))
        or model.endswith((".gguf", ".safetensors", ".json", ".bin", os.sep))
        or model.count("/") > 1
        or (os.sep != "/" and os.sep in model)
        or ("/" in model and os.path.isdir(model.split("/")[0]))
    )


def fetch_from_hub(repository: str) -> str:
    """The folder of a repository's snapshot in the hub's cache on this machine, completed over the network if need be."""
    import huggingface_hub  # takes a quarter of a second, and most runs load what is here already

    try:
        return str(huggingface_hub.snapshot_download(repository, allow_patterns=FETCHED))
    except Exception as error:  # of many kinds: the library lets those of the network, the disk and the hub through
        raise ModelLoadError(
            f"model={repository!r} could not be fetched from the hub: {explain(error)}; or pass a local folder or a .gguf "
            "file; or use the demo model, which `minipage demo-model` fetches"
        ) from error


def explain(error: Exception) -> str:
    """Why the hub did not give a repository, and what to do about it."""
    from huggingface_hub import errors

    offline = os.environ.get("HF_HUB_OFFLINE")
    if isinstance(error, errors.GatedRepoError):
        return "its owner wants to be asked first. Ask on its page and log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "it is not there, or private. Check the name, and log in with `hf auth login` if it is private"
    if offline and isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE={offline} is set and it is not in the hub's cache. Unset it and fetch the model once"
    reason = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {reason}. Check the network, or set HF_HUB_OFFLINE=1 if it is in the hub's cache"
