"""The public surface: what is there, where it comes from, and what importing it costs."""

import ast
import graphlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import penstock


def run(code: str) -> None:
    """Run code in a fresh interpreter: imports happen once per process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(penstock, name)
    assert value.__doc__
    assert name in dir(penstock)
    assert getattr(penstock, name) is value


def test_the_version_is_that_of_the_package() -> None:
    assert penstock.__version__ == version("penstock")


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'nothing'"):
        penstock.nothing  # noqa: B018


def test_importing_and_planning_loads_no_torch() -> None:
    run(
        "import sys, penstock\n"
        "program = penstock.build('1f1b', ranks=2, microbatches=4)\n"
        "assert penstock.simulate(program, penstock.Costs(latency=1)).makespan > 0\n"
        "families = penstock.schedules()\n"
        "assert len(families) >= 25\n"
        "for each in families:\n"
        "    program = penstock.build(each.name, ranks=4, microbatches=8)\n"
        "    result = penstock.simulate(penstock.check(program))\n"
        "    assert result.makespan > 0 and result.program.name == each.name\n"
        "assert 'torch' not in sys.modules\n"
    )


@pytest.mark.parametrize(
    "imports",
    [
        "import penstock",
        "import penstock.simulate.simulation; import penstock",
        "import penstock; import penstock.simulate.simulation",
        "from penstock.simulate.costs import Costs; import penstock",
        "import penstock; from penstock.simulate.memory import peak_in_flight",
        "import penstock; penstock.simulate; from penstock.simulate import simulation",
    ],
)
def test_simulate_is_the_function_in_any_order_of_imports(imports: str) -> None:
    """A subpackage has the same name, and its import would bind it over a lazy function."""
    run(
        f"{imports}\n"
        "program = penstock.build('gpipe', ranks=4, microbatches=8)\n"
        "assert penstock.simulate(program).makespan == 33\n"
        "from penstock import simulate\n"
        "assert simulate is penstock.simulate\n"
        "from penstock.simulate.simulation import simulate as same\n"
        "assert simulate is same\n"
    )


def test_modules_are_found_behind_functions_of_the_same_name() -> None:
    run(
        "import penstock.schedule.check as first\n"
        "import penstock.simulate.costs as second\n"
        "import penstock\n"
        "import penstock.schedule.text\n"
        "assert first.check is penstock.check and second.Costs is penstock.Costs\n"
        "assert penstock.schedule.text.load_csv is penstock.load_csv\n"
        "assert callable(penstock.schedule)\n"
    )


@pytest.mark.parametrize(
    "imports",
    [
        "import penstock",
        "import penstock.search.engine; import penstock",
        "from penstock.search.state import SearchResult; import penstock",
        "import penstock; from penstock.search.problem import SearchProblem",
        "import penstock; penstock.search; from penstock.search import engine",
    ],
)
def test_search_is_the_function_in_any_order_of_imports(imports: str) -> None:
    """As above; and searching loads neither torch nor, where nothing is left to prove, OR-Tools."""
    run(
        f"{imports}\n"
        "assert penstock.search(ranks=4, microbatches=8).value == 27\n"
        "from penstock.search.engine import search as same\n"
        "assert penstock.search is same\n"
        "import sys\n"
        "assert 'torch' not in sys.modules and 'ortools' not in sys.modules\n"
    )


def test_torchs_own_pipelines_are_never_imported() -> None:
    run(
        "import importlib, pkgutil, sys, penstock\n"
        "for found in pkgutil.walk_packages(penstock.__path__, 'penstock.'):\n"
        "    if not found.name.endswith('.__main__'):\n"
        "        importlib.import_module(found.name)\n"
        "for name in penstock.__all__:\n"
        "    getattr(penstock, name)\n"
        "theirs = 'torch.distributed.pipelining'\n"
        "assert 'torch.distributed' in sys.modules\n"
        "assert not [name for name in sys.modules if name.startswith(theirs)]\n"
    )


def test_modules_import_each_other_in_no_cycle() -> None:
    """Imports within functions and those for type checkers are counted too."""
    root = Path(penstock.__file__).parent
    sources = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts): path
        for path in root.rglob("*.py")
    }
    sources = {name.removesuffix(".__init__"): path for name, path in sources.items()}
    imports: dict[str, set[str]] = {}
    for name, path in sources.items():
        found = imports[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in sources:
                parts = {f"{node.module}.{each.name}" for each in node.names}
                # A submodule by its name, or names of the module itself.
                found |= parts & sources.keys() or {node.module}
    assert len(imports["penstock"]) > 20
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def test_a_name_of_a_class_means_one_thing() -> None:
    """In the whole library: of classes and of types that have a name; private ones are free."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(penstock.__file__).parent.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            match node:
                case ast.ClassDef(name=name):
                    found.setdefault(name, []).append(path.name)
                case (
                    ast.AnnAssign(target=ast.Name(id=name))
                    | ast.Assign(targets=[ast.Name(id=name)])
                ) if name[0].isupper() and not name.isupper():
                    found.setdefault(name, []).append(path.name)
    assert len(found) > 200
    assert not {name: paths for name, paths in found.items() if len(paths) > 1 and name[0] != "_"}
