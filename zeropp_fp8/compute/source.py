"""The source of a method, for replacing the forward of a module only where it is known."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap


@functools.cache
def says(function, argument: str, body: str) -> bool:
    """Whether a method of (self, argument) consists of these statements; it may name what it returns before."""
    definition = _definition(function)
    if definition is None or definition.decorator_list:
        return False
    if [each.arg for each in definition.args.args] != ["self", argument]:
        return False
    return _plain(definition.body) == _plain(ast.parse(textwrap.dedent(body)).body)


@functools.cache
def hands_on(function, first: str, second: str) -> bool:
    """Whether a method has a statement `x = self.first(...)`, and the next one begins with x what it gives second."""
    statements = getattr(_definition(function), "body", ())
    found = rf"^(\w+) = self\.{first}\(.*\)\n.*\bself\.{second}\((\w+=)?\1[,)]"
    return re.search(found, "\n".join(map(ast.unparse, statements)), re.MULTILINE) is not None


def _definition(function) -> ast.FunctionDef | None:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None  # there is no source
    return definition if isinstance(definition, ast.FunctionDef) else None


def _plain(statements: list[ast.stmt]) -> list[str]:
    """Statements as they compare: a name that stands for nothing but the result left out."""
    match statements:
        case [*first, ast.Assign(targets=[ast.Name(id=name)], value=value), ast.Return(value=ast.Name(id=returned))]:
            statements = [*first, ast.Return(value)] if name == returned else statements
    return [ast.dump(statement) for statement in statements]
