"""A model's own chat template: read from its files, and rendered in a sandbox exactly as transformers does it.

Only what the template itself writes becomes a special token. Names of special tokens in messages and tools are marked
before rendering, so that they stay text; the marks are removed when the rendered text is tokenised.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from loopwright.core.errors import LoopwrightError
from loopwright.engines.tokenizer import Tokenizer

log = logging.getLogger(__name__)
_MARKS = "\ufdd0", "\ufdd1"
"""Noncharacters around the name of a special token that is meant as text."""
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SHORT = 16
"""Characters of a text whose ids are remembered."""
_SMALL = 2**20
"""Characters of a template; a larger one is not a chat template."""


class RenderError(LoopwrightError, ValueError):
    """The chat template refuses these messages, with the reason that it gives."""


@dataclass(frozen=True, slots=True)
class ChatTemplateSource:
    """A chat template as its files have it, and the names of special tokens that it may use."""

    source: str
    tool_source: str = ""
    """Another template for requests with tools, if the model has one."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token` and so on."""

    @classmethod
    def load(cls, location: str) -> Self | None:
        """The template of a directory, or of a name on the hub; None if it has none."""
        config = _read_json(location, "tokenizer_config.json")
        names = {**_read_json(location, "special_tokens_map.json"), **config}
        # A special token may be described by an object.
        contents = {name: t.get("content") if isinstance(t, Mapping) else t for name, t in names.items()}
        tokens = {name: token for name in _TOKEN_NAMES if isinstance(token := contents.get(name), str)}
        templates = config.get("chat_template")
        if isinstance(templates, list):  # several, by name
            templates = {each["name"]: each["template"] for each in templates}
        if not isinstance(templates, dict):
            templates = {"default": templates}
        if (text := _read(location, "chat_template.jinja")) is not None or isinstance(
            text := _read_json(location, "chat_template.json").get("chat_template"), str
        ):
            templates = {**templates, "default": text}
        source, tool_source = templates.get("default"), templates.get("tool_use")
        if not isinstance(source, str):
            return None
        return cls(source, tool_source if isinstance(tool_source, str) else "", tokens)

    def as_json(self) -> dict[str, Any]:
        """As plain data, for a relay."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Self | None:
        """The inverse of `as_json`; None if this is not a template."""
        if not isinstance(data, dict) or not isinstance(data.get("source"), str):
            return None
        tokens = data.get("tokens") or {}
        if not isinstance(data.get("tool_source", ""), str) or not all(isinstance(t, str) for t in tokens.values()):
            return None
        return cls(data["source"], data.get("tool_source", ""), dict(tokens))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opens_turn: bool,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; with `opens_turn`, up to where the assistant's next turn starts.

        The messages are plain JSON data, so that a template finds nothing in them that it could call.
        """
        source = self.tool_source if tools and self.tool_source else self.source
        values: dict[str, Any] = {**self.tokens, **(arguments or {})}
        values |= {"messages": messages, "tools": list(tools) or None, "documents": values.get("documents")}
        try:
            return str(_compile(source).render(**values, add_generation_prompt=opens_turn))
        except (TemplateError, SecurityError) as error:
            raise RenderError(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:  # what Python raises for a template's own mistakes
            kind = type(error).__name__
            raise RenderError(f"the model's chat template fails for these messages: {kind}: {error}") from error


def _read(location: str, name: str) -> str | None:
    """A small text file of a model, in its directory or in the hub's cache; None if it does not exist."""
    file = Path(location) / name
    if not Path(location).is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

        try:
            file = Path(hf_hub_download(location, name))
        except EntryNotFoundError:  # also if it is not in the cache, without a network
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            log.warning("%s of model %r cannot be read: %s", name, location, error)
            return None
    return file.read_text("utf-8") if file.is_file() else None


def _read_json(location: str, name: str) -> dict[str, Any]:
    try:
        data = json.loads(_read(location, name) or "{}")
    except ValueError:
        log.warning("%s of model %r is not valid JSON", name, location)
        return {}
    return data if isinstance(data, dict) else {}


# -- the sandbox ----------------------------------------------------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's tokens; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Names(Namespace):
    """Jinja's `namespace`, without names that start with an underscore, which lead to the interpreter."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args
        for name in (attributes := dict(*rest, **values)):
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot set {name!r}: it starts with an underscore")


class _Dict:
    """`dict` for templates: makes dicts, and has nothing else that a template could reach."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


@lru_cache(maxsize=64)
def _compile(source: str) -> Any:
    if len(source) > _SMALL:
        raise TemplateError(f"it has {len(source)} characters, and at most {_SMALL} are allowed")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda format: datetime.now().strftime(format),  # noqa: DTZ005  as transformers does it
        "dict": _Dict(),
        "namespace": _Names,
    }
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # each rendering copies them, and Jinja's own kind of mapping is slow
    return template


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers writes it: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# -- special tokens -------------------------------------------------------------------------------------------------


class SpecialTokens:
    """Splits rendered text at the special tokens of a tokenizer, and protects their names in what others wrote."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._ids = tokenizer, tokenizer.specials
        names = sorted(tokenizer.specials, key=len, reverse=True)
        self._prefix = names[-1][:1] if len({name[:1] for name in names}) == 1 else ""
        one = "|".join(map(re.escape, names)) or "(?!)"
        self._names = re.compile(f"({one})")
        self._split = re.compile(f"{_MARKS[0]}(?:{one}){_MARKS[1]}|({one})")
        self._strips: Mapping[str, tuple[bool, bool]] = getattr(tokenizer, "strips", {})
        self._encode_later = getattr(tokenizer, "encode_later", tokenizer.encode)
        # Roles and the text between messages, which every turn repeats.
        self._encode_short = lru_cache(256)(lambda text: self._encode_later(unprotected(text)) if text else [])

    def protect(self, value: Any) -> Any:
        """The same data, with marks around all names of special tokens; the very same object if it has none."""
        if isinstance(value, str):
            if self._prefix not in value and _MARKS[0] not in value:
                return value
            return self._names.sub(lambda match: f"{_MARKS[0]}{match[0]}{_MARKS[1]}", value)
        if isinstance(value, Mapping):
            items = {key: self.protect(item) for key, item in value.items()}
            return value if all(items[key] is value[key] for key in items) else items
        if isinstance(value, list | tuple):
            entries = [self.protect(item) for item in value]
            return value if all(one is other for one, other in zip(entries, value, strict=True)) else entries
        return value

    def find(self, text: str, names: frozenset[str], start: int = 0) -> re.Match[str] | None:
        """The first of these special tokens that the template wrote, from a position on."""
        pattern = self._pattern(text)
        while (match := pattern.search(text, start)) is not None and match[1] not in names:
            start = match.end()
        return match

    def _pattern(self, text: str) -> re.Pattern[str]:
        """What finds special tokens in a text. Names alone are found faster, because all of them start alike."""
        return self._split if _MARKS[0] in text else self._names

    def encode(self, text: str, after: str = "", *, is_start: bool = True) -> list[tuple[int, list[int]]]:
        """The ids of rendered text, in segments: where each ends, and its ids.

        `after` is the special token before it; without `is_start`, something else precedes it.
        """
        segments: list[tuple[int, list[int]]] = []
        start, before, is_start = 0, after, is_start and not after
        for match in self._pattern(text).finditer(text):
            if (name := match[1]) is None:
                continue  # a name that is meant as text
            if match.start() > start:
                ids = self._encode_text(text[start : match.start()], before, name, is_first=is_start and not start)
                segments.append((match.start(), ids))
            segments.append((match.end(), [self._ids[name]]))
            start, before = match.end(), name
        if start < len(text):
            segments.append((len(text), self._encode_text(text[start:], before, "", is_first=is_start and not start)))
        return segments

    def _encode_text(self, text: str, before: str, after: str, *, is_first: bool) -> list[int]:
        """Text between special tokens, some of which take the white space beside them."""
        if self._strips.get(before, (False, False))[1]:
            text = text.lstrip()
        if self._strips.get(after, (False, False))[0]:
            text = text.rstrip()
        if len(text) <= _SHORT and not is_first:
            return self._encode_short(text)
        if _MARKS[0] in text or _MARKS[1] in text:
            text = unprotected(text)
        return (self._tokenizer.encode if is_first else self._encode_later)(text)


def unprotected(text: str) -> str:
    """Text without marks."""
    return text.replace(_MARKS[0], "").replace(_MARKS[1], "")
