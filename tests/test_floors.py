"""The house stands as docs/design.md draws it: who may import whom, who may write, how code looks.

The rules read the sources' syntax trees, so an import inside a function or under `TYPE_CHECKING`
counts too. Each rule is a function from a repository to the list of its faults; the second half of
this file plants one fault at a time in a small copy and asks that it is found.
"""

import ast
import os
import pathlib
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

PILLARS = {
    "pallas_kernels": {"jax", "jaxtyping", "numpy"},
    "models": {
        "flax", "gguf", "jax", "jaxtyping", "jinja2", "numpy", "orbax", "safetensors", "tokenizers",
    },
    "storage": {"jaxtyping", "numpy", "tensorstore"},
}  # fmt: skip
"""What each pillar may import besides itself and the standard library."""

FLOORS = (
    "errors", "sealed", "spec", "formats", "cache", "policies", "config", "registry", "programs",
    "pull", "model", "load", "decode", "convert", "engine", "cluster", "plan", "eval", "serve",
    "cli",
)  # fmt: skip
"""The modules and packages of the roof, from the ground up: each imports only what is before it."""

MODEL_FREE = {"errors", "sealed", "spec", "formats", "cache", "policies", "config"}
"""Floors that know no model: a model is given an `attend`, and never meets the cache itself."""

WRITERS = {"storage", "kvjax.pull", "kvjax.cli"}
"""Parts that may write files. Elsewhere a write stands inside `with publish(path)`."""

WRITING_CALLS = {
    "copy", "copy2", "copyfile", "copyfileobj", "copytree", "hardlink_to", "link", "mkdtemp",
    "mkstemp", "move", "NamedTemporaryFile", "remove", "removedirs", "rename", "renames",
    "replace", "rmdir", "rmtree", "save", "save_file", "savetxt", "savez", "savez_compressed",
    "serialize_file", "symlink", "symlink_to", "TemporaryDirectory", "TemporaryFile", "tofile",
    "touch", "truncate", "unlink", "write_bytes", "write_text",
}  # fmt: skip
"""Calls that change files (a folder is none). AMBIGUOUS ones count on FILE_OWNERS only."""

AMBIGUOUS = {"copy", "link", "move", "remove", "rename", "replace", "save", "truncate"}
FILE_OWNERS = {"np", "numpy", "os", "pathlib", "shutil", "tempfile"}

VAGUE_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}
LARGEST_FILE = 25 * 1024  # bytes


def python_files(root, *folders):
    """Python files under some folders; the symlinked pillars count once, as the real folder."""
    for folder in folders:
        for where, _, names in os.walk(root / folder):
            if "__pycache__" not in where:
                yield from (pathlib.Path(where, name) for name in names if name.endswith(".py"))


def sources(root):
    """(path, dotted name, tree) of every file of the library, named as it stands in the folders."""
    for path in sorted(python_files(root, "kvjax", *PILLARS)):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        yield path, ".".join(parts), ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree, name, is_package):
    """(line, dotted name) of everything a module imports, `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                keep = name.split(".")
                keep = keep[: len(keep) - node.level + is_package]
                base = ".".join([*keep, base] if base else keep)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("import_module", "__import__") and node.args:
                text = node.args[0]
                if isinstance(text, ast.JoinedStr) and text.values:
                    text = text.values[0]  # f"package.{name}": what stands before the name decides
                known = isinstance(text, ast.Constant) and isinstance(text.value, str)
                yield node.lineno, text.value if known else "a name made at run time"


def import_faults(root):
    """Imports that the rule of docs/design.md, section 2, forbids."""
    for path, name, tree in sources(root):
        where = path.relative_to(root)
        part, *inner = name.split(".")
        if part == "kvjax" and inner and inner[0] not in FLOORS:
            yield f"{where}: {inner[0]} has no floor: give it a place in FLOORS"
            continue
        for line, target in imports(tree, name, path.stem == "__init__"):
            top, *below = target.split(".")
            if top == "kvjax" and below[:1] and below[0] in PILLARS:
                top, *below = below
            own = top == part and part in PILLARS
            if part in PILLARS:
                if not (own or top in PILLARS[part] or top in sys.stdlib_module_names):
                    yield f"{where}:{line}: {part} imports {target}"
            elif inner and top == "models" and inner[0] in MODEL_FREE:
                yield f"{where}:{line}: {inner[0]} must know no model, but imports {target}"
            elif inner and top == "kvjax":
                floor = below[0] if below else ""
                if floor not in FLOORS[: FLOORS.index(inner[0]) + 1]:
                    yield f"{where}:{line}: {inner[0]} imports {target}, which is no floor below it"


class Writes(ast.NodeVisitor):
    """Collects calls that write files outside `with publish(...)`, and reads of the environment."""

    def __init__(self):
        self.lines = []
        self.environment = []
        self.publishing = 0

    def visit_With(self, node):
        """Inside `with publish(...)` a write goes to a temporary name: it is allowed."""
        inside = any(
            isinstance(item.context_expr, ast.Call)
            and ast.unparse(item.context_expr.func).split(".")[-1] == "publish"
            for item in node.items
        )
        self.publishing += inside
        self.generic_visit(node)
        self.publishing -= inside

    def visit_Attribute(self, node):
        """Notes `os.environ` and `os.getenv`, however they are used."""
        if node.attr in ("environ", "environb", "getenv", "getenvb", "putenv"):
            self.environment.append(node.lineno)
        self.generic_visit(node)

    def visit_ImportFrom(self, node):
        """Notes `from os import environ`."""
        if node.module == "os" and any("env" in alias.name for alias in node.names):
            self.environment.append(node.lineno)

    def visit_Call(self, node):
        """Notes calls that create, change or remove files."""
        called = ast.unparse(node.func).split(".")
        if called[-1] in ("open", "fdopen", "memmap", "open_memmap"):
            # `path.open(mode)` has no path among its arguments, and NumPy maps to write by default.
            is_method = called != ["open"] and called[0] not in {"gzip", "io", "np", "numpy", "os"}
            modes = [k.value for k in node.keywords if k.arg == "mode"]
            modes += node.args[0 if is_method else 1 :][:1]
            mode = "r+" if "memmap" in called[-1] and not modes else "r"
            mode = "".join([mode, *(x.value for x in modes if isinstance(x, ast.Constant))])
            writes = any(letter in mode for letter in "wax+") or "O_" in ast.unparse(node)
        else:
            writes = called[-1] in WRITING_CALLS
            writes &= called[-1] not in AMBIGUOUS or called[0] in FILE_OWNERS
        if writes and not self.publishing:
            self.lines.append((node.lineno, ast.unparse(node.func)))
        self.generic_visit(node)


def writing_faults(root):
    """Writes to files outside the parts that may, and environment variables that are read."""
    for path, name, tree in sources(root):
        found = Writes()
        found.visit(tree)
        where = path.relative_to(root)
        for line in found.environment:
            yield f"{where}:{line}: an environment variable; take an argument or an option"
        if not any(name == writer or name.startswith(f"{writer}.") for writer in WRITERS):
            for line, call in found.lines:
                yield f"{where}:{line}: {call} writes a file; only {', '.join(sorted(WRITERS))} may"


def shape_faults(root):
    """Vague names, files that are too large, public things without a docstring."""
    for path in python_files(root, "kvjax", *PILLARS, "tests", "benchmarks"):
        where = path.relative_to(root)
        if VAGUE_NAMES & {path.stem.lower(), *(part.lower() for part in where.parts)}:
            yield f"{where}: name a module for what it does"
        if path.stat().st_size > LARGEST_FILE:
            yield f"{where}: {path.stat().st_size} bytes, more than {LARGEST_FILE}: split it"
    for path, _, tree in sources(root):
        for owner in [tree, *(x for x in tree.body if isinstance(x, ast.ClassDef))]:
            for thing in owner.body:
                is_function = isinstance(thing, ast.FunctionDef | ast.AsyncFunctionDef)
                if not (is_function or isinstance(thing, ast.ClassDef)):
                    continue
                if thing.name.startswith("_") or ast.get_docstring(thing):
                    continue
                if isinstance(owner, ast.ClassDef) and owner.name.startswith("_"):
                    continue
                if any("overload" in ast.unparse(x) for x in thing.decorator_list):
                    continue
                yield f"{path.relative_to(root)}:{thing.lineno}: {thing.name} has no docstring"
        if tree.body and not ast.get_docstring(tree):
            yield f"{path.relative_to(root)}: the module has no docstring"


def link_faults(root):
    """The pillars are installed as kvjax.NAME through relative symlinks."""
    for pillar in PILLARS:
        link = root / "kvjax" / pillar
        if not link.is_symlink() or os.readlink(link) != f"../{pillar}":
            yield f"kvjax/{pillar}: must be the relative symlink ../{pillar}"


RULES = (import_faults, writing_faults, shape_faults, link_faults)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_its_rules(rule):
    faults = list(rule(REPOSITORY))
    assert not faults, "\n" + "\n".join(faults)


@pytest.fixture
def small_house(tmp_path):
    """A repository with one file a part, in which every rule holds."""
    for part in ("kvjax", *PILLARS):
        (tmp_path / part).mkdir()
        (tmp_path / part / "__init__.py").write_text(f'"""{part}."""\n')
    for pillar in PILLARS:
        (tmp_path / "kvjax" / pillar).symlink_to(f"../{pillar}")
    for floor in ("cache", "decode"):
        (tmp_path / "kvjax" / floor).mkdir()
        (tmp_path / "kvjax" / floor / "__init__.py").write_text(f'"""{floor}."""\n')
    (tmp_path / "kvjax" / "spec.py").write_text('"""Spec."""\n')
    return tmp_path


GOOD = (
    (
        "kvjax/decode/loop.py",
        "from kvjax import cache\nfrom kvjax.models import build\nimport rich",
    ),
    ("kvjax/decode/loop.py", "from . import step\nfrom ..cache import init"),
    (
        "kvjax/cache/pool.py",
        "import jax\nfrom kvjax.spec import KVSpec\nfrom kvjax.cache.x import y",
    ),
    ("kvjax/__init__.py", "from kvjax.decode import generate\nfrom kvjax.spec import KVSpec"),
    ("models/llama.py", "import re\nfrom flax import nnx\nfrom kvjax.models.linear import apply"),
    ("models/llama.py", "import_module(f'kvjax.models.{name}')"),
    ("storage/files.py", "import os\nos.replace('a', 'b')\nopen('a', 'wb')"),
    ("kvjax/load.py", "with publish(path) as temporary:\n    save_file({}, temporary)"),
    ("models/gguf.py", "np.memmap(path, mode='r')"),
    ("kvjax/load.py", "open('a')\nopen('a', 'rb')\npath.open()\n'a'.replace('a', 'b')"),
    ("kvjax/spec.py", "def _private(): pass\nclass _Hidden:\n    def method(self): pass"),
)

BAD = (
    (import_faults, "pallas_kernels/k.py", "from kvjax.models import build", "kvjax.models.build"),
    (import_faults, "pallas_kernels/k.py", "import flax.nnx", "imports flax.nnx"),
    (import_faults, "storage/files.py", "def f():\n    import jax", ":3: storage imports jax"),
    (import_faults, "storage/files.py", "from kvjax.spec import KVSpec", "kvjax.spec.KVSpec"),
    (import_faults, "storage/files.py", "from kvjax import spec", "imports kvjax.spec"),
    (import_faults, "storage/files.py", "import kvjax", "storage imports kvjax"),
    (import_faults, "storage/files.py", "import_module('jax')", "imports jax"),
    (import_faults, "storage/files.py", "importlib.import_module(name)", "made at run time"),
    (import_faults, "storage/files.py", "import_module(f'kvjax.cli.{name}')", "kvjax.cli."),
    (import_faults, "storage/files.py", "import_module(f'{name}.core')", "made at run time"),
    (import_faults, "models/llama.py", "from ..storage import files", "models imports"),
    (import_faults, "models/llama.py", "if TYPE_CHECKING:\n    import kvjax.cache", "kvjax.cache"),
    (import_faults, "kvjax/cache/pool.py", "from kvjax.decode import generate", "no floor below"),
    (import_faults, "kvjax/cache/pool.py", "from ..decode import generate", "no floor below"),
    (import_faults, "kvjax/cache/pool.py", "import kvjax", "no floor below"),
    (import_faults, "kvjax/cache/pool.py", "from kvjax.models import build", "must know no model"),
    (import_faults, "kvjax/spec.py", "from kvjax import cache", "no floor below"),
    (import_faults, "kvjax/attic.py", "import jax", "attic has no floor"),
    (writing_faults, "models/gguf.py", "open(path, 'wb')", "open writes a file"),
    (writing_faults, "models/gguf.py", "open(path, mode='a')", "open writes a file"),
    (writing_faults, "models/gguf.py", "path.open('r+b')", "path.open writes"),
    (writing_faults, "models/gguf.py", "pathlib.Path(x).open('w')", "open writes"),
    (writing_faults, "models/gguf.py", "pathlib.Path(x).write_text('')", "write_text writes"),
    (writing_faults, "models/gguf.py", "np.save(path, x)", "np.save writes"),
    (writing_faults, "models/gguf.py", "np.memmap(path)", "np.memmap writes"),
    (writing_faults, "kvjax/load.py", "save_file(x, path)", "save_file writes"),
    (writing_faults, "kvjax/load.py", "os.rename(a, b)", "os.rename writes"),
    (writing_faults, "kvjax/load.py", "os.open(a, os.O_CREAT)", "os.open writes"),
    (writing_faults, "storage/files.py", "os.environ['A']", "an environment variable"),
    (writing_faults, "kvjax/cli/main.py", "from os import getenv", "an environment variable"),
    (shape_faults, "storage/utils.py", "", "name a module for what it does"),
    (shape_faults, "tests/helpers.py", "", "name a module for what it does"),
    (shape_faults, "kvjax/common/pages.py", "", "name a module for what it does"),
    (shape_faults, "kvjax/spec.py", "x = 1\n" * 5000, "split it"),
    (shape_faults, "kvjax/spec.py", "def public(): pass", "public has no docstring"),
    (shape_faults, "kvjax/spec.py", "class Public: pass", "Public has no docstring"),
    (
        shape_faults,
        "kvjax/spec.py",
        'class Public:\n    "Doc."\n    def method(self): pass',
        "method has no docstring",
    ),
)  # fmt: skip


def plant(house, place, text):
    """Adds one file with a docstring to the small house, or replaces one."""
    path = house / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""Planted."""\n{text}\n')


@pytest.mark.parametrize(("place", "text"), GOOD)
def test_what_is_allowed_passes(small_house, place, text):
    plant(small_house, place, text)
    assert [fault for rule in RULES for fault in rule(small_house)] == []


@pytest.mark.parametrize(("rule", "place", "text", "message"), BAD)
def test_a_planted_fault_is_found(small_house, rule, place, text, message):
    assert list(rule(small_house)) == []
    plant(small_house, place, text)
    (fault,) = rule(small_house)
    assert fault.startswith(place)
    assert message in fault


def test_a_pillar_that_is_no_symlink_is_found(small_house):
    (small_house / "kvjax" / "models").unlink()
    (small_house / "kvjax" / "models").mkdir()
    assert list(link_faults(small_house)) == [
        "kvjax/models: must be the relative symlink ../models"
    ]


def test_a_module_without_a_docstring_is_found(small_house):
    (small_house / "kvjax" / "spec.py").write_text("x = 1\n")
    assert list(shape_faults(small_house)) == ["kvjax/spec.py: the module has no docstring"]
