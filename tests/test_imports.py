"""Who may import whom (the map in README), and what importing the package costs. Read from the import statements themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("minipage", "minipage/kernels", "minipage/models")

#: What each part may import of the others; a part may always import itself. Parts are named from the bottom up.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "sampling_params": {"errors"},
    "outputs": set(),
    "interrupts": set(),
    "cache": set(),
    "kernels": set(),
    "models": set(),
    "device": {"kernels", "config", "errors"},
    "weights": {"kernels", "models", "errors"},
    "text": {"errors"},
    "engine": {
        "cache",
        "device",
        "weights",
        "text",
        "kernels",
        "models",
        "config",
        "sampling_params",
        "outputs",
        "errors",
    },
    "llm": {"engine", "text", "config", "sampling_params", "outputs", "interrupts", "errors"},
    "inspection": {"engine", "device", "weights", "kernels", "models", "config", "errors"},
    "cli": {"llm", "inspection", "config", "sampling_params", "outputs", "interrupts", "errors", ""},
    "__main__": {"cli"},
    "": {"llm", "sampling_params", "outputs", "errors"},  # the package itself: names for users, loaded on first use
}
PARTS = sorted(MAY_IMPORT)


def source_files(*folders: str) -> list[Path]:
    """All Python files below the folders, each once, by the path that Python imports it by."""
    files = {file for folder in folders for file in (ROOT / folder).rglob("*.py")}
    return sorted(file for file in files if "__pycache__" not in file.parts)


def module_name(file: Path) -> str:
    """minipage/cache/__init__.py -> minipage.cache"""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name. The folders behind symlinks are listed by themselves: rglob skips them."""
    return {module_name(file): file for file in source_files(*FOLDERS)}


@cache
def imports(module: str) -> frozenset[str]:
    """What a module imports, anywhere in it, as absolute names; ``from a import b`` is a.b where that is a module."""
    file = modules()[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            found.update(name if (name := f"{base}.{alias.name}") in modules() else base for alias in node.names)
    return frozenset(found)


def part(module: str) -> str:
    """The part of the house that a module of the package is in."""
    return module.split(".")[1] if "." in module else ""


def inner_imports(module: str) -> Iterator[str]:
    """The modules of the package that a module imports."""
    return (name for name in imports(module) if name.split(".")[0] == "minipage")


def test_every_part_is_on_the_map() -> None:
    """A new folder or module at the top has its place among the parts before anything imports it."""
    assert {part(module) for module in modules()} <= set(PARTS)
    assert len(modules()) > 40  # the folders were found


@pytest.mark.parametrize("name", PARTS, ids=[name or "minipage" for name in PARTS])
def test_a_part_imports_only_those_below_it(name: str) -> None:
    """No import runs back up."""
    broken = [
        f"{module} imports {imported}"
        for module in modules()
        if part(module) == name
        for imported in inner_imports(module)
        if part(imported) not in {name, *MAY_IMPORT[name]}
    ]
    assert broken == []


def test_no_module_imports_itself_in_a_circle() -> None:
    """The import graph of all modules, late imports and those for type checking included, has no cycle."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for imported in inner_imports(module):
                if imported != "minipage":  # the package loads names on first use, when all modules are there
                    visit(imported, (*path, module))
            done.add(module)

    for module in modules():
        if module != "minipage":
            visit(module, ())


def test_only_device_chooses_a_kernel_implementation() -> None:
    """Everything else gets its ops from a device."""
    implementations = ("minipage.kernels.reference", "minipage.kernels.cpu", "minipage.kernels.cuda")
    choosers = {
        part(module)
        for module in modules()
        for imported in inner_imports(module)
        if imported.startswith(implementations) and part(module) != "kernels"
    }
    assert choosers == {"device"}


@pytest.mark.parametrize("file", source_files("minipage", "kernels", "models", "tests", "scripts"), ids=str)
def test_the_folders_are_never_imported_at_the_top_level(file: Path) -> None:
    """``kernels`` and ``models`` exist once, inside the package: a second copy of a module has other classes."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
        assert not {name.split(".")[0] for name in names} & {"kernels", "models"}


def python(code: str) -> str:
    """What a fresh interpreter prints for ``code``."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["minipage.cache", "minipage.engine.scheduler"])
def test_accounting_and_scheduling_are_pure_python(module: str) -> None:
    """Whatever they import is the package's own or the standard library's."""
    code = f"import sys, {module}; print(*{{m.split('.')[0] for m in sys.modules}} - sys.stdlib_module_names)"
    foreign = {name for name in python(code).split() if not name.startswith(("_", "sitecustomize", "minipage"))}
    assert foreign == set()


def test_importing_the_package_is_quick() -> None:
    """It takes less than 0.3 s and loads neither Numba nor tokenizers; best of three, since the machine may be busy."""
    code = (
        "import sys, time; start = time.perf_counter(); import minipage; print(time.perf_counter() - start);"
        "print(*{'numba', 'numba_cuda', 'tokenizers', 'numpy', 'jinja2', 'gguf'} & set(sys.modules))"
    )
    results = [python(code).split("\n") for _ in range(3)]
    assert [result[1:] for result in results] == [[]] * 3
    assert min(float(result[0]) for result in results) < 0.3


def test_the_command_line_is_quick_to_answer() -> None:
    """Building the parser, as --help and --version do, loads no array library."""
    code = (
        "import sys; from minipage.cli.main import build_parser; build_parser();"
        "print(*{'numba', 'tokenizers', 'numpy', 'jinja2', 'gguf'} & set(sys.modules))"
    )
    assert python(code) == ""
