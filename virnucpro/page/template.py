"""The template language of the pages: HTML with Python expressions in tags like those of Jinja.

``{{ value }}`` writes a value, escaped. Tags with an end (``{% end... %}``) are ``if`` with
``elif`` and ``else``; ``for x in values if x``, with an ``else`` for no values;
``macro``; and ``block``, in a template whose first line ``extends`` another. A line with nothing
but such a tag leaves no line. Expressions are interpreted by their syntax tree and never run as
code.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

_ASSETS = Path(__file__).with_name("assets")
_TAG = re.compile(r"(?m)(?:^[ \t]*)?(\{%.*?%\}|\{#.*?#\})\n?|(\{\{.*?\}\})")
_PARENT = re.compile(r'\{% extends "(.*)" %\}')
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "'": "&#39;", '"': "&#34;"})
_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, all_: one in all_,
}
_FUNCTIONS = {"enumerate": enumerate, "int": int, "len": len, "range": range}


class Safe(str):
    """Text that is already HTML."""

    __slots__ = ()


_Scope = dict[str, Any]  # values by name
_Part: TypeAlias = str | Callable[[_Scope], str]  # text, or a function that makes it
_Macros: TypeAlias = dict[str, Callable[..., Safe]]  # scope and arguments -> HTML


class _Template(NamedTuple):
    parts: list[_Part]
    macros: _Macros


def fill(name: str, words: Mapping[str, Any]) -> str:
    """Fill a template with values.

    Raises:
        LookupError, AttributeError: a name has no value.
    """
    return write(_load(name), words)


def write(template: _Template, words: Mapping[str, Any]) -> str:
    """Fill a template that is given as text."""
    scope = {**_FUNCTIONS, **words}
    scope |= {name: partial(macro, scope) for name, macro in template.macros.items()}
    return _text(template.parts, scope)


def asset(name: str) -> str:
    """A file of the pages."""
    return (_ASSETS / name).read_text(encoding="utf-8")


@cache
def _load(name: str) -> _Template:
    return read(asset(name))


def read(text: str) -> _Template:
    """The parts of a template, or of the template that it extends."""
    extends = _PARENT.match(text)
    parent = _load(extends[1]) if extends else _Template([], {})
    macros = dict(parent.macros)
    each = _TAG.split(text[extends.end() if extends else 0 :].removesuffix("\n"))
    tags = (part for part in each if part and not part.startswith("{#"))  # text and tags in turn
    parts, end = _read(tags, macros)
    assert not end, f"{end} ends nothing"
    return _Template(parent.parts or parts, macros)


def _read(tags: Iterator[str], macros: _Macros) -> tuple[list[_Part], str]:
    """Parse parts up to the tag that ends them, and return both; macros go into a table by name."""
    parts: list[_Part] = []
    for tag in tags:
        if tag.startswith("{{"):
            parts.append(partial(_escaped, _expression(tag[2:-2])))
        elif not tag.startswith("{%"):
            parts.append(tag)
        else:
            word, _, rest = tag[2:-2].strip().partition(" ")
            if word not in _READERS:
                assert word.startswith(("end", "else", "elif")), f"there is no tag {word}"
                return parts, f"{word} {rest}"
            parts.append(_READERS[word](rest, tags, macros))
    return parts, ""


def _text(parts: Iterable[_Part], scope: _Scope) -> str:
    return "".join([part if isinstance(part, str) else part(scope) for part in parts])


def _expression(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _escaped(node: ast.expr, scope: _Scope) -> str:
    value = _value(node, scope)
    return value if isinstance(value, Safe) else str(value).translate(_ESCAPES)


def _read_if(condition: str, tags: Iterator[str], macros: _Macros) -> _Part:
    test, (then, end) = _expression(condition), _read(tags, macros)
    word, _, rest = end.partition(" ")
    otherwise: list[_Part] = []
    if word == "elif":
        otherwise = [_read_if(rest, tags, macros)]
    elif word == "else":
        otherwise, _ = _read(tags, macros)
    return lambda scope: _text(then if _value(test, scope) else otherwise, scope)


def _read_for(loop: str, tags: Iterator[str], macros: _Macros) -> _Part:
    listed = _expression(f"[0 for {loop}]")
    assert isinstance(listed, ast.ListComp)
    [each] = listed.generators
    body, end = _read(tags, macros)
    otherwise = _read(tags, macros)[0] if end.startswith("else") else []

    def write_each(scope: _Scope) -> str:
        inner, texts = dict(scope), []
        for value in _value(each.iter, scope):
            _assign(each.target, value, inner)
            if all(_value(condition, inner) for condition in each.ifs):
                texts.append(_text(body, inner))
        return "".join(texts) if texts else _text(otherwise, scope)

    return write_each


def _assign(target: ast.expr, value: Any, scope: _Scope) -> None:  # noqa: ANN401 - as it comes
    if isinstance(target, ast.Tuple):
        for part, one in zip(target.elts, value, strict=True):
            _assign(part, one, scope)
    else:
        assert isinstance(target, ast.Name)
        scope[target.id] = value


def _read_macro(signature: str, tags: Iterator[str], macros: _Macros) -> _Part:
    (function,) = ast.parse(f"def {signature}: 0").body
    assert isinstance(function, ast.FunctionDef)
    names = [argument.arg for argument in function.args.args]
    defaults, (body, _) = function.args.defaults, _read(tags, macros)

    def call(scope: _Scope, *values: object) -> Safe:
        n_missing = len(names) - len(values)
        rest = [_value(default, scope) for default in defaults[len(defaults) - n_missing :]]
        return Safe(_text(body, {**scope, **dict(zip(names, (*values, *rest), strict=True))}))

    macros[function.name] = call
    return ""


def _read_block(name: str, tags: Iterator[str], macros: _Macros) -> _Part:
    """Parse a block: a macro without arguments that an extending template may replace."""
    _read_macro(f"block_{name}()", tags, macros)
    return lambda scope: str(scope[f"block_{name}"]())


_READERS: Mapping[str, Callable[[str, Iterator[str], _Macros], _Part]] = {
    "if": _read_if,
    "for": _read_for,
    "macro": _read_macro,
    "block": _read_block,
}


def _value(node: ast.expr, scope: _Scope) -> Any:  # noqa: ANN401 - as it comes
    """
    Raises:
        LookupError, AttributeError: a name has no value.
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return scope[name]
        case ast.Attribute(value=owner, attr=name):
            of = _value(owner, scope)
            return of[name] if isinstance(of, Mapping) else getattr(of, name)
        case ast.Subscript(value=owner, slice=key):
            return _value(owner, scope)[_value(key, scope)]
        case ast.IfExp(test=test, body=then, orelse=otherwise):
            return _value(then if _value(test, scope) else otherwise, scope)
        case ast.Call(func=function, args=arguments):
            return _value(function, scope)(*(_value(one, scope) for one in arguments))
    return _joined(node, scope)


def _joined(node: ast.expr, scope: _Scope) -> Any:  # noqa: ANN401 - as it comes
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, scope)
        case ast.BoolOp(op=ast.And(), values=[left, *rest]):
            return _value(left, scope) and all(_value(one, scope) for one in rest)
        case ast.BoolOp(op=ast.Or(), values=[left, right]):
            return _value(left, scope) or _value(right, scope)
        case (
            ast.BinOp(op=sign, left=left, right=right)
            | ast.Compare(ops=[sign], left=left, comparators=[right])
        ):
            return _OPERATORS[type(sign)](_value(left, scope), _value(right, scope))
    raise TypeError(f"{ast.unparse(node)} is no expression of a template")
