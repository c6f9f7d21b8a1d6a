"""Evaluates expressions over the fields of a case, such as "held_bytes + peak_bytes".

A case is one record of a result file, a dict by field name. A layout is plain data in a result file that says how the
report draws the file's cases (`lmsys.reports.layout`); expressions are texts in layouts. `View.only`, steps.py,
contest.py and tables.py call `value_of`, which evaluates an expression for a case. A name stands for the value of a
field, and for None if the case lacks the field.

An expression may have numbers, texts, f-strings, tuples, arithmetic, `and`, `or`, `not`, `a if b else c`,
`field["key"]`, calls of FUNCTIONS, and comparisons of two values: `a < b < c` is refused. Everything else is refused,
too, since anybody may write a result file. A new function is an entry of FUNCTIONS, a new operator one of OPERATORS.
"""

import ast
import operator
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from lmsys.reports import load, words
from lmsys.values import hold, shortly

MOST_CHARACTERS = 1000  # the greatest length of an expression, since a long one could take much time and memory
# Formats of numbers in f-strings, with at most nine decimals: {x:999999999} or {x:.999999999} could fill the memory.
FORMAT = r"[+,]{0,2}(\.\d)?[feg%]?"


def product(a: Any, b: Any) -> Any:
    """The product of two numbers. TypeError for others: a text times a number would be a long text."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a * b
    raise TypeError("only numbers are multiplied")


# A function here must be pure and cheap, and must not return much, since a result file chooses its arguments.
FUNCTIONS: dict[str, Any] = {
    "abs": abs,
    "ended": words.OUTCOMES.get,  # the word for an outcome without a time, such as "OOM"; None for "ok"
    "int": int,
    "joined": lambda *parts: ", ".join(filter(None, parts)),  # texts, without those that are empty or None
    "number": words.number,  # with three significant digits
    "ends": str.endswith,  # ends(text, suffix): True or False
    "without": str.removesuffix,  # without(text, suffix): the text
}
# There is no `**`, `<<` or `%`: a short expression could make a huge number, or by "%999999999d" a huge text.
OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: product,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda part, whole: part in whole,
    ast.NotIn: lambda part, whole: part not in whole,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
}


def value_of(text: str, case: Mapping[str, Any]) -> Any:
    """The expression's value for a case. InputError if the text is not such an expression.

    TypeError, ValueError, KeyError, IndexError or ArithmeticError if it cannot be computed from the case's values.
    """
    return _value(_parsed(text), case)


def names_in(text: str) -> list[str]:
    """The names of fields that the expression reads."""
    return [node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name) and node.id not in FUNCTIONS]


@cache
def _parsed(text: str) -> ast.expr:
    """The syntax tree of an expression; InputError if the text is too long or is no Python expression."""
    wanted = f"{shortly(text)} must be an expression of at most {MOST_CHARACTERS:,} characters"
    hold((len(text) <= MOST_CHARACTERS, wanted), error=load.InputError)
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise load.InputError(wanted) from None


def _value(node: ast.expr, case: Mapping[str, Any]) -> Any:
    """The value of a part of an expression. InputError for a part that is not allowed."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return case.get(name)
        case ast.Tuple(elts=elements):
            return tuple(_value(element, case) for element in elements)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(operand, case))
        case ast.BinOp(left=left, op=sign, right=right) | ast.Compare(left=left, ops=[sign], comparators=[right]) if (
            type(sign) in OPERATORS
        ):
            return OPERATORS[type(sign)](_value(left, case), _value(right, case))
        case ast.BoolOp(op=sign, values=[first, *others]):
            value = _value(first, case)
            for other in others:  # `and` goes on from a true value, `or` from a false one
                if bool(value) == isinstance(sign, ast.And):
                    value = _value(other, case)
            return value
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, case) else orelse, case)
        case ast.Subscript(value=whole, slice=key):
            return _value(whole, case)[_value(key, case)]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*[_value(arg, case) for arg in args])
        case ast.JoinedStr(values=parts):
            return "".join(str(_value(part, case)) for part in parts)
        case ast.FormattedValue(value=inside, format_spec=spec):
            style = str(_value(spec, case)) if spec else ""
            if re.fullmatch(FORMAT, style):
                return format(_value(inside, case), style)
    raise load.InputError(f"an expression of a layout cannot hold {shortly(ast.unparse(node))}")
