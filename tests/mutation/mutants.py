"""Which mutants there are: cosmic-ray's operators, at every place where a slip of the pen would change what is done."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

#: what replaces what: outside these families a mutant is a type error most of the time, and dies of any test
ARITHMETIC = {"Add", "Sub", "Mul", "Div", "FloorDiv"}
BINARY = [ARITHMETIC, {"Mod", "FloorDiv", "Sub"}, {"Pow", "Mul"}, {"BitOr", "BitAnd", "BitXor"}, {"LShift", "RShift"}]
COMPARISONS = [{"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"}, {"Is", "IsNot"}]
#: decorators that make a function faster and change nothing else
COMPILERS = {"cached_property", "called", "compiled", "entry", "inlined", "njit"}

Place = tuple[int, int]  # line from 1, column from 0


@dataclass(frozen=True)
class Mutant:
    """The `occurrence`-th place of `operator` in `module`, a path below the root; `place` is where."""

    module: str
    operator: str
    occurrence: int
    place: Place

    def code(self, source: str) -> str | None:
        """Return the mutated source, None where nothing is changed (1e38 + 1 is 1e38)."""
        changed = mutate_code(source, get_operator(self.operator)(), self.occurrence)
        return None if changed is None or _same(changed, source) else changed


def _same(one: str, other: str) -> bool:
    return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))


def sensible(operator: str) -> bool:
    """Whether what replaces and what is replaced are of one kind."""
    kind, *words = operator.partition("/")[2].split("_")
    if kind == "ReplaceBinaryOperator":
        return any(set(words) <= family for family in BINARY)
    if kind == "ReplaceComparisonOperator":
        return any(set(words) <= family for family in COMPARISONS)
    if kind == "ReplaceUnaryOperator":
        return "Delete" in words
    return not kind.startswith("Variable")


def _names_a_type(node: ast.Assign) -> bool:
    """Whether an assignment gives a name to a type: ``Vector = npt.NDArray[np.float32]``."""
    name = getattr(node.targets[0], "id", "").lstrip("_")
    return not name.isupper() and name[:1].isupper() and isinstance(node.value, ast.Subscript | ast.BinOp)


def silent(source: str) -> list[tuple[Place, Place]]:
    """Return where a mutant changes nothing that is promised: types, texts of errors, how code is compiled."""
    nodes: list[ast.expr | ast.stmt] = []
    spans = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise):
            nodes.append(node)
        elif isinstance(node, ast.AnnAssign):
            alias = getattr(node.annotation, "id", "") == "TypeAlias"
            nodes += [node.annotation, *([node.value] if alias and node.value else [])]
        elif isinstance(node, ast.Assign) and _names_a_type(node):
            nodes.append(node.value)
        elif isinstance(node, ast.arg) and node.annotation:
            nodes.append(node.annotation)
        elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            nodes.append(node)
        elif isinstance(node, ast.FunctionDef):
            nodes += [node.returns] if node.returns else []
            for decorator in node.decorator_list:
                function = decorator.func if isinstance(decorator, ast.Call) else decorator
                if getattr(function, "id", getattr(function, "attr", "")) in COMPILERS:
                    end = (decorator.end_lineno or 0, (decorator.end_col_offset or 0) + 1)
                    spans.append(((decorator.lineno, decorator.col_offset - 1), end))
    spans += [((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in nodes]
    return spans


def mutants_of(root: Path, module: Path) -> Iterator[tuple[tuple[Place, Place], Mutant]]:
    """Yield (the span that is replaced, mutant) for a file."""
    source = module.read_text(encoding="utf-8")
    spans = silent(source)
    nodes = list(ast_nodes(get_ast(source)))
    rows = source.splitlines()
    for name in filter(sensible, operator_names()):
        operator_class = get_operator(name)
        if operator_class.arguments():
            continue
        operator = operator_class()
        places = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (begin, end) in enumerate(places):
            alone = rows[end[0] - 1][end[1] :].lstrip().startswith((",", ")"))  # the * before keyword arguments
            if not (alone and "BinaryOperator" in name) and not any(first <= begin < last for first, last in spans):
                yield (begin, end), Mutant(str(module.relative_to(root)), name, occurrence, begin)


def sample(root: Path, package: str, n: int, seed: int) -> tuple[list[Mutant], int]:
    """Return `n` mutants of a package, each at a place of its own, and how many such places there are.

    Every place is equally likely, then every replacement there; so operators with many replacements do not count more.
    """
    places = defaultdict(list)
    for module in sorted((root / "ddlsim" / package).glob("*.py")):
        for span, mutant in mutants_of(root, module):
            places[mutant.module, span].append(mutant)
    rng = random.Random(f"{package} {seed}")
    chosen = []
    for key in rng.sample(sorted(places), len(places)):
        mutant = rng.choice(places[key])
        if mutant.code((root / mutant.module).read_text(encoding="utf-8")) is not None:
            chosen.append(mutant)
        if len(chosen) == n:
            break
    return chosen, len(places)
