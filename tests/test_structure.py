"""The shape of the code, kept by a test: layers, imports, sizes, names. CONTRIBUTING.md says why.

What may differ is written down here with its reason, and an entry that is no longer needed fails as well.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agentrl", "envs", "retriever")

pytestmark = pytest.mark.slow  # all files are read and parsed

LONGEST_FUNCTION = 40  # lines of code
LONGEST_FILE = 500  # lines
LONG_FUNCTIONS_SHARE = 0.03

# agentrl's layers, by the first name below the package. A module imports lower layers only, and within L2 to L4 its own subsystem.
LAYERS = {
    0: {"__init__", "config", "env", "errors", "faults", "record", "resolve", "seeds", "types"},
    1: {"algorithm", "buffer_api", "collective", "engine_api", "engine_messages", "ports", "wire"},
    2: {"buffer", "data", "engine", "learner", "metrics", "rewards", "rollout", "weights"},
    3: {"plan", "system", "viewer"},
    4: {"__main__", "cli", "evaluate"},
}
TESTING = "agentrl.testing"  # imports anything; nothing imports it
OF_RETRIEVER = {"retriever.transport", "retriever.batching"}  # what agentrl may import of it ...
COMMANDS = {"retriever.__main__", "envs.__main__"}  # ... and, inside a function of a command, these
# What envs may import of it: the contract, and what finds and calls a `module:function` in their options as everywhere else in a recipe.
OF_AGENTRL = {"agentrl.env", "agentrl.errors", "agentrl.types", "agentrl.resolve"}

# Packages whose processes run without torch; importing all of them must not import it.
TORCH_FREE = (
    "agentrl.buffer",
    "agentrl.config",
    "agentrl.data",
    "agentrl.rollout",
    "agentrl.buffer_api",
    "agentrl.engine_api",
    "agentrl.engine_messages",
    "agentrl.cli",
    "retriever",
    "envs",
)
HEAVY = ("torch", "transformers", "ray")

# "module:function" -> why it is longer than LONGEST_FUNCTION.
LONG_FUNCTIONS: dict[str, str] = {}

# "module:function" -> why everything is caught there.
CATCH_ALL: dict[str, str] = {
    "agentrl.buffer.app:_Server.evaluation_loop": "an evaluation's report: what fails in the hook ends the run with its cause",
    "agentrl.data.hub:from_hub": "the hub's library: its network errors are httpx's, httpx2's or requests', by its version, mapped to a DataError",
    "agentrl.engine.stops:TokenText.load": "a foreign file: tokenizers raises bare Exception, mapped to an EngineError",
    "agentrl.engine.thread:EngineThread._run": "the engine: its requests are answered and its health turns bad",
    "agentrl.engine.thread:EngineThread.call.run": "one command: its caller gets the error, the engine goes on",
    "agentrl.metrics.sinks:_contained": "a tracker: it is left out from then on, the run goes on",
    "agentrl.resolve:called": "the user's function: whatever it raises is told with its name in the recipe",
    "agentrl.resolve:resolve": "the user's module: whatever its import raises is told with its name",
    "agentrl.rollout.episode:_close": "an environment's own clean-up: the episode it belonged to stands",
    "agentrl.rollout.worker:RolloutWorker._outcome": "an episode: an environment may raise anything, and its ticket closes by cause",
    "agentrl.system.child:main": "a process: told to the driver, then it ends",
    "agentrl.system.ray_launcher:RoleActor.run": "an actor: told to the driver as a plain record",
    "retriever.encoders.tokens:TextTokenizer.__init__": "a foreign file: tokenizers raises bare Exception, mapped to an EncoderFault",
    "retriever.batching:Batcher._finish": "a batch: each of its requests gets the error",
    "retriever.batching:Batcher._run": "a batch in its first stage: each of its requests gets the error",
    "retriever.local:LocalService.reload": "an index that is opened again: who asked for it is told, and the one before goes on",
}

# "module:function" -> why a task is started there outside of a TaskGroup.
BARE_TASKS = {"retriever.app:_Connected._watch": "it is cancelled when its block ends, and waits for nothing but its client's leaving"}

# One name per idea: what other systems call ours.
FORBIDDEN_NAMES = {
    "info_mask": "loss_mask",
    "response_mask": "loss_mask",
    "state_masking": "loss_mask",
    "action_mask": "loss_mask",
    "completion_mask": "loss_mask",
    "old_logprobs": "behaviour_logprobs",
    "old_log_probs": "behaviour_logprobs",
    "rollout_log_probs": "behaviour_logprobs",
    "rollout_logprobs": "behaviour_logprobs",
    "replay_store": "ReplayBuffer",
}
FORBIDDEN_FILES = re.compile(r"^(utils?|helpers?|common|misc|tools?|manager|base)$")


@dataclass(frozen=True)
class Module:
    """A source file."""

    name: str
    path: Path

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def subsystem(self) -> str:
        """`agentrl.data` of `agentrl.data.order`."""
        return ".".join(self.name.split(".")[:2])


@dataclass(frozen=True)
class Import:
    """One import of a module of ours."""

    importer: Module
    target: str
    names: tuple[str, ...]
    line: int
    inside_function: bool

    def __str__(self) -> str:
        return f"{self.importer.path.relative_to(ROOT)}:{self.line}: {self.importer.name} imports {self.target}"


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(Module(name=".".join(parts[:-1] if parts[-1] == "__init__" else parts), path=path))
    return tuple(found)


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for module in modules() for found in imports_of(module))


def imports_of(module: Module) -> Iterator[Import]:
    known = {other.name for other in modules()}
    inner = {child for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for child in ast.walk(node)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in PACKAGES:
                    yield Import(module, alias.name, (), node.lineno, node in inner)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            assert node.module is not None
            assert node.level == 0, f"{module.name}:{node.lineno}: imports are absolute"
            submodules = [alias.name for alias in node.names if f"{node.module}.{alias.name}" in known]
            for name in submodules:
                yield Import(module, f"{node.module}.{name}", (), node.lineno, node in inner)
            if names := tuple(alias.name for alias in node.names if alias.name not in submodules):
                yield Import(module, node.module, names, node.lineno, node in inner)


def layer(name: str) -> int | None:
    part = name.split(".")[1] if "." in name else "__init__"
    return next((level for level, parts in LAYERS.items() if part in parts), None)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions with their qualified names."""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", child
            name = getattr(child, "name", None) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else None
            yield from below(child, f"{prefix}{name}." if name else prefix)

    return below(tree, "")


def lines_of_code(source: str) -> set[int]:
    """Numbers of the lines that hold code: no blanks, comments or docstrings."""
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def python_files() -> list[Path]:
    folders = [*PACKAGES, "tests", "benchmarks", "examples"]
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def none_of(wrong: Iterable[str]) -> None:
    """Fail with all of them, one per line."""
    told = list(wrong)
    assert not told, "\n" + "\n".join(told)


def test_every_module_of_agentrl_has_a_layer():
    lost = [module.name for module in modules() if module.package == "agentrl" and module.subsystem != TESTING and layer(module.name) is None]
    none_of(f"{name}: give it a place in LAYERS" for name in lost)


def test_modules_import_lower_layers_and_their_own_subsystem_only():
    wrong = []
    for found in imports():
        if found.importer.package != "agentrl" or not found.target.startswith("agentrl") or found.importer.subsystem == TESTING:
            continue
        own, other = layer(found.importer.name), layer(found.target)
        same = found.importer.subsystem == ".".join(found.target.split(".")[:2])
        sideways = own == other and own in (0, 1, 4)  # within L0, L1 and L4 cycles are what is forbidden
        if not (same or sideways or (own is not None and other is not None and other < own)):
            wrong.append(f"{found} (L{own} -> L{other})")
    none_of(wrong)


def test_nothing_imports_the_fakes_for_tests():
    none_of([str(found) for found in imports() if found.target.startswith(TESTING) and found.importer.subsystem != TESTING])


def test_agentrl_imports_no_environment_and_only_leaves_of_the_retriever():
    wrong = []
    for found in imports():
        if found.importer.package != "agentrl" or found.target.startswith("agentrl") or found.importer.subsystem == TESTING:
            continue
        if found.target not in OF_RETRIEVER and not (found.target in COMMANDS and found.inside_function):
            wrong.append(str(found))
    none_of(wrong)


def test_the_retriever_imports_nothing_of_ours():
    none_of([str(found) for found in imports() if found.importer.package == "retriever" and not found.target.startswith("retriever")])


def test_environments_import_the_contract_and_the_retrievers_client_only():
    allowed = OF_AGENTRL | {"retriever.client"}
    none_of([str(f) for f in imports() if f.importer.package == "envs" and not f.target.startswith("envs") and f.target not in allowed])


def test_there_are_no_import_cycles():
    graph: dict[str, set[str]] = {module.name: set() for module in modules()}
    for found in imports():
        if not found.inside_function and found.target in graph:
            graph[found.importer.name].add(found.target)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "import cycle: " + " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_functions_are_short():
    longer, total = {}, 0
    for module in modules():
        code = lines_of_code(module.source)
        for name, node in functions(module.tree):
            total += 1
            length = len([line for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in code])
            if length > LONGEST_FUNCTION:
                longer[f"{module.name}:{name}"] = length
    none_of(f"{name}: {length} lines of code" for name, length in longer.items() if name not in LONG_FUNCTIONS)
    assert set(LONG_FUNCTIONS) - set(longer) == set(), "no longer too long: take it off the list"
    assert len(longer) <= LONG_FUNCTIONS_SHARE * total


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    none_of(f"{name}: {length} lines" for name, length in lengths.items() if length > LONGEST_FILE)


def test_every_file_says_what_it_is():
    none_of([module.name for module in modules() if not ast.get_docstring(module.tree) and module.source.strip()])


def test_files_are_named_by_their_noun():
    none_of([str(path.relative_to(ROOT)) for path in python_files() if FORBIDDEN_FILES.match(path.stem)])


def test_public_functions_and_classes_are_in_all_and_all_exists():
    wrong = []
    for module in modules():
        if module.path.stem == "__main__" or all(map(dunder, top_level_names(module))):
            continue
        told, defined, bound = exported(module), public_definitions(module), top_level_names(module)
        if told is None:
            wrong.append(f"{module.name} has no __all__")
            continue
        wrong += [f"{module.name}: {name} is public and not in __all__" for name in sorted(defined - set(told))]
        wrong += [f"{module.name}: {name} is in __all__ and not there" for name in sorted(set(told) - bound)]
        wrong += [f"{module.name}: {name} is in __all__ and private" for name in told if name.startswith("_") and not dunder(name)]
    none_of(wrong)


def test_what_a_module_imports_from_another_is_public_there():
    by_name = {module.name: module for module in modules()}
    wrong = []
    for found in imports():
        told = exported(by_name[found.target]) if found.target in by_name else None
        for name in found.names:
            if told is not None and name not in told and not dunder(name):
                wrong.append(f"{found}: {name} is not in its __all__")
    none_of(wrong)


def dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def exported(module: Module) -> list[str] | None:
    for node in module.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "__all__":
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            return list(ast.literal_eval(node.value)) if node.value is not None else None
    return None


def public_definitions(module: Module) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in module.tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def top_level_names(module: Module) -> set[str]:
    names: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        else:
            names.update(child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store))
    return names


def test_everything_is_caught_only_where_a_failure_ends():
    found = {}
    for module in modules():
        for name, node in functions(module.tree):
            for child in own_nodes(node):
                if isinstance(child, ast.ExceptHandler) and catches_everything(child) and not ends_by_raising(child):
                    found[f"{module.name}:{name}"] = child.lineno
    none_of(f"{name}, line {line}" for name, line in found.items() if name not in CATCH_ALL)
    assert set(CATCH_ALL) - set(found) == set(), "nothing is caught there any more: take it off the list"


def catches_everything(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in kinds)


def ends_by_raising(handler: ast.ExceptHandler) -> bool:
    """Cleaning up and passing the error on swallows nothing."""
    return isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None


def test_one_name_for_one_idea():
    wrong = []
    for module in modules():
        for node in ast.walk(module.tree):
            for field in ("id", "attr", "arg", "name"):
                name = getattr(node, field, None)
                if isinstance(name, str) and name in FORBIDDEN_NAMES:
                    wrong.append(f"{module.name}:{getattr(node, 'lineno', '?')}: {name} is called {FORBIDDEN_NAMES[name]} here")
    none_of(wrong)


def test_no_task_or_thread_outlives_its_block():
    found = {}
    for module in modules():
        for name, node in functions(module.tree):
            found.update({f"{module.name}:{name}": child.lineno for child in own_nodes(node) if isinstance(child, ast.Call) and starts_alone(child)})
    none_of(f"{name}, line {line}: a bare task or a daemon thread" for name, line in found.items() if name not in BARE_TASKS)
    assert set(BARE_TASKS) - set(found) == set(), "no bare task there any more: take it off the list"


def starts_alone(call: ast.Call) -> bool:
    """A TaskGroup's own create_task is no bare one."""
    called, owner = getattr(call.func, "attr", getattr(call.func, "id", "")), getattr(getattr(call.func, "value", None), "id", "")
    daemon = any(keyword.arg == "daemon" and getattr(keyword.value, "value", None) is True for keyword in call.keywords)
    return daemon or called == "ensure_future" or (called == "create_task" and owner in ("asyncio", "loop"))


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """What is inside a function and not inside a function within it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from own_nodes(child)


def test_tests_use_fakes_and_patch_nothing_of_ours():
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            mock = isinstance(node, ast.ImportFrom | ast.Import) and "mock" in ast.dump(node).lower() and "MockClock" not in ast.dump(node)
            patch = isinstance(node, ast.Attribute) and node.attr in ("setattr", "setitem") and getattr(node.value, "id", "") == "monkeypatch"
            if mock or patch:
                wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', '?')}")
    none_of(wrong)


def test_tests_are_named_apart():
    """Test folders are no packages, so two files of one name would shadow one another."""
    stems = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({stem for stem in stems if stems.count(stem) > 1}) == []


@pytest.mark.slow
def test_what_runs_without_torch_imports_without_torch():
    names = [m.name for m in modules() if any(m.name == free or m.name.startswith(f"{free}.") for free in TORCH_FREE)]
    names = [name for name in names if not name.endswith("__main__")]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.stderr == ""
    assert ran.stdout == "[]\n"
