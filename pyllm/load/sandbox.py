"""A Jinja environment for templates from strangers: sandboxed, and with a bound on everything a template can make big or slow.

Jinja's sandbox keeps a template away from Python. It does not keep it from building a terabyte string or from looping for a year, so
this one (1) offers only listed filters, globals and string methods, (2) charges every loop iteration, call, filter and operation to the
`Budget` of the current rendering, and (3) checks the size of a result before it is made wherever an operation can multiply sizes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import Environment, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_batch, do_round, sync_do_slice
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from .budget import as_text, budget, check_size, weigh

# fmt: off
FILTERS = (
    "abs", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "int", "items",
    "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe",
    "select", "selectattr", "slice", "sort", "string", "sum", "title", "trim", "unique", "upper",
)
CALL = 8  # what a call, which may be of a macro, costs in loop iterations
STR_METHODS = frozenset((
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
    "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
    "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title",
    "upper",
))
# fmt: on


def _printed(value: Any) -> str:
    text = str(as_text(value))
    budget.get().print(len(text))
    return text


@pass_context
def _concat(_: Context, parts: list[Any]) -> str:
    texts = [str(as_text(p)) for p in parts]
    check_size(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _weighed(_: Context, value: Any) -> Any:
    weigh(value)
    return value


@pass_context
def _checked(_: Context, value: Any) -> Any:
    budget.get().charge()
    return value


def _steps(items: Any) -> Iterator[Any]:
    spent = budget.get()
    for item in items:
        spent.charge()
        yield item


@pass_context
def _stepped(_: Context, items: Any) -> Iterator[Any]:
    return _steps(items)


class _Bound(NodeTransformer):
    """Rewrite what the environment has no hook for: loops, comparisons, `~`, fixed text, and literals that may hold large values."""

    def _through(self, node: nodes.Node, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise TemplateError("recursive loops are not supported")
        self.generic_visit(node)
        node.iter = self._through(node.iter, "_stepped")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._through(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._through(node.expr, "_checked")
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return self._through(nodes.Const(node.data, lineno=node.lineno), "_checked")  # fixed text is then printed like the rest

    def _literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if stored else self._through(node, "_weighed")

    visit_List = visit_Tuple = visit_Dict = _literal


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is just its content."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _charged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for the size of what it is given, and for each item of what it makes lazily."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, (str, list, tuple, dict)):
                weigh(value)
        result = function(*args, **kwargs)
        return _steps(result) if isinstance(result, Iterator) else result

    return run


def _check_replace(text: str, old: str, new: str) -> None:
    check_size(len(text) + text.count(old) * len(new))


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(as_text(text)), str(as_text(old)), str(as_text(new))
    _check_replace(text, old, new)
    replaced: str = text.replace(old, new, -1 if count is None else count)
    return replaced


def _join(values: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        raise SecurityError("uses join(attribute=...), which is not supported: map(attribute=...) first")
    texts = [str(as_text(v)) for v in values]
    check_size(sum(map(len, texts)) + len(texts) * len(str(d)))
    return str(d).join(texts)


def _columns(kind: Callable[..., Any]) -> Callable[..., Any]:
    """slice and batch without their fill value, with a bound on how many columns they make out of nothing."""

    def slice_or_batch(value: Any, count: int) -> Any:
        check_size(abs(count))
        return kind(value, count)

    return slice_or_batch


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > 16:
        raise SecurityError("rounds to more than 16 digits")
    return do_round(value, precision, method)  # type: ignore[arg-type]


def _depth(value: Any) -> int:
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return 1 + max(map(_depth, children), default=0)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    step = len(indent) if isinstance(indent, str) else int(indent or 0)
    check_size(weigh(value) * (1 + step * _depth(value) if step > 0 else 1))
    weigh(separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    if len(form) > 256 or any(c.isdigit() for c in form):  # a width, as in %1000000Y, is honoured by the C library
        raise SecurityError("uses strftime_now with a format of more than 256 characters or with digits")
    return datetime.now().strftime(form)


def _raise_exception(message: Any) -> str:
    raise TemplateError(str(as_text(message)))


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError("sets a namespace attribute that starts with an underscore")


class _PlainNamespace(Namespace):
    """Jinja's namespace() without underscored names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)  # a function, so that a template cannot reach the type


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """See the head of this file."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=_printed)
        self.optimized = False  # nothing of a template runs before there is a budget
        kept = {name: self.filters[name] for name in FILTERS}
        kept |= {"tojson": _tojson, "replace": _replace, "join": _join, "round": _round}
        kept |= {"slice": _columns(sync_do_slice), "batch": _columns(do_batch)}
        self.filters = {name: _charged(function) for name, function in kept.items()}
        self.filters |= {"_concat": _concat, "_weighed": _weighed, "_stepped": _stepped, "_checked": _checked}
        self.globals = {
            "range": self.globals["range"],
            "dict": _dict,
            "namespace": _PlainNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Bound().visit(source), *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja hands out str.format before it asks is_safe_attribute; a width in a format makes a string of any length."""
        if super().wrap_str_format(value) is not None:
            raise SecurityError("uses str.format, which is not supported: use ~")
        return None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in STR_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget.get().charge(CALL)
        weigh([args, kwargs])
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            weigh(owner)
            if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
                _check_replace(owner, args[0], args[1])
            elif name == "join" and args:
                return _join(args[0], owner)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for value in (left, right):
            if isinstance(value, int) and value.bit_length() > 4096:
                raise SecurityError("makes a number of more than 4096 bits")
        if operator == "%" and isinstance(left, str):
            raise SecurityError("uses % on a string, which is not supported: use ~")
        if operator == "**" and not (isinstance(right, (int, float)) and abs(right) <= 64):
            raise SecurityError("raises to a power of more than 64")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    check_size(weigh(value) * max(times, 0))
        if operator == "+":
            check_size(sum(weigh(v) for v in (left, right) if isinstance(v, (str, list, tuple))))
        budget.get().charge()
        return super().call_binop(context, operator, left, right)
