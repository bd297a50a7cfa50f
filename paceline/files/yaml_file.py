"""YAML files into frozen values, with errors that name file, line and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from contextlib import suppress
from importlib.resources.abc import Traversable
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from paceline.core.errors import UserError, did_you_mean, few_names, unreadable
from paceline.core.problem import problem_of_union
from paceline.core.secrets import has_secret
from paceline.files.documents import read_text

ModelT = TypeVar("ModelT", bound=BaseModel)
Document = dict[str, Any]
LARGEST_BYTES = 1 << 19
"""Maximum size of a file: ten times the largest shipped one. Parsing takes up to 12 us a byte."""
DEEPEST = 200
"""Maximum nesting of brackets; the parser's time grows with its square."""
MAX_PROBLEMS = 20
"""Maximum number of errors that are shown for one document."""
MAX_NODES = 100_000
"""Maximum number of values in a document with all aliases expanded."""

_BRACKET = re.compile(r"[\[\]{}]")
_TAG = re.compile(r"bool|int|float|str|constrained-\w+")
"""Tag of a union's member that is not a model, in an error's path; a key may have the same name."""


def read_document(path: Path) -> Document:
    """Return the mapping in a user's file, with line numbers; raise UserError for anything else.

    YAML 1.2: `1e12` is a number, `no` is a string, duplicate keys are rejected.
    """
    try:
        text = read_text(path, LARGEST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), error) from error
    _refuse_depth(text, str(path))
    try:
        document = YAML(typ="rt").load(text)
    except DuplicateKeyError as error:
        key, quote, _ = str(error.problem).removeprefix("found ").partition('" with value "')
        raise UserError(_at(path, error), key + quote[:1], remedy="keep one of the two") from error
    except MarkedYAMLError as error:
        raise UserError(_at(path, error), f"is not YAML: {error.problem}") from error
    except (YAMLError, ValueError) as error:
        raise UserError(str(path), f"is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(str(path), "is nested too deeply") from error
    except TypeError as error:  # the parser cannot hash it
        raise UserError(str(path), "has a list or a mapping as a key", allowed="text") from error
    if not isinstance(document, dict):
        raise UserError(str(path), "is not a mapping", allowed="`key: value` lines")
    _refuse_huge_document(document, str(path))
    return cast(Document, document)


def read_shipped(path: Traversable) -> Document:
    """Return the mapping in a file of this package, which the tests check."""
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


def read_model(model: type[ModelT], path: Path) -> tuple[ModelT, Document]:
    """Return a user's file as a `model`, and its document for the line numbers of later errors.

    Raise UserError with the line if the file cannot be read, contains a secret, or does not fit.
    """
    document = read_document(path)
    refuse_secrets(document, str(path))
    return validate(model, document, str(path)), document


def refuse_secrets(document: Any, where: str) -> None:
    """Raise UserError with the line of a string that looks like a secret, outside of `env`."""
    for path in _secrets(document):
        line = line_of(document, path)
        field = f"{'.'.join(map(str, path))}: " if path else ""
        raise UserError(
            f"{where}:{line}" if line else where,
            f"{field}contains what looks like a secret",
            remedy="pass it in an environment variable, which is not written to any file",
        )


def validate(model: type[ModelT], document: Document, where: str) -> ModelT:
    """Return `document` as a `model`; raise UserError with the line and the allowed values."""
    content = plain(document)
    try:
        value = model.model_validate(content)
    except ValidationError as error:
        raise _explain(error.errors(), content, model, document, where) from error
    for path in _booleans_as_numbers(content, value):
        line = line_of(document, path)
        raise UserError(
            f"{where}:{line}" if line else where,
            f"{'.'.join(map(str, path))}: must be a number, not true or false",
        )
    return value


def parse_value(text: str, where: str) -> Any:
    """Return the YAML value in `text` (`8`, `1e12`, `[1, 2]`, a word), None if it is empty."""
    _refuse_depth(text, where)
    try:
        value = YAML(typ="rt").load(text) if text.strip() else None
        _refuse_huge_document(value, where)
        return plain(value)
    except (YAMLError, ValueError, RecursionError) as error:
        raise UserError(where, "the value is not YAML") from error


def _secrets(node: Any, path: tuple[int | str, ...] = ()) -> Generator[tuple[int | str, ...]]:
    """Yield the paths of strings that look like a secret, except values of `env`."""
    if isinstance(node, str):
        if has_secret(node):
            yield path
    elif isinstance(node, dict):
        for key, value in cast(Document, node).items():
            if key != "env":
                yield from _secrets(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(cast(list[Any], node)):
            yield from _secrets(value, (*path, index))


def _booleans_as_numbers(
    raw: Any, value: Any, path: tuple[int | str, ...] = ()
) -> Generator[tuple[int | str, ...]]:
    """Yield the paths where `true` or `false` was converted to the number 1 or 0."""
    if isinstance(raw, bool):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield path
    elif isinstance(raw, dict):
        inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for key, part in cast(Document, raw).items():
            yield from _booleans_as_numbers(part, cast(Document, inside).get(key), (*path, key))
    elif isinstance(raw, list) and isinstance(value, list | tuple):
        pairs = zip(cast(list[Any], raw), cast(list[Any], value), strict=False)
        for index, (part, part_value) in enumerate(pairs):
            yield from _booleans_as_numbers(part, part_value, (*path, index))


def _refuse_depth(text: str, where: str) -> None:
    """Raise UserError for too many nested brackets."""
    depth = 0
    for bracket in _BRACKET.findall(text):
        depth += 1 if bracket in "[{" else -1
        if depth > DEEPEST:
            raise UserError(where, f"has more than {DEEPEST} nested brackets")


def _refuse_huge_document(document: Any, where: str) -> None:
    """Raise UserError for a document that aliases make huge or recursive."""
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        # An alias refers to the same object: its size is computed once and added every time.
        if isinstance(node, dict | list):
            if id(node) not in sizes:
                sizes[id(node)] = MAX_NODES  # found again if the node contains itself
                inside = node.values() if isinstance(node, dict) else node
                sizes[id(node)] = 1 + sum(map(size, cast(Iterable[Any], inside)))
            return sizes[id(node)]
        return 1

    try:
        too_large = size(document) >= MAX_NODES
    except RecursionError:
        too_large = True
    if too_large:
        raise UserError(
            where,
            f"expands to {MAX_NODES:,} values or more",
            remedy="use fewer aliases",
        )


def yaml_text(content: Document) -> str:
    """Return a mapping as YAML, in its own order."""
    text = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False  # type: ignore[assignment]
    yaml.width = 100
    yaml.dump(content, text)
    return text.getvalue()


def plain(node: Any) -> Any:
    """Return a copy of a parsed document in plain dicts, lists and scalars."""
    if isinstance(node, dict):
        return {str(key): plain(value) for key, value in cast(Document, node).items()}
    if isinstance(node, list):
        return [plain(value) for value in cast(list[Any], node)]
    if isinstance(node, bool) or node is None:
        return node
    for scalar in (int, float, str):
        if isinstance(node, scalar):
            return scalar(node)
    return node


def line_of(document: Any, path: tuple[int | str, ...]) -> int | None:
    """Return the 1-based line of the deepest existing part of `path`, or None."""
    line: int | None = None
    node = document
    for part in path:
        marks = getattr(node, "lc", None)
        if marks is None:
            break
        try:
            line = (marks.key if isinstance(node, dict) else marks.item)(part)[0] + 1
            node = node[part]
        except (KeyError, IndexError, TypeError):
            break
    return line


def _at(path: Path, error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"{path}:{mark.line + 1}" if mark else str(path)


def _explain(
    errors: list[ErrorDetails],
    content: Any,
    model: type[BaseModel],
    document: Document,
    where: str,
) -> UserError:
    """Return all errors of a document as one UserError, one line each."""
    # A mistyped name also leaves its field missing; show the typing error first.
    order = {"extra_forbidden": 0, "missing": 2}
    remaining = sorted(errors, key=lambda error: order.get(error["type"], 1))
    groups: list[list[ErrorDetails]] = []
    while remaining and len(groups) < MAX_PROBLEMS:
        groups.append(_members(remaining[0], remaining, content))
        remaining = [e for e in remaining if all(e is not one for one in groups[-1])]
    first, *others = groups
    lines = [_problem(members, model, document, where) for members in others]
    return _problem(first, model, document, where, lines)


def _problem(
    members: list[ErrorDetails],
    model: type[BaseModel],
    document: Document,
    where: str,
    others: Iterable[UserError] = (),
) -> UserError:
    """Return the error about one field; `members` has an error of each member of a union."""
    first = members[0]
    whole = first["loc"][:-1] if len(members) > 1 else first["loc"]
    # A union adds its member's type to the path ("literal['a','b']"), which is not a field. The
    # name of an unknown field comes from the user and may contain brackets.
    unknown_name = whole[-1:] if first["type"] == "extra_forbidden" else ()
    inside = whole[: len(whole) - len(unknown_name)]
    tagged_path = (*(part for part in inside if "[" not in str(part)), *unknown_name)
    loc = _without_tags(model, tagged_path) or _named_field(first, model)
    line = line_of(document, loc)
    field = ".".join(str(part) for part in loc) or "(the whole file)"
    problem = problem_of_union(members, hidden="env" in loc)
    if not first["loc"]:
        problem = problem._replace(what=problem.what.removeprefix(f"{field}: "))
    allowed, remedy = _choices(first, model, tagged_path) or problem.allowed, None
    if first["type"] == "extra_forbidden":
        names = _fields_at(model, tagged_path[:-1])
        allowed = few_names(names, str(loc[-1])) or problem.allowed
        remedy = did_you_mean(str(loc[-1]), names)
    elif first["type"] == "literal_error" and isinstance(first["input"], str):
        remedy = did_you_mean(first["input"], (allowed or "").replace("'", "").split(", "))
    return UserError(
        f"{where}:{line}" if line else where,
        f"{field}: {problem.what}",
        allowed=allowed,
        remedy=remedy or None,
        others=others,
    )


def _named_field(error: ErrorDetails, model: type[BaseModel]) -> tuple[str, ...]:
    """Return the field at the start of a model validator's message, `fabric: ...`."""
    name, colon, _ = error["msg"].removeprefix("Value error, ").partition(": ")
    path = tuple(name.split("."))
    return path if colon and not error["loc"] and path[0] in model.model_fields else ()


def _members(first: ErrorDetails, errors: list[ErrorDetails], content: Any) -> list[ErrorDetails]:
    """Return the errors of all members of the first error's union, or the first error alone."""
    if not _is_of_member(first, content):
        return [first]
    whole = first["loc"][:-1]
    of_one = [e for e in errors if e["loc"][:-1] == whole and _is_of_member(e, content)]
    return of_one if len(of_one) > 1 else [first]


def _is_of_member(error: ErrorDetails, content: Any) -> bool:
    """Return True if an error's path ends with the tag of a union's member."""
    *whole, tag = error["loc"] or ("",)
    node = content
    for part in whole:
        # A tag within the path is not a key of the content.
        with suppress(LookupError, TypeError):
            node = node[part]
    return node is error["input"] and bool(_TAG.fullmatch(str(tag)))


def _choices(error: ErrorDetails, model: type[BaseModel], loc: tuple[int | str, ...]) -> str | None:
    """Return the allowed fields, for a value that is not a mapping."""
    return f"fields: {few_names(_fields_at(model, loc))}" if error["type"] == "model_type" else None


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the model at `loc`, which may contain tags of unions."""
    choices = [model]
    for part in loc:
        if isinstance(part, int):
            continue
        matching = [choice for choice in choices if len(choices) > 1 and _tag(choice) == part]
        if matching:
            choices = matching
            continue
        field = choices[0].model_fields.get(part)
        nested = models_in(field.annotation) if field else []
        if not nested:
            return [] if field else sorted(choices[0].model_fields)
        choices = nested
    return sorted(choices[0].model_fields)


def _without_tags(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return `loc` without the tags that a union of models adds after its field."""
    path: list[int | str] = []
    choices = [model]
    for part in loc:
        matching = [choice for choice in choices if len(choices) > 1 and _tag(choice) == part]
        if matching:
            choices = matching
            continue
        path.append(part)
        field = choices[0].model_fields.get(part) if choices and isinstance(part, str) else None
        if field is not None:
            choices = models_in(field.annotation)
    return tuple(path)


def _tag(model: type[BaseModel]) -> str | None:
    """Return the tag of a model in a union: the only value of its field `kind`."""
    kind = model.model_fields.get("kind")
    values = get_args(kind.annotation) if kind else ()
    return str(values[0]) if len(values) == 1 else None


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in a field's type, including all members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]
