"""Descriptions of the fields of a file format: dotted name, type, default and meaning."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.files.yaml_file import models_in

TYPE_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text"}
"""Names of the scalar types of YAML."""


@dataclass(frozen=True)
class FieldDoc:
    """One field of a file format."""

    field: str
    """Dotted name, as `--set` takes it."""
    type: str
    default: str
    """`required`, `unset` or the default as JSON."""
    meaning: str
    """Docstring of the field as one line of text."""


def field_docs(model: type[BaseModel], prefix: str = "") -> list[FieldDoc]:
    """Return the fields of `model`, with nested models expanded to dotted names."""
    docs: list[FieldDoc] = []
    meanings = docstrings(model)
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        is_list = get_origin(annotation) is tuple
        nested = () if is_list else models_in(annotation)
        for inner in nested:
            fields = {doc.field for doc in docs}
            inner_docs = field_docs(inner, f"{prefix}{name}.")
            docs += [doc for doc in inner_docs if doc.field not in fields]
        if not nested:
            meaning = meanings.get(name, "")
            docs.append(FieldDoc(f"{prefix}{name}", _type(annotation), _default(field), meaning))
    return docs


@cache
def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of the fields that a class and its bases declare."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        statements = tree.body if isinstance(tree, ast.ClassDef) else []
        for statement, after in pairwise(statements):
            match statement, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
                case _:
                    pass
    return texts


def _type(annotation: Any) -> str:
    """Return the type of a field in words, without None."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        parts = [_type(part) for part in arguments if part is not NoneType]
        return " or ".join(dict.fromkeys(parts))
    if origin is tuple:
        return "list"
    if origin is dict:
        return "mapping"
    return TYPE_NAMES.get(annotation, "mapping")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) and value else json.dumps(value)
