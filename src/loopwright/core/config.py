"""The base of all configuration: strict, frozen, explained under each field."""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler, ValidationError

from loopwright.core.errors import did_you_mean

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


_TAG = re.compile(r"tuple\[|literal\[|constrained-|\[key\]$|(str|function-)$")
"""What pydantic, not the user, puts into a location: the branch of a union that was tried, or that a key is wrong."""
FUNCTION = r"^[\w.]+:[\w.]+$"
"""The pattern of `module:function`."""
NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
"""The pattern of a name that is also the name of a directory."""
_REQUIREMENTS = {
    "float_parsing": "a number",
    "float_type": "a number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a table",
    "model_type": "a table",
    "list_type": "a list",
    "tuple_type": "a list",
}
"""What a value must be, by pydantic's type of error, where its own words are those of a parser."""


C = TypeVar("C", bound="Config")


class Explained(ValueError):
    """All problems within one field, each with its own key."""

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{key}: {message}" if key else message for key, message in self.problems))


def size_bytes(text: Any) -> Any:
    """`"2GiB"` as a number of bytes; any other type is returned as it is."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example '512MiB' or '2GiB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


Size = Annotated[int, BeforeValidator(size_bytes)]
"""A number of bytes, in a scenario also as text."""


class Config(BaseModel):
    """A typo is an error, a value never changes, and the docstring under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def field_docs(cls) -> dict[str, str]:
        """The documentation of each field, read when asked for: pydantic would read the source of every class."""
        docs: dict[str, str] = {}
        for model in reversed(cls.__mro__):
            if issubclass(model, Config) and model is not Config:
                tree = ast.parse(dedent(inspect.getsource(model)))
                for lines in pairwise(statement for each in tree.body for statement in getattr(each, "body", ())):
                    match lines:
                        case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                            docs[name] = inspect.cleandoc(text)
        return docs

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The JSON schema, with the documentation of the fields."""
        described = handler(schema)
        properties = handler.resolve_ref_schema(described).get("properties", {})
        for name, text in cls.field_docs().items():
            properties.get(name, {}).setdefault("description", text)
        return described


def overridden(default: C, own: C | None) -> C:
    """A config with the keys that another one of its class sets."""
    if own is None:
        return default
    return default.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


def explain(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """(key, message) of each problem, worded for the person who wrote the file."""
    for detail in error.errors():
        place = [part for part in detail["loc"] if not (isinstance(part, str) and _TAG.match(part))]
        where, facts, value = _joined(place), detail.get("ctx", {}), detail["input"]
        match detail["type"]:
            case "extra_forbidden":
                key = str(place[-1])
                keys = _keys(model, [str(part) for part in place[:-1]])
                yield _joined(place[:-1]), f"unknown key {key!r}. {did_you_mean(key, keys)}"
            case "missing":
                field = model.model_fields.get(str(place[0])) if len(place) == 1 else None
                example = f"; for example {place[0]} = {field.examples[0]}" if field and field.examples else ""
                yield where, f"is missing{example}"
            case "value_error" if isinstance(facts.get("error"), Explained):
                for key, message in facts["error"].problems:
                    yield (f"{where}.{key}" if where and key else where or key), message
            case "too_short":
                yield where, f"must have at least {facts['min_length']} of them, not {facts['actual_length']}"
            case "string_pattern_mismatch" if facts["pattern"] == FUNCTION:
                yield where, f"write it as module:function, not {value!r}"
            case "string_pattern_mismatch" if facts["pattern"] == NAME:
                rule = "letters, digits, `_`, `.` and `-`, after a letter, a digit or `_`"
                yield where, f"must consist of {rule}, not {value!r}"
            case kind if kind in _REQUIREMENTS:
                yield where, f"must be {_REQUIREMENTS[kind]}, not {value!r}"
            case kind:
                message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
                suffix = "" if isinstance(value, (dict, list)) or kind == "value_error" else f", not {value!r}"
                yield where, f"{message[0].lower()}{message[1:]}{suffix}"


def _joined(place: Sequence[Any]) -> str:
    """A location as written in a scenario: `parts[1].weight`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def _keys(model: type[BaseModel], place: list[str]) -> list[str]:
    """The keys that a model has at a place inside it, as far as its annotations tell."""
    for name in place:
        field = model.model_fields.get(name)
        inner = field.annotation if field is not None else None
        candidates = [inner, *getattr(inner, "__args__", ())]
        nested = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if nested is not None:
            model = nested
        elif field is None:
            continue  # a name that the user chose, such as a metric's
    return [field.alias or name for name, field in model.model_fields.items()]
