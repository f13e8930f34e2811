"""The gateway's routes as OpenAPI describes them: which there are says the router, what each does stands here."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from aiohttp import web

from loopwright.core.outcome import Outcome
from loopwright.gateway.dialects.base import ROUTES
from loopwright.gateway.dialects.openai import MOST_CHOICES
from loopwright.gateway.sessions.session_config import SessionConfig

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": ["boolean", "null"]}
_COUNT: Schema = {"type": ["integer", "null"], "minimum": 1}
_OBJECT: Schema = {"type": "object"}
_LIST: Schema = {"type": "array", "items": _OBJECT}
_ERRORS = {
    400: "The request is not as it should be, or longer than the model's context.",
    401: "No key, or another one than is needed.",
    404: "There is no such session, or no such route.",
    405: "The route is there, but not for this method.",
    409: "The session takes no more calls, or belongs to another trial.",
    413: "The body is too large.",
    429: "A quota of the session is used up.",
    500: "The turn could not be recorded.",
    503: "The engine failed.",
}
_SESSION, _TOKEN, _OPENER, _ANYBODY = "session", "token", "opener", "anybody"
_SECURITY: dict[str, list[Schema]] = {
    _SESSION: [{"bearer": []}, {"apiKey": []}],
    _TOKEN: [{"bearer": []}],
    _OPENER: [{"bearer": []}, {}],
    _ANYBODY: [],
}


def _object(required: str, **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "properties": properties}


@dataclass(frozen=True)
class Route:
    """What a route does, who may use it, what it takes and what it gives."""

    summary: str
    who: str
    gives: Schema
    takes: Schema | None = None
    errors: tuple[int, ...] = ()
    kind: str = "application/json"
    more: str | None = None
    """Another kind of answer: a stream."""
    status: int = 200
    needs_body: bool = True


_SAMPLING: dict[str, Schema] = {
    "model": _TEXT,
    "stream": _FLAG,
    "temperature": {"type": ["number", "null"], "minimum": 0},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": ["integer", "null"], "minimum": 0},
    "min_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
    "max_tokens": _COUNT,
}
_ROLE: Schema = {"enum": ["system", "developer", "user", "assistant", "tool"]}
_MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": _object("role content", role=_ROLE, content=_TEXT),
}
_STOP: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]}
_CALL_ERRORS = (400, 401, 404, 409, 413, 429, 500, 503)
_USAGE = _object("prompt_tokens completion_tokens total_tokens")
_CHOICES = _object("id object created model choices usage", choices={**_LIST, "minItems": 1}, usage=_USAGE)

_DIALECTS: dict[str, Route] = {
    "v1/chat/completions": Route(
        "OpenAI's chat completions",
        _SESSION,
        _CHOICES,
        _object(
            "messages",
            **_SAMPLING,
            messages=_MESSAGES,
            n={"type": ["integer", "null"], "minimum": 1, "maximum": MOST_CHOICES},
            stop=_STOP,
            logprobs=_FLAG,
            tools=_LIST,
        ),
        _CALL_ERRORS,
        more="text/event-stream",
    ),
    "v1/completions": Route(
        "OpenAI's completions",
        _SESSION,
        _CHOICES,
        _object("prompt", **_SAMPLING, prompt={**_TEXT, "minLength": 1}, stop=_STOP),
        _CALL_ERRORS,
        more="text/event-stream",
    ),
    "v1/responses": Route(
        "OpenAI's Responses",
        _SESSION,
        _object("id object model output usage", output=_LIST),
        _object("input", **_SAMPLING, input={**_TEXT, "minLength": 1}, instructions=_TEXT, max_output_tokens=_COUNT),
        _CALL_ERRORS,
        more="text/event-stream",
    ),
    "v1/messages": Route(
        "Anthropic's Messages",
        _SESSION,
        _object("id type role content model usage", content=_LIST),
        _object("messages max_tokens", **_SAMPLING, messages=_MESSAGES, system=_TEXT, tools=_LIST),
        _CALL_ERRORS,
        more="text/event-stream",
    ),
}
_SHOWN = _object("id status turns rows verdicts trainable episode", turns=_LIST, rows=_LIST, episode=_OBJECT)
_OPENED = _object("id key status openai_base_url anthropic_base_url", id=_TEXT, key=_TEXT)
_ENGINES = _object("version", version={"type": "integer"})
_MODELS = _object("data", data=_LIST)

_ROUTES: dict[str, Route] = {
    "GET /healthz": Route(
        "Whether engine and store are well", _ANYBODY, _object("status version failing"), None, (503,)
    ),
    "GET /metrics": Route("Metrics for Prometheus", _OPENER, _TEXT, None, (401,), kind="text/plain"),
    "GET /openapi.json": Route("This description", _ANYBODY, _object("openapi paths")),
    "POST /sessions": Route(
        "Open a session",
        _OPENER,
        _OPENED,
        {"$ref": "#/components/schemas/SessionConfig"},
        (400, 401, 403, 413, 503),
        needs_body=False,
    ),
    "POST /sessions/{id}": Route(
        "Open a session of this id, or find it again",
        _OPENER,
        _OPENED,
        {"$ref": "#/components/schemas/SessionConfig"},
        (400, 401, 403, 409, 413, 503),
        needs_body=False,
    ),
    "GET /sessions/{id}": Route("A session: graph, rows, verdicts", _SESSION, _SHOWN, None, (401, 404, 409, 503)),
    "POST /sessions/{id}/freeze": Route(
        "Take no more calls, and give what was recorded an id",
        _SESSION,
        _object("id status snapshot"),
        None,
        (401, 404, 500, 503),
    ),
    "DELETE /sessions/{id}": Route("Forget a session", _SESSION, _object("id deleted"), None, (401, 404, 500, 503)),
    "POST /sessions/{id}/complete": Route(
        "End a session",
        _SESSION,
        _SHOWN,
        {"type": "object", "properties": {"outcome": {"enum": [str(each) for each in Outcome]}, "reason": _TEXT}},
        (400, 401, 404, 413, 500, 503),
        needs_body=False,
    ),
    "GET /engines": Route("The engines", _TOKEN, _ENGINES, None, (401,)),
    "POST /weights": Route(
        "Give the engines new weights",
        _TOKEN,
        _ENGINES,
        _object("version", version={"type": "integer", "minimum": 0}, paused={"type": "boolean"}, source=_TEXT),
        (400, 401, 413, 503),
    ),
    "POST /pause": Route("Hold all calls", _TOKEN, _ENGINES, None, (401, 503)),
    "POST /resume": Route("Let calls go on", _TOKEN, _ENGINES, None, (401, 503)),
    "GET /ws/worker": Route("Where workers connect, by WebSocket", _TOKEN, {}, None, (400, 401, 403), status=101),
    "GET /{id}/v1/models": Route("The models", _SESSION, _MODELS, None, (401, 404, 503)),
    "GET /{id}/v1/models/{model}": Route("A model, of any name", _SESSION, _object("id"), None, (401, 404, 503)),
    "GET /{id}/models": Route("The models", _SESSION, _MODELS, None, (401, 404, 503)),
}


def described(router: web.UrlDispatcher) -> Schema:
    """All routes of a router."""
    paths: dict[str, Schema] = {}
    for route in router.routes():
        if route.resource is not None:
            path = route.resource.canonical
            paths.setdefault(path, {})[route.method.lower()] = _operation(route.method, path)
    config = SessionConfig.model_json_schema(ref_template="#/components/schemas/{model}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Loopwright gateway", "version": version("loopwright")},
        "paths": paths,
        "components": {
            "schemas": {
                **config.pop("$defs", {}),
                "SessionConfig": config,
                "Error": _object("error", error=_object("message")),
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def about(method: str, path: str) -> Route | None:
    """What is known of a route; None if nobody described it."""
    if (found := _ROUTES.get(f"{method} {path}")) is not None:
        return found
    below = path.removeprefix("/{id}/")
    dialect = _DIALECTS.get(_spoken(below.removesuffix("/count_tokens")))
    if dialect is not None and below.endswith("/count_tokens"):
        errors = tuple(status for status in dialect.errors if status not in (429, 409))
        counted = _object("input_tokens", input_tokens={"type": "integer"})
        return Route(f"How long a prompt is: {dialect.summary}", _SESSION, counted, dialect.takes, errors)
    return dialect


def _spoken(path: str) -> str:
    """Of the paths at which a dialect is spoken, the one that is described."""
    return next((each for each in _DIALECTS if ROUTES.get(each) == ROUTES.get(path, "")), "")


def _operation(method: str, path: str) -> Schema:
    route = about(method, path) or Route("", _ANYBODY, {})
    # Of a stream nothing is said: whether a schema is of all of it or of each event, readers do not agree.
    given = {route.kind: {"schema": route.gives}} | ({route.more: {}} if route.more else {})
    answers: Schema = {
        str(route.status): {"description": "Done.", **({"content": given} if route.status == 200 else {})}
    }
    for status in sorted({*route.errors, 405}):
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        answers[str(status)] = {"description": _ERRORS.get(status, "Refused."), "content": error}
    if path == "/healthz":
        answers["503"]["content"] = given
    operation: Schema = {"summary": route.summary, "responses": answers, "security": _SECURITY[route.who]}
    if names := [part[1:-1] for part in path.split("/") if part.startswith("{")]:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}} for name in names
        ]
    if route.takes is not None:
        body = {"application/json": {"schema": route.takes}}
        operation["requestBody"] = {"required": route.needs_body, "content": body}
    return operation
