"""The environment of chat templates: jinja2's sandbox, and limits on what a template may compute.

The sandbox keeps a template from attributes and modules, not from running for ever.  Here every
iteration of a loop and every call, filter and test checks the clock first; what a single operation
can make is limited, since nothing can interrupt it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_COUNT = 1 << 20  # characters or items by a factor, bits by an exponent, or a width
MAX_RESULT = 1 << 26  # characters or items that are put together
# Their numbers say how long the result is.
WITH_WIDTHS = {"batch", "center", "format", "indent", "slice", "tojson", "truncate", "wordwrap"}
WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(?:\*|\d{7})")  # %9999999d or %*d
WIDE_BRACES = re.compile(r"\{[^{}]*\d{7}")  # {:9999999}

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


@contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Templates rendered within it raise TimeoutError once it is over."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def in_time() -> bool:
    """True.  Raises TimeoutError if the time of `time_limit` is over."""
    if time.monotonic() > _deadline.get():
        raise TimeoutError
    return True


class TimedCode(CodeGenerator):
    """A template's Python code: loops check the clock for each item, filtered ones too."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, nodes.ExprStmt(_call("in_time", []), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("in_time", []), node.test, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.visit(_call("join", node.nodes), frame)


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    """A call of a function of the environment, whatever that name is in the template."""
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    code_generator_class = TimedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    filters: dict[str, Callable[..., Any]]
    tests: dict[str, Callable[..., Any]]
    globals: dict[str, Any]

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """filters: besides those of jinja2, or in their place"""
        super().__init__(**options)
        del self.globals["lipsum"]  # filler text of any length
        self.in_time = in_time
        self.join = _join
        every = {**self.filters, **filters}
        self.filters = {name: _timed(name, one) for name, one in every.items()}
        self.tests = {name: _timed(name, test) for name, test in self.tests.items()}

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        in_time()
        if obj is in_time:
            return True
        method = getattr(obj, "__wrapped__", obj)  # str.format comes wrapped
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            named = args[0] if method.__name__ == "format_map" and args else kwargs
            _check_widths([*args, *dict(named).values()])
            if method.__name__ in ("format", "format_map"):
                _check_format(text, WIDE_BRACES)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        in_time()
        if operator == "+" and _size(left) + _size(right) > MAX_RESULT:
            raise SecurityError(f"`+` would make more than {MAX_RESULT} characters or items")
        if operator == "*" and _product(left, right) > MAX_COUNT:
            raise SecurityError(f"`*` would make more than {MAX_COUNT} characters, items or bits")
        if operator == "**" and _bits(left) * _number(right) > MAX_COUNT:
            raise SecurityError(f"`**` would make a number of more than {MAX_COUNT} bits")
        if operator == "%" and isinstance(left, str):
            _check_format(left, WIDE_PERCENT)
        return super().call_binop(context, operator, left, right)


def _timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that checks the clock, and the widths among its arguments."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        in_time()
        if name in WITH_WIDTHS:
            _check_widths([*args[1:], *kwargs.values()])
            if name == "format":
                _check_format(str(args[0]), WIDE_PERCENT)
        return function(*args, **kwargs)

    return run


def _join(*parts: object) -> str:
    """What `~` does."""
    texts = list(map(str, parts))
    if sum(map(len, texts)) > MAX_RESULT:
        raise SecurityError(f"`~` would make more than {MAX_RESULT} characters")
    return "".join(texts)


def _check_widths(values: Iterable[Any]) -> None:
    for value in values:
        if _number(value) > MAX_COUNT:
            raise SecurityError(f"a width or count of {value}: at most {MAX_COUNT}")


def _check_format(text: str, wide: re.Pattern[str]) -> None:
    if wide.search(text):
        raise SecurityError("a format with a width of seven digits or more, or one that is passed")


def _size(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return abs(_number(value)).bit_length()


def _product(left: Any, right: Any) -> int:
    """Characters or items of a repetition, bits of a product."""
    if isinstance(left, int) and isinstance(right, int):
        return _bits(left) + _bits(right)
    return max(_size(left) * _number(right), _number(left) * _size(right))
