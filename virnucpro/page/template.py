"""The templates of the pages: HTML, with Python's expressions in tags like those of Jinja.

``{{ value }}`` writes a value, escaped; ``value | filter(more)`` passes it through a filter. Tags
with an end (``{% end... %}``) are ``if`` with ``elif`` and ``else``; ``for x in values if x``,
whose ``else`` is written if there is none; ``macro``; and ``block``, in a template that ``extends``
another. A line with nothing but such a tag leaves none behind. Expressions are read by their parts,
and never run as code.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

_ASSETS = Path(__file__).with_name("assets")
_TAG = re.compile(r"(?m)(?:^[ \t]*)?(\{%.*?%\}|\{#.*?#\})\n?|(\{\{.*?\}\})")
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
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, all_: one in all_,
}
_FUNCTIONS = {"enumerate": enumerate, "range": range}
_FILTERS: Mapping[str, Callable[..., object]] = {"length": len, "upper": str.upper}

_Scope = dict[str, Any]  # what the names of expressions mean
_Nodes = list[Any]  # text, expressions, and the tuples below


class Safe(str):
    """Text that is HTML already."""

    __slots__ = ()


class _If(NamedTuple):
    condition: ast.expr
    then: _Nodes
    otherwise: _Nodes


class _For(NamedTuple):
    loop: ast.comprehension
    body: _Nodes
    otherwise: _Nodes


class _Macro(NamedTuple):
    arguments: ast.arguments
    body: _Nodes


class _Block(NamedTuple):
    name: str


class _Template(NamedTuple):
    nodes: _Nodes
    blocks: dict[str, _Nodes]
    macros: dict[str, _Macro]


def fill(name: str, words: Mapping[str, Any], filters: Mapping[str, Callable[..., object]]) -> str:
    """The text of a template, by what its names mean, alone and behind a ``|``.

    Raises:
        LookupError, AttributeError: one of them means nothing.
    """
    return write(_load(name), words, filters)


def write(
    template: _Template, words: Mapping[str, Any], filters: Mapping[str, Callable[..., object]]
) -> str:
    """The same of a template that was read."""
    scope = {**_FUNCTIONS, **words}
    scope |= {f"|{name}": filter_ for name, filter_ in {**_FILTERS, **filters}.items()}
    scope |= {
        name: partial(_call, template, scope, macro) for name, macro in template.macros.items()
    }
    return "".join(_write(template, template.nodes, scope))


def asset(name: str) -> str:
    """A file of the pages."""
    return (_ASSETS / name).read_text(encoding="utf-8")


# Reading


@cache
def _load(name: str) -> _Template:
    return read(asset(name))


def read(text: str) -> _Template:
    """The parts of a template."""
    template = _Template([], {}, {})
    nodes, end = _read(_tags(text.removesuffix("\n")), template)
    assert not end, f"{end} ends nothing"
    if not template.nodes:  # else they are those of the template that it extends
        template.nodes.extend(nodes)
    return template


def _tags(text: str) -> Iterator[str]:
    """Text and tags in turn; comments are left out."""
    for part in _TAG.split(text):
        if part and not part.startswith("{#"):
            yield part


def _read(tags: Iterator[str], template: _Template) -> tuple[_Nodes, str]:
    """The nodes up to the tag that ends them, and that tag; blocks and macros by their names."""
    nodes: _Nodes = []
    for tag in tags:
        if tag.startswith("{{"):
            nodes.append(_expression(tag[2:-2]))
        elif not tag.startswith("{%"):
            nodes.append(tag)
        else:
            word, _, rest = tag[2:-2].strip().partition(" ")
            if word not in _READERS:
                assert word.startswith(("end", "else", "elif")), f"there is no tag {word}"
                return nodes, f"{word} {rest}"
            nodes += _READERS[word](rest, tags, template)
    return nodes, ""


def _expression(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _read_if(condition: str, tags: Iterator[str], template: _Template) -> _Nodes:
    then, end = _read(tags, template)
    word, _, rest = end.partition(" ")
    otherwise: _Nodes = []
    if word == "elif":
        otherwise = _read_if(rest, tags, template)
    elif word == "else":
        otherwise, _ = _read(tags, template)
    return [_If(_expression(condition), then, otherwise)]


def _read_for(loop: str, tags: Iterator[str], template: _Template) -> _Nodes:
    listed = _expression(f"[0 for {loop}]")
    assert isinstance(listed, ast.ListComp)
    body, end = _read(tags, template)
    otherwise = _read(tags, template)[0] if end.startswith("else") else []
    return [_For(listed.generators[0], body, otherwise)]


def _read_macro(signature: str, tags: Iterator[str], template: _Template) -> _Nodes:
    (function,) = ast.parse(f"def {signature}: 0").body
    assert isinstance(function, ast.FunctionDef)
    template.macros[function.name] = _Macro(function.args, _read(tags, template)[0])
    return []


def _read_block(name: str, tags: Iterator[str], template: _Template) -> _Nodes:
    body = _read(tags, template)[0]
    template.blocks[name] = body
    return [_Block(name)]


def _read_parent(name: str, _: Iterator[str], template: _Template) -> _Nodes:
    parent = _load(name.strip('"'))
    template.nodes.extend(parent.nodes)
    template.blocks.update(parent.blocks)
    template.macros.update(parent.macros)
    return []


_READERS: Mapping[str, Callable[[str, Iterator[str], _Template], _Nodes]] = {
    "if": _read_if,
    "for": _read_for,
    "macro": _read_macro,
    "block": _read_block,
    "extends": _read_parent,
}


# Writing


def _write(template: _Template, nodes: _Nodes, scope: _Scope) -> Iterator[str]:
    for node in nodes:
        match node:
            case str():
                yield node
            case ast.expr():
                yield _escaped(_value(node, scope))
            case _If(condition, then, otherwise):
                yield from _write(template, then if _value(condition, scope) else otherwise, scope)
            case _For(loop, body, otherwise):
                yield from _write_loop(template, loop, body, otherwise, scope)
            case _Block(name):
                yield from _write(template, template.blocks[name], scope)


def _escaped(value: object) -> str:
    return value if isinstance(value, Safe) else str(value).translate(_ESCAPES)


def _write_loop(
    template: _Template, loop: ast.comprehension, body: _Nodes, otherwise: _Nodes, scope: _Scope
) -> Iterator[str]:
    inner, is_empty = dict(scope), True
    for value in _value(loop.iter, scope):
        _assign(loop.target, value, inner)
        if all(_value(condition, inner) for condition in loop.ifs):
            is_empty = False
            yield from _write(template, body, inner)
    if is_empty:
        yield from _write(template, otherwise, scope)


def _assign(target: ast.expr, value: Any, scope: _Scope) -> None:  # noqa: ANN401 - as it comes
    if isinstance(target, ast.Tuple):
        for part, one in zip(target.elts, value, strict=True):
            _assign(part, one, scope)
    else:
        assert isinstance(target, ast.Name)
        scope[target.id] = value


def _call(template: _Template, scope: _Scope, macro: _Macro, *values: object) -> Safe:
    names = [argument.arg for argument in macro.arguments.args]
    defaults = [_value(default, scope) for default in macro.arguments.defaults]
    n_missing = len(names) - len(values)
    values = (*values, *(defaults[-n_missing:] if n_missing else ()))
    inner = {**scope, **dict(zip(names, values, strict=True))}
    return Safe("".join(_write(template, macro.body, inner)))


def _value(node: ast.expr, scope: _Scope) -> Any:  # noqa: ANN401 - as it comes
    """
    Raises:
        LookupError, AttributeError: a name has no meaning.
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
        case ast.BinOp(
            op=ast.BitOr(), left=left, right=ast.Call(func=ast.Name(id=name), args=arguments)
        ):
            more = (_value(one, scope) for one in arguments)
            return scope[f"|{name}"](_value(left, scope), *more)
        case ast.BinOp(op=ast.BitOr(), left=left, right=ast.Name(id=name)):
            return scope[f"|{name}"](_value(left, scope))
        case (
            ast.BinOp(op=sign, left=left, right=right)
            | ast.Compare(ops=[sign], left=left, comparators=[right])
        ):
            return _OPERATORS[type(sign)](_value(left, scope), _value(right, scope))
    raise TypeError(f"{ast.unparse(node)} is no expression of a template")
