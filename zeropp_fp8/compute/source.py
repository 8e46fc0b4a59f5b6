"""What a method says, for replacing the forward of a module only where it is known."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap


@functools.cache
def _definition(function) -> ast.FunctionDef | None:
    """The parsed source of a method without decorators; None where there is none."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    plain = isinstance(definition, ast.FunctionDef) and not definition.decorator_list
    return definition if plain else None


def returns(function, expression: str) -> bool:
    """Whether a method of (self, x) does nothing but return an expression, or name it and return the name."""
    definition = _definition(function)
    if definition is None or [argument.arg for argument in definition.args.args] != ["self", "x"]:
        return False
    match definition.body:
        case [ast.Return(value=value)]:
            pass
        case [ast.Assign(targets=[ast.Name(id=name)], value=value), ast.Return(value=ast.Name(id=returned))]:
            if name != returned:
                return False
        case _:
            return False
    return ast.dump(value) == ast.dump(ast.parse(expression, mode="eval").body)


def says(function, body: str) -> bool:
    """Whether a method consists of these statements, and takes (self, hidden_states)."""
    definition = _definition(function)
    if definition is None or [argument.arg for argument in definition.args.args] != ["self", "hidden_states"]:
        return False
    return [ast.dump(statement) for statement in definition.body] == [
        ast.dump(statement) for statement in ast.parse(textwrap.dedent(body)).body
    ]
