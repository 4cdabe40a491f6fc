"""Names of models: paths are found, ids are fetched from the hub, and what cannot be had says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from minipage.errors import ModelLoadError
from minipage.weights import hub
from minipage.weights.hub import resolve_model


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """The repositories asked of the hub, which is never really asked, with the patterns of the files wanted."""
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return f"/cache/{repository}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_the_demo_model_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """None and "demo" are the demo model's file."""
    monkeypatch.setattr(hub, "demo_model_path", lambda: Path("/cache/demo.gguf"))
    assert resolve_model(None) == resolve_model("demo") == "/cache/demo.gguf"


def test_what_exists_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    """A folder or file is itself, also when it is named like a hub id or from the home folder."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(str(tmp_path / "m.gguf")) == str(tmp_path / "m.gguf")
    assert resolve_model("org/name") == "org/name"
    assert resolve_model("~/m.gguf") == str(tmp_path / "m.gguf")
    assert resolve_model(tmp_path / "org") == str(tmp_path / "org")  # type: ignore[arg-type]
    assert asked == []


@pytest.mark.parametrize(
    "name",
    [
        "./model",
        "../model",
        "/no/where",
        "~/nowhere",
        "model.gguf",
        "dir/model.gguf",
        "a/b/c",
        "here/model",
        "model/",
        "a.bin",
    ],
)
def test_a_path_that_does_not_exist(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any]
) -> None:
    """What looks like a path, or lies in a folder that exists, is said to be missing, and the hub is not asked."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=r"there is no such file or folder; allowed: .*\.gguf"):
        resolve_model(name)
    assert asked == []


@pytest.mark.parametrize(
    "name", ["", "gpt2", "org name/model", "org/", "org/na me", "org/name@main", "-x/y", "o\0/n", 5]
)
def test_nonsense_is_refused(name: Any, asked: list[Any]) -> None:
    """What is neither a path nor an id is an error that says what is allowed, and the hub is not asked."""
    with pytest.raises(ModelLoadError, match=r"allowed: a folder in Hugging Face layout, a \.gguf file, a hub id"):
        resolve_model(name)
    assert asked == []


def test_a_hub_id_is_fetched(asked: list[tuple[str, list[str]]]) -> None:
    """Only configs, tokenizers and safetensors are fetched: no pickles, and no second copy in another layout."""
    assert resolve_model("org/My-model_1.5") == "/cache/org/My-model_1.5"
    [(repository, patterns)] = asked
    assert repository == "org/My-model_1.5"
    wanted = huggingface_hub.utils.filter_repo_objects(
        [
            *(
                "config.json",
                "generation_config.json",
                "tokenizer.json",
                "tokenizer_config.json",
                "chat_template.jinja",
            ),
            *("model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"),
            *("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "model.gguf", "x.py"),
        ],
        allow_patterns=patterns,
    )
    assert sorted(wanted) == [
        *("chat_template.jinja", "config.json", "generation_config.json", "model-00001-of-00002.safetensors"),
        *("model.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"),
    ]


@pytest.mark.parametrize(
    ("kind", "offline", "advice"),
    [
        (errors.GatedRepoError, "", "Ask on its page"),
        (errors.RepositoryNotFoundError, "", "Check the name"),
        (errors.LocalEntryNotFoundError, "", "Check the network"),
        (errors.LocalEntryNotFoundError, "1", "HF_HUB_OFFLINE=1 is set"),
        (ConnectionError, "", "Check the network"),
        (OSError, "1", "Check the network"),
    ],
)
def test_what_the_hub_cannot_give(
    kind: type[Exception], offline: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way of failing is one ModelLoadError that names the model and says what to do, the local ways included."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    with pytest.raises(
        ModelLoadError, match=rf"'org/name' could not be fetched .*{advice}.*local folder.*minipage demo-model"
    ):
        resolve_model("org/name")


def test_offline_for_real(tmp_path: Path) -> None:
    """With HF_HUB_OFFLINE and an empty cache the library itself fails, at once and as foreseen."""
    script = "from minipage.weights.hub import resolve_model; resolve_model('org/name')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=60)
    assert "ModelLoadError: model='org/name' could not be fetched from the hub: HF_HUB_OFFLINE=1 is set" in done.stderr
