"""The tree keeps the promises that its documents make."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pocketllm"
MODULES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]

# Files that one reader's screenful can't hold, with the reason and their own ceiling.
LONGER = {
    "pocketllm/protocol/rules.py": 700,  # one table, in the order in which it is applied
    # kernels of one product or draw, which share their Triton functions
    "pocketllm/torch_engine/kernels/attention_kernels.py": 440,
    "pocketllm/torch_engine/kernels/gguf_linear.py": 460,
    "pocketllm/torch_engine/kernels/linear.py": 560,
    "pocketllm/torch_engine/kernels/sampler.py": 520,
}
HEAVY = {"torch", "triton", "transformers", "pocketllm_cpp"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_plane(path: Path) -> bool:
    """Whether a module belongs to an execution plane, and so may import what the plane runs on."""
    return relative(path).startswith("pocketllm/torch_engine/") or relative(path) in ("pocketllm/backends/torch.py", "pocketllm/backends/cpp.py")


def imports(tree: ast.AST, *, nested: bool) -> Iterator[str]:
    """Dotted names that a module imports: while it is imported itself, or with `nested` also later, inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (name for child in node.orelse for name in imports(child, nested=nested))
        elif nested or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports(node, nested=nested)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 20
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md"} <= {relative(path) for path in DOCUMENTS}


@pytest.mark.parametrize("path", [path for path in MODULES if not is_plane(path)], ids=relative)
def test_modules_above_the_planes_import_nothing_heavy(path: Path) -> None:
    for name in imports(parse(path), nested=False):
        assert name.split(".")[0] not in HEAVY, f"{name} is imported at module level"
        assert not name.startswith(("pocketllm.torch_engine", "pocketllm.backends.torch", "pocketllm.backends.cpp")), f"{name} is imported at module level"


def test_importing_every_light_module_loads_no_torch() -> None:
    names = [relative(path)[: -len(".py")].replace("/", ".").removesuffix(".__init__") for path in MODULES if not is_plane(path) and path.name != "__main__.py"]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_environment_is_read_in_one_place(path: Path) -> None:
    if relative(path) == "pocketllm/env.py":
        return
    names = {node.attr for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os"}
    assert not names & {"environ", "environb", "getenv", "putenv"}
    assert not set(imports(parse(path), nested=True)) & {"os.environ", "os.environb", "os.getenv"}


def test_only_tests_import_the_fake_backend() -> None:
    importers = [relative(path) for path in MODULES if any(name.startswith("pocketllm.backends.fake") for name in imports(parse(path), nested=True))]
    assert importers == []


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_files_fit_a_reader(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= LONGER.get(relative(path), 400)


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_relative_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target) and not target.startswith("#"):
            assert (path.parent / target.split("#")[0]).exists(), f"{target} does not exist"


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_python_in_documents_compiles(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL):
        compile(block, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_names_in_documents_are_exported() -> None:
    import pocketllm

    for path in [*DOCUMENTS, *sorted((ROOT / "examples").glob("*.py"))]:
        for names in re.findall(r"from pocketllm import (.+)", path.read_text()):
            assert {name.strip() for name in names.split(",")} <= set(pocketllm.__all__), relative(path)


def test_generated_tables_are_those_of_the_code() -> None:
    done = subprocess.run([sys.executable, "-m", "scripts.doc_tables", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
