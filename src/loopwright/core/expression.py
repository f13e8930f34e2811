"""A safe evaluator for the expressions of a scenario: names, numbers, comparisons and arithmetic; no `eval`."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "exp": math.exp,
    "floor": math.floor,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "max": max,
    "min": min,
    "round": round,
    "sqrt": math.sqrt,
}
_MAX_LENGTH = 1000
_MAX_DEPTH = 100
_MAX_OPERAND = 1e6
"""Bounds that no real expression reaches: `9**9**9` must not hang a campaign."""


class Expression:
    """One parsed expression.

    >>> Expression("tile <= size and size % 2 == 0")({"tile": 8, "size": 256})
    True
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._tree = _parse(text)
        inner = {id(node.func) for node in ast.walk(self._tree) if isinstance(node, ast.Call)}
        inner |= {id(node.value) for node in ast.walk(self._tree) if isinstance(node, ast.Attribute)}
        self.names = frozenset(
            ast.unparse(node)
            for node in ast.walk(self._tree)
            if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in inner
        )

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The value. Raises ArithmeticError, ValueError or TypeError without one."""
        return _evaluate(self._tree, values)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


@lru_cache(maxsize=1024)
def _parse(text: str) -> ast.expr:
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"an expression of {len(text)} characters is too long (at most {_MAX_LENGTH})")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not an expression: {getattr(error, 'msg', error)}") from error
    for node in ast.walk(tree):
        _allow(node, text)
    level: list[ast.AST] = [tree]
    depth = 0
    while level := [child for node in level for child in ast.iter_child_nodes(node)]:
        depth += 1
    if depth > _MAX_DEPTH:
        raise ValueError(f"{text!r} is nested too deeply (at most {_MAX_DEPTH} levels)")
    return tree


def _allow(node: ast.AST, text: str) -> None:
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return
        case ast.Name() | ast.Load() | ast.BoolOp() | ast.Compare() | ast.IfExp() | ast.List() | ast.Tuple():
            return
        case ast.boolop() | ast.BinOp() | ast.UnaryOp():
            return
        case ast.Attribute(value=ast.Name() | ast.Attribute(), attr=name) if not name.startswith("_"):
            return  # a dotted name, such as trainer.lr; no attribute is ever looked up
        case ast.operator() if type(node) in _BINARY:
            return
        case ast.unaryop() if type(node) in _UNARY:
            return
        case ast.cmpop() if type(node) in _COMPARE:
            return
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return
        case ast.Call(func=ast.Name(id=name)):
            raise ValueError(f"{text!r} calls {name!r}; known functions: {', '.join(_FUNCTIONS)}")
    raise ValueError(
        f"{text!r} uses {type(node).__name__}; only names, numbers, strings, comparisons and arithmetic are allowed"
    )


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.Attribute():
            return values[ast.unparse(node)]
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _evaluate(left, values), _evaluate(right, values))
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_evaluate(operand, values))
        case ast.BoolOp(op=op, values=operands):
            results = (_evaluate(operand, values) for operand in operands)
            return all(results) if isinstance(op, ast.And) else any(results)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            return _compare(_evaluate(left, values), ops, comparators, values)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _evaluate(body if _evaluate(test, values) else orelse, values)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item, values) for item in items]
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name](*(_evaluate(argument, values) for argument in arguments))
    raise ValueError(f"cannot evaluate {type(node).__name__}")


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    if not numbers:
        raise TypeError(f"arithmetic needs numbers, not {left!r} and {right!r}")
    if isinstance(op, ast.Pow) and (
        abs(left) > _MAX_OPERAND or abs(right) > _MAX_OPERAND or abs(right) * int(abs(left)).bit_length() > 1024
    ):
        raise OverflowError(f"{left!r} ** {right!r} is too large")
    return _BINARY[type(op)](left, right)


def _compare(left: Any, ops: list[ast.cmpop], comparators: list[ast.expr], values: Mapping[str, Any]) -> bool:
    for op, comparator in zip(ops, comparators, strict=True):
        right = _evaluate(comparator, values)
        if not _COMPARE[type(op)](left, right):
            return False
        left = right
    return True
