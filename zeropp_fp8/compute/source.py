"""The source of a method, for replacing the forward of a module only where it is known."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap


@functools.cache
def says(function, argument: str, body: str) -> bool:
    """Whether a method of (self, argument) consists of these statements; it may name what it returns before."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False  # there is no source
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return False
    if [each.arg for each in definition.args.args] != ["self", argument]:
        return False
    return _plain(definition.body) == _plain(ast.parse(textwrap.dedent(body)).body)


def _plain(statements: list[ast.stmt]) -> list[str]:
    """Statements as they compare: a name that stands for nothing but the result left out."""
    match statements:
        case [*first, ast.Assign(targets=[ast.Name(id=name)], value=value), ast.Return(value=ast.Name(id=returned))]:
            statements = [*first, ast.Return(value)] if name == returned else statements
    return [ast.dump(statement) for statement in statements]
