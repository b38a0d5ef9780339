"""The house rules: imports point one way, planning needs no torch, starting is quick, nothing wakes the GPU early."""

import ast
import importlib
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.distributed.group import PRELOADED
from tests.speed import python_s
from tightfit.launch.forked import start_server

PACKAGE = Path(__file__).parent.parent / "tightfit"
FLOORS = [
    ["printable", "bounded_patterns", "counted"],
    ["errors"],
    ["durable", "writer_lock"],
    ["bounded_files"],
    ["bounded_yaml"],
    ["hardware"],
    ["models.spec"],
    ["models.huggingface"],
    ["models.presets", "models.hub"],
    ["models.resolve"],
    ["models.huggingface.adapter_config"],
    ["models.quantized.scheme", "models.quantized.matrices"],
    ["models.quantized.described", "models.base_model"],
    ["models.quantized.held_weights"],
    ["jobs"],
    ["levers.policy"],
    ["memory.ledger"],
    ["memory.comparison"],
    ["memory.formulas"],
    ["plan"],
    ["exports"],
    ["collectives"],
    ["kernels"],
    ["memory"],
    ["models", "models.huggingface.weights", "models.huggingface.adapter"],
    ["levers"],
    ["parallel"],
    ["train"],
    ["launch"],
    ["compress"],
    ["serve.config"],
    ["serve.requests"],
    ["serve.schedule"],
    ["serve.weights"],
    ["serve.cache"],
    ["serve.forward"],
    ["serve.budget"],
    ["serve.sampling"],
    ["serve.graphs"],
    ["serve.speculation"],
    ["serve.ranks"],
    ["serve"],
    ["serve.http"],
    ["prove"],
    ["hf"],
    ["report"],
    ["cli"],
    ["__main__"],
]
"""From the ground up. A module belongs to the room with the longest name that it starts with. Rooms on one floor never
meet, but for those of the decoder: loading and saving weights lies between it and who calls that by a model's name."""
DECODER_ROOMS = {"models", "models.huggingface.weights", "models.huggingface.adapter"}
TORCH_FREE = """
hardware.cpu models.spec models.presets models.huggingface.config models.resolve jobs.job jobs.load jobs.fields
jobs.workload memory.ledger durable cli.main report.tables hardware.catalog hardware.machine hardware.local
hardware.efficiency plan.answer plan.serving.plan exports.files jobs.rules.refusals plan.job report.plan
levers.policy.recompute levers.policy.budget levers.policy.offload levers.policy.tiles levers.policy.loss_chunks
levers.policy.updates memory.formulas.training memory.formulas.serving memory.comparison report.memory report.ledger
report.timeline
"""


def modules() -> dict[str, Path]:
    found = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


@cache
def parsed(path: Path) -> ast.Module:
    """Once for all tests that look into it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement, as imports and functions are; what they compute, nine nodes of ten, is not looked into."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, name, ())
        yield node


@cache
def floor_and_room(module: str) -> tuple[int, str]:
    matches = [
        (len(room), level, room)
        for level, rooms in enumerate(FLOORS)
        for room in rooms
        if f"{module}.".startswith(f"{room}.")
    ]
    assert matches, f"{module} is in no room of the house"
    return max(matches)[1:]


def goes_down(module: str, other: str) -> bool:
    """Whether `module` may import `other`: from its own room, or from a lower floor."""
    (own_floor, own_room), (floor, room) = floor_and_room(module), floor_and_room(other)
    return floor < own_floor or room == own_room or {room, own_room} <= DECODER_ROOMS


def imported(module: str, known: set[str], tree: ast.AST) -> set[str]:
    """Modules of this package that `module` imports anywhere: at its top, inside functions, by relative names."""
    package = module if (PACKAGE / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]
    found: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("tightfit.") for alias in node.names if _ours(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            if _ours(base):
                names = {f"{base}.{alias.name}".removeprefix("tightfit.") for alias in node.names}
                found |= {name if name in known else base.removeprefix("tightfit.") for name in names}
    return found - {"tightfit"}


def _ours(name: str) -> bool:
    return name == "tightfit" or name.startswith("tightfit.")


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """`from ..x import y` as `from tightfit.z.x import y`."""
    if not node.level:
        return node.module or ""
    parents = ["tightfit", *filter(None, package.split("."))]
    return ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])


def upward(paths: dict[str, Path]) -> list[str]:
    """Every import that does not lead down."""
    known = set(paths)
    return [
        f"{module} imports {other}"
        for module, path in paths.items()
        if module != "__init__"
        for other in imported(module, known, parsed(path))
        if not goes_down(module, other)
    ]


def test_imports_go_down_only() -> None:
    assert upward(modules()) == []


@pytest.mark.parametrize(
    "line",
    [
        "from tightfit.train import loop",
        "import tightfit.train.loop",
        "from tightfit import train",
        "from ..train import loop",
        "from ..train.loop import train_job",
        "def later():\n    from tightfit.train.loop import train_job",
    ],
)
def test_every_way_to_import_upwards_is_seen(line: str) -> None:
    known = set(modules())
    found = imported("parallel.mesh", known, ast.parse(line))
    assert any(not goes_down("parallel.mesh", name) for name in found), found


def test_rooms_on_one_floor_never_meet() -> None:
    assert goes_down("models.huggingface.config", "models.huggingface.rope")
    assert not goes_down("models.hub", "models.presets")


def test_planning_modules_do_not_import_torch() -> None:
    code = f"import sys\nfor m in {TORCH_FREE.split()!r}: __import__('tightfit.' + m)\n"
    code += "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def import_all(names: list[str]) -> None:
    """Forked from a server that has imported some of them and nothing of the tests' own that uses a GPU."""
    import torch

    for name in names:
        importlib.import_module(name)
    assert set(names) <= set(sys.modules)
    assert "deepspeed" not in sys.modules
    assert not torch.cuda.is_initialized()
    assert not torch.cuda._is_in_bad_fork(), "a module that the server imports initialised CUDA"


def test_no_module_initialises_cuda_or_imports_deepspeed() -> None:
    names = [f"tightfit.{name}" for name in modules() if name not in ("__main__", "__init__")]
    assert "tightfit.train.loop" in names
    start_server(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=import_all, args=(names,))
    process.start()
    process.join()
    assert process.exitcode == 0


HELP_OF_NOTHING = "import sys, typer; sys.argv = ['nothing', '--help']; typer.run(lambda: None)"


def test_starting_is_quick() -> None:
    """The package is imported in less than a bare interpreter's start; the help of all verbs takes less than twice that
    of a program without any."""
    assert python_s("-c", "import tightfit") < 2 * python_s("-c", "pass")
    assert python_s("-m", "tightfit", "--help") < 2 * python_s("-c", HELP_OF_NOTHING)


LONGEST_FILE, LONGEST_FUNCTION, LONGEST_BODY = 500, 80, 50
"""Lines; a function's body is what follows its signature and docstring. Triton kernels, which must be one, are left
out. A verb with many options takes them as one dataclass (cli/options.py)."""


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_files_and_functions_stay_readable() -> None:
    long: list[str] = []
    for module, path in modules().items():
        if len(path.read_text(encoding="utf-8").splitlines()) > LONGEST_FILE:
            long.append(module)
        for node in statements(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
                body = node.body[ast.get_docstring(node) is not None :]
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                whole = (node.end_lineno or 0) - node.lineno + 1
                if lines > LONGEST_BODY or whole > LONGEST_FUNCTION:
                    long.append(f"{module}.{node.name}: {lines} lines of {whole}")
    assert long == []


def test_folders_of_kernels_are_floors_too() -> None:
    """What one folder imports from another never leads back to it."""
    kernels, reached = PACKAGE / "kernels", dict[str, set[str]]()
    imported = re.compile(r"from tightfit\.kernels\.(\w+)\.\w+ import")
    for folder in (path.name for path in kernels.iterdir() if path.is_dir() and path.name != "__pycache__"):
        named = {name for path in (kernels / folder).glob("*.py") for name in imported.findall(path.read_text("utf-8"))}
        reached[folder] = named - {folder}
    for _ in reached:
        reached = {folder: named.union(*(reached[name] for name in named)) for folder, named in reached.items()}
    assert len(reached) > 1
    assert [folder for folder, named in reached.items() if folder in named] == []


def test_the_formatter_is_never_switched_off() -> None:
    """What it spreads over too many lines has too many arguments, or wants their names."""
    root = PACKAGE.parent
    paths = [path for room in ("tightfit", "benchmarks", "tests", "examples") for path in (root / room).rglob("*.py")]
    switches = re.compile(r"#\s*(fmt|yapf|ruff): *(skip|off|disable|noqa\b)")
    assert [str(path.relative_to(root)) for path in paths if switches.search(path.read_text(encoding="utf-8"))] == []


PAGE = PACKAGE.parent / "docs" / "architecture.md"


def table(heading: str) -> list[str]:
    """First cells of the table under `heading` of the page."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    return [row.strip("`") for row in rows[2:]]


def test_the_page_has_every_room_in_the_order_of_the_floors() -> None:
    assert table("Floors and rooms") == [room for floor_rooms in FLOORS for room in floor_rooms]


def test_the_glossary_is_short_and_has_each_word_once() -> None:
    words = table("Glossary")
    assert 20 <= len(words) <= 40
    assert len(set(words)) == len(words)
    nouns = {
        "Machine",
        "ModelSpec",
        "Job",
        "Layout",
        "Levers",
        "Workload",
        "rules",
        "Plan",
        "Candidate",
        "Ledger",
        "Line",
    }
    assert nouns <= set(words)


OTHERS_FILES = {"_fsdp_collectives.py", "_fsdp_param.py", "modeling_low_rank.py"}
"""Torch's, and one that is written beside a compressed model."""


def test_files_that_are_named_exist() -> None:
    """A file that is moved takes along what is said about it. Capitals stand for any; the log tells of what was."""
    root = PACKAGE.parent
    files = [
        path.relative_to(root) for room in ("tightfit", "benchmarks", "tests") for path in (root / room).rglob("*.py")
    ]
    known = {"/".join(path.parts[start:]) for path in files for start in range(len(path.parts))} | OTHERS_FILES
    pages = [path for path in [*root.glob("*.md"), *root.glob("docs/*.md")] if path.stem not in ("LOG", "CHANGELOG")]
    named = re.compile(r"(?<![\w/.<{*-])[\w/]+\.py\b")
    gone = [
        f"{path.relative_to(root)}: {name}"
        for path in [*modules().values(), *pages]
        for name in named.findall(path.read_text(encoding="utf-8"))
        if name.islower() and name not in known
    ]
    assert gone == []


def test_docstrings_are_whole() -> None:
    """None begins a sentence that the next one ends: each stands alone in an editor and in `--fields`."""
    broken = re.compile(r',"""$', flags=re.MULTILINE)
    assert [name for name, path in modules().items() if broken.search(path.read_text(encoding="utf-8"))] == []


NOUNS = {"Stage", "Split", "Part", "Slot", "Case", "Moment", "Rates"}
"""Beside the glossary's: words that meant several things."""


def test_one_noun_has_one_meaning() -> None:
    """A class, or a type's other name, that is called as one of these is the only one in the package."""
    nouns = NOUNS | {word for word in table("Glossary") if word[0].isupper()}
    defined = re.compile(r"^(?:class )?([A-Z][A-Za-z]+)(?=[(:]| = )", flags=re.MULTILINE)
    found = [noun for path in modules().values() for noun in defined.findall(path.read_text(encoding="utf-8"))]
    assert {noun for noun in nouns if found.count(noun) > 1} == set()
