"""Imports between the package's folders point downwards only, and only plugin/ changes DeepSpeed."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from hang_guard import HANG

import zeropp_fp8

PACKAGE = Path(zeropp_fp8.__file__).parent

# What each part may import besides itself: plugin -> numerics -> zero -> {comm, compute, optim} -> kernels -> formats.
# `config` may be imported by all and imports none of them; `plan` reads nothing else; `outputs` is for every command.
_READ_BY_ALL = {"config"}
_BASE = _READ_BY_ALL | {"kernels", "formats"}
_MIDDLE = _BASE | {"comm", "compute", "optim", "sharded"}
MAY_IMPORT = {
    "": {"plugin", "config", "zero"},  # zeropp_fp8/__init__.py
    "export": _MIDDLE | {"zero", "outputs"},
    "run": {"", "children"},
    "__main__": {"", "doctor"},
    "numerics": _MIDDLE | {"zero", "outputs"},
    "children": {""},
    "integrations": {"zero"},
    "fsdp2": _MIDDLE | {"zero"},
    "handover": {"zero"},
    "receiving": {"zero"},
    "plugin": _MIDDLE | {"zero", "numerics"},
    "zero": _MIDDLE,
    "comm": _BASE,
    "compute": _BASE | {"sharded"},
    "sharded": set(),
    "optim": _BASE,
    "kernels": _READ_BY_ALL | {"formats"},
    "formats": _READ_BY_ALL,
    "config": set(),
    "plan": _READ_BY_ALL | {"outputs"},
    "outputs": set(),
    "doctor": _MIDDLE | {"", "plugin", "zero", "plan", "outputs"},
}
PARTS = set(MAY_IMPORT) - {""}


# The same inside zero/, by folder or file. A feature stands above what it extends.
ROOMS = {
    "": set(),
    "session": {"placement", "stage_part"},
    "telemetry": {"session", "stage_part"},
    "stage_part": set(),
    "memory": set(),
    "placement": set(),
    "fragment": set(),
    "ulysses": {"session", "stage_part"},
    "linear_function": set(),
    "compiled": set(),
    "attachment": set(),
    "gather": {"session", "memory"},
    "compute_scaling": {"session", "stage_part"},
    "reduce": {"session", "stage_part", "memory", "as_deepspeed"},
    "report": {"session", "stage_part", "gather", "telemetry"},
    # The last two only where they are asked for.
    "offload": {"session", "gather", "report", "compiled", "attachment", "frozen", "owners", "compute_scaling"},
    "extra_state": {"session"},
    "bound": {"session", "stage_part"},
    "fall_back": {"session", "stage_part"},
    "chunks": set(),
    "as_deepspeed": {"chunks"},
    "looking": set(),
    # The last two only where they are asked for.
    "stage3": {
        "session",
        "chunks",
        "as_deepspeed",
        "reduce",
        "looking",
        "bound",
        "telemetry",
        "offload",
        "attachment",
        "report",
        "fall_back",
        "extra_state",
        "stage_part",
        "states",
        "owners",
    },
    "states": {"as_deepspeed", "stage_part", "reduce"},
    "owners": {"session", "placement", "gather"},
    "frozen": {"session", "gather", "fragment"},
    "checkpoint": {"session", "frozen"},
    "holders": {"gather"},
    "generation": {"offload", "gather", "memory", "holders"},
    "export": {"frozen", "holders"},
    "handover": {"export", "gather", "frozen", "holders"},
}
# What is not about DeepSpeed: neither its modules nor what it puts on parameters, but through sharded.py.
OF_NO_BACKEND = ("comm", "compute", "formats", "kernels", "optim")
OF_NO_BACKEND += tuple(f"zero/{name}" for name in ("frozen", "gather", "handover", "owners", "reduce", "states"))
ON_PARAMETERS = r"\bds_(tensor|numel|shape|id|status|persist|process_group|active_sub_modules|summary)\b"
# What answers methods of DeepSpeed's stage.
ADAPTERS = {"zero/states/stored_states.py", "zero/states/stored_gradients.py"}
OPTIONAL = ("states", "owners", "frozen", "generation", "export", "handover", "checkpoint")


def part_of(module):
    """The folder or top-level file of a dotted module name of the package; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def imported_parts(source, module, is_package):
    """(line, part) of every import of the package in `source`, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative
                package = module.split(".") if is_package else module.split(".")[:-1]
                parents = package[: len(package) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            # `from zeropp_fp8 import comm` imports a part, `from zeropp_fp8 import enable` the package itself.
            names = [base]
            if base == "zeropp_fp8":
                names = [f"{base}.{alias.name}" if alias.name in PARTS else base for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "zeropp_fp8":
                yield node.lineno, part_of(name)


def upward_imports(source, module, is_package=False):
    """A line for each import that the drawing does not allow."""
    own = part_of(module)
    return [
        f"{module}:{line} imports {part or 'the package itself'}"
        for line, part in imported_parts(source, module, is_package)
        if part != own and part not in MAY_IMPORT[own]
    ]


def changes_of_deepspeed(source):
    """Lines that assign to (or delete) an attribute or item of something imported from deepspeed."""
    tree = ast.parse(source)
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or "deepspeed" for alias in node.names if alias.name.split(".")[0] == "deepspeed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
            names |= {alias.asname or alias.name for alias in node.names}

    def is_deepspeed(node):
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        return isinstance(node, ast.Name) and node.id in names

    lines = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            changed = is_deepspeed(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            changed = bool(node.args) and is_deepspeed(node.args[0])
        else:
            continue
        if changed:
            lines.append(node.lineno)
    return lines


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module):
    """The folder or file inside zero/ of a dotted module name of it; "" for zero/ itself."""
    return module.split(".")[2] if module.count(".") > 1 else ""


def imported_files(source, module, is_package):
    """Files of the package that a file of it imports, wherever the import stands; packages' own files are passed over.

    Each imports those of its folder that others may want, and would close a circle with all that ask one of them.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".") if is_package else module.split(".")[:-1]
            base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            base = base if node.level else node.module
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {name for name in found if name in FILES and FILES[name].name != "__init__.py"} - {module}


def circles(imports):
    """Return what is left of {file: files} without all that need nothing that is left, or that nothing left needs."""
    left = {file: set(needs) for file, needs in imports.items()}
    while True:
        needed = set().union(*left.values())
        free = {file for file, needs in left.items() if not needs or file not in needed}
        if not free:
            return sorted(left)
        left = {file: needs - free for file, needs in left.items() if file not in free}


UPWARD = [
    ("zeropp_fp8.formats.base", "from zeropp_fp8.comm import Topology"),
    ("zeropp_fp8.formats.base", "import zeropp_fp8.comm.ledger as ledger"),
    ("zeropp_fp8.formats.base", "from zeropp_fp8 import comm"),
    ("zeropp_fp8.formats.base", "from ..comm import ledger"),
    ("zeropp_fp8.formats.base", "def f():\n    from zeropp_fp8.zero import session"),
    ("zeropp_fp8.formats.base", "from zeropp_fp8 import enable"),
    ("zeropp_fp8.comm.ledger", "import zeropp_fp8.zero.stage3"),
    ("zeropp_fp8.comm.ledger", "from zeropp_fp8.optim import adamw"),
    ("zeropp_fp8.zero.stage3", "from zeropp_fp8 import plugin"),
    ("zeropp_fp8.config", "from zeropp_fp8.formats import FORMAT_NAMES"),
    ("zeropp_fp8", "from zeropp_fp8.comm import Topology"),
]
DOWNWARD = [
    ("zeropp_fp8.formats.base", "import torch\nfrom zeropp_fp8.formats.scales import x\nfrom .scales import x"),
    ("zeropp_fp8.comm.ledger", "from zeropp_fp8.formats import make_format\nfrom zeropp_fp8.config import resolve"),
    ("zeropp_fp8.plugin", "from zeropp_fp8 import zero, config\nimport zeropp_fp8.comm"),
    ("zeropp_fp8.run", "import zeropp_fp8"),
]
CHANGES = [
    ("import deepspeed\ndeepspeed.zero.Init = 3", [2]),
    ("import deepspeed.comm as dist\ndist.x = 3", [2]),
    ("from deepspeed.runtime import engine as e\nsetattr(e.Engine, 'step', 3)", [2]),
    ("def f():\n    from deepspeed import ops\n    ops.__compatible_ops__['x'] = 1", [3]),
    ("import deepspeed\ndel deepspeed.zero", [2]),
    ("import deepspeed\nmine = deepspeed.zero\nmine2 = {}\nmine2[deepspeed] = 1", []),
]


def test_the_house():
    """Every file belongs to a part, imports point downwards, features stand above what they extend, in no circle."""
    assert {part_of(module) for module in FILES} == set(MAY_IMPORT)
    sources = {module: path.read_text() for module, path in FILES.items()}
    upward = [upward_imports(source, module, FILES[module].name == "__init__.py") for module, source in sources.items()]
    assert [lines for lines in upward if lines] == []
    changes = {module: changes_of_deepspeed(source) for module, source in sources.items()}
    assert {part_of(module) for module, lines in changes.items() if lines} == {"plugin"}, changes

    inside = {module: path for module, path in FILES.items() if part_of(module) == "zero"}
    assert {room_of(module) for module in inside} == set(ROOMS)
    wrong = []
    for module, path in inside.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and part_of(node.module or "") == "zero":
                names = (
                    [f"{node.module}.{a.name}" for a in node.names] if node.module.count(".") == 1 else [node.module]
                )
                own = room_of(module)
                wrong += [(module, name) for name in names if room_of(name) != own and room_of(name) not in ROOMS[own]]
    assert wrong == []

    left = dict(ROOMS)
    while left:
        free = [room for room, needs in left.items() if not needs & set(left)]
        assert free, f"a circle in {sorted(left)}"
        for room in free:
            del left[room]


def test_no_circle_of_imports():
    """Between any files, for type checking and inside functions too: each can be read after what it is made of."""
    imports = {
        module: imported_files(path.read_text(), module, path.name == "__init__.py") for module, path in FILES.items()
    }
    assert circles(imports) == []
    assert imports["zeropp_fp8.zero.gather.gatherer"] >= {"zeropp_fp8.zero.gather.units", "zeropp_fp8.comm.ledger"}


def test_the_checks_see_what_they_are_for():
    own, other, third = "zeropp_fp8.zero.gather.units", "zeropp_fp8.zero.gather.trace", "zeropp_fp8.zero.session"
    for source in (
        f"from {other} import Fetch",
        "from zeropp_fp8.zero.gather import trace",
        "from .trace import Fetch",
        "from . import trace",
        f"import {other} as t",
        f"if TYPE_CHECKING:\n    from {other} import Fetch",
        f"def f():\n    from {other} import Fetch",
    ):
        assert imported_files(source, own, False) == {other}, source
    assert imported_files("import torch\nfrom zeropp_fp8.zero import gather\nimport zeropp_fp8", own, False) == set()
    assert circles({own: {other}, other: {own}, third: {own}}) == [other, own]
    assert circles({own: {other}, other: set(), third: {own, other}}) == []
    for module, source in UPWARD:
        assert len(upward_imports(source, module)) == 1, (module, source)
    for module, source in DOWNWARD:
        assert upward_imports(source, module) == [], (module, source)
    for source, lines in CHANGES:
        assert changes_of_deepspeed(source) == lines, source


def test_the_ordinary_way_imports_no_option():
    names = ("offload", "stage3", "report")
    imports = ", ".join(f"zeropp_fp8.zero.{name}" for name in names)
    code = f"import sys, {imports}; print(*(m for m in sys.modules if m.startswith('zeropp_fp8.zero.')))"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
        env=environment,
    )
    loaded = done.stdout.split()
    assert "zeropp_fp8.zero.gather.gatherer" in loaded
    assert [module for module in loaded if room_of(module) in OPTIONAL] == []


def test_importing_the_package_is_light():
    """Reading the configuration or asking for help must not wait seconds for torch and DeepSpeed."""
    code = "import sys, zeropp_fp8; print(sorted({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=HANG, check=True
    )
    assert done.stdout.strip() == "[]"


def test_new_tensors_say_what_they_are():
    """A script may have set torch's default dtype to bf16, which kernels would read as fp32, and its default device."""
    floating, others, unsaid = {"zeros", "ones", "empty", "rand", "randn"}, {"tensor", "full", "arange", "randint"}, []
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "doctor":  # a process of its own
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            maker, said = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
            on_meta = "device='meta'" in map(ast.unparse, call.keywords)
            if maker.startswith("torch.") and call.func.attr in floating | others and None not in said and not on_meta:
                needs = {"dtype", "device"} if call.func.attr in floating else {"device"}
                unsaid += [f"{path.relative_to(PACKAGE)}:{call.lineno}: {name}" for name in needs - said]
    assert not unsaid


def test_what_is_not_about_deepspeed_knows_none():
    """Another backend then is an addition to sharded.py, not a change of every folder."""
    looked_at = 0
    for path in sorted(p for folder in OF_NO_BACKEND for p in (PACKAGE / folder).rglob("*.py")):
        if str(path.relative_to(PACKAGE)) in ADAPTERS:
            continue
        source, looked_at = path.read_text(), looked_at + 1
        modules = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {getattr(node, "module", None) or node.names[0].name for node in modules}
        assert not any(name.split(".")[0] == "deepspeed" for name in names), path
        assert not re.findall(ON_PARAMETERS, source), path
    assert looked_at > 100
