"""The gateway's OpenAPI description: the router lists the routes, and this module says what each of them does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from aiohttp import web

from loopwright.core.outcome import Outcome
from loopwright.gateway.dialects.fields import MAX_CHOICES
from loopwright.gateway.server.request_handler import ROUTES
from loopwright.gateway.sessions.session_config import SessionConfig

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": ["boolean", "null"]}
_COUNT: Schema = {"type": ["integer", "null"], "minimum": 1}
_OBJECT: Schema = {"type": "object"}
_LIST: Schema = {"type": "array", "items": _OBJECT}
_ERRORS = {
    400: "The request is invalid, or longer than the model's context.",
    401: "The key is missing or wrong.",
    404: "The session or route does not exist.",
    405: "The route does not support this method.",
    409: "The session accepts no more calls, or belongs to another trial.",
    413: "The body is too large.",
    429: "A quota of the session is used up.",
    500: "The turn could not be recorded.",
    503: "The engine failed.",
}
_SESSION, _TOKEN, _OPTIONAL_TOKEN, _NONE = "session", "token", "optional token", "none"
_SECURITY: dict[str, list[Schema]] = {
    _SESSION: [{"bearer": []}, {"apiKey": []}],
    _TOKEN: [{"bearer": []}],
    _OPTIONAL_TOKEN: [{"bearer": []}, {}],
    _NONE: [],
}


def _object(required: str, **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "properties": properties}


@dataclass(frozen=True)
class Route:
    """What a route does, the key it needs, and its response and request."""

    summary: str
    security: str
    response: Schema
    request: Schema | None = None
    errors: tuple[int, ...] = ()
    content_type: str = "application/json"
    stream_type: str | None = None
    """The content type of a streamed response."""
    status: int = 200
    needs_body: bool = True
    query: Mapping[str, Schema] = field(default_factory=dict)
    """The parameters of the query, all of them optional."""


_SAMPLING: dict[str, Schema] = {
    "model": _TEXT,
    "stream": _FLAG,
    "temperature": {"type": ["number", "null"], "minimum": 0},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": ["integer", "null"], "minimum": -1},
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
            n={"type": ["integer", "null"], "minimum": 1, "maximum": MAX_CHOICES},
            stop=_STOP,
            logprobs=_FLAG,
            tools=_LIST,
        ),
        _CALL_ERRORS,
        stream_type="text/event-stream",
    ),
    "v1/completions": Route(
        "OpenAI's completions",
        _SESSION,
        _CHOICES,
        _object("prompt", **_SAMPLING, prompt={**_TEXT, "minLength": 1}, stop=_STOP),
        _CALL_ERRORS,
        stream_type="text/event-stream",
    ),
    "v1/responses": Route(
        "OpenAI's Responses",
        _SESSION,
        _object("id object model output usage", output=_LIST),
        _object("input", **_SAMPLING, input={**_TEXT, "minLength": 1}, instructions=_TEXT, max_output_tokens=_COUNT),
        _CALL_ERRORS,
        stream_type="text/event-stream",
    ),
    "v1/messages": Route(
        "Anthropic's Messages",
        _SESSION,
        _object("id type role content model usage", content=_LIST),
        _object("messages max_tokens", **_SAMPLING, messages=_MESSAGES, system=_TEXT, tools=_LIST),
        _CALL_ERRORS,
        stream_type="text/event-stream",
    ),
}
_DESCRIPTION = _object("id status turns rows verdicts trainable episode", turns=_LIST, rows=_LIST, episode=_OBJECT)
_OPEN_SESSION = _object("id key status openai_base_url anthropic_base_url", id=_TEXT, key=_TEXT)
_ENGINES = _object("version", version={"type": "integer"})
_CONVERSATION = _object("id object created_at metadata", id=_TEXT, metadata=_OBJECT)
_DELETED = _object("id object deleted", id=_TEXT)
_ITEMS = _object("object data first_id last_id has_more", data=_LIST)
_PAGING: dict[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": {"enum": ["asc", "desc"]},
    "after": _TEXT,
}
_STATE_ERRORS = (401, 404, 409, 503)
_MODELS = _object("data", data=_LIST)

_TOKENIZE = Route(
    "The ids of a text, or of the prompt for messages",
    _SESSION,
    _object("count tokens", count={"type": "integer"}),
    _object("prompt", prompt=_TEXT, return_token_strs=_FLAG),
    (400, 401, 404, 413, 500, 503),
)

_ROUTES: dict[str, Route] = {
    "GET /healthz": Route("Health of engine and store", _NONE, _object("status version failing"), None, (503,)),
    "GET /metrics": Route("Metrics for Prometheus", _OPTIONAL_TOKEN, _TEXT, None, (401,), content_type="text/plain"),
    "GET /openapi.json": Route("This description", _NONE, _object("openapi paths")),
    "GET /sessions": Route("The sessions that the gateway has open", _TOKEN, _object("sessions"), None, (401, 503)),
    "POST /sessions": Route(
        "Open a session",
        _OPTIONAL_TOKEN,
        _OPEN_SESSION,
        {"$ref": "#/components/schemas/SessionConfig"},
        (400, 401, 403, 413, 503),
        needs_body=False,
    ),
    "POST /sessions/{id}": Route(
        "Open a session with this id, or return it if it exists",
        _OPTIONAL_TOKEN,
        _OPEN_SESSION,
        {"$ref": "#/components/schemas/SessionConfig"},
        (400, 401, 403, 409, 413, 503),
        needs_body=False,
    ),
    "GET /sessions/{id}": Route("A session: graph, rows, verdicts", _SESSION, _DESCRIPTION, None, (401, 404, 409, 503)),
    "POST /sessions/{id}/freeze": Route(
        "Accept no more calls, and return a snapshot id of the record",
        _SESSION,
        _object("id status snapshot"),
        None,
        (401, 404, 500, 503),
    ),
    "DELETE /sessions/{id}": Route("Delete a session", _SESSION, _object("id deleted"), None, (401, 404, 500, 503)),
    "POST /sessions/{id}/complete": Route(
        "End a session",
        _SESSION,
        _DESCRIPTION,
        {"type": "object", "properties": {"outcome": {"enum": [str(outcome) for outcome in Outcome]}, "reason": _TEXT}},
        (400, 401, 404, 413, 500, 503),
        needs_body=False,
    ),
    "GET /engines": Route("The engines", _TOKEN, _ENGINES, None, (401,)),
    "POST /weights": Route(
        "Load new weights into the engines",
        _TOKEN,
        _ENGINES,
        _object("version", version={"type": "integer", "minimum": 0}, paused={"type": "boolean"}, source=_TEXT),
        (400, 401, 413, 503),
    ),
    "POST /pause": Route("Pause all calls", _TOKEN, _ENGINES, None, (401, 503)),
    "POST /resume": Route("Continue all calls", _TOKEN, _ENGINES, None, (401, 503)),
    "GET /ws/worker": Route("WebSocket for workers", _TOKEN, {}, None, (400, 401, 403), status=101),
    "GET /{id}/v1/models": Route("The models", _SESSION, _MODELS, None, (401, 404, 503)),
    "GET /{id}/v1/models/{model}": Route(
        "A model; any name is accepted", _SESSION, _object("id"), None, (401, 404, 503)
    ),
    "GET /{id}/models": Route("The models", _SESSION, _MODELS, None, (401, 404, 503)),
    "GET /{id}/v1/responses/{response}": Route(
        "A stored response", _SESSION, _DIALECTS["v1/responses"].response, None, (400, *_STATE_ERRORS)
    ),
    "DELETE /{id}/v1/responses/{response}": Route(
        "Refer to a response no longer; its turn stays recorded", _SESSION, _DELETED, None, (*_STATE_ERRORS, 500)
    ),
    "GET /{id}/v1/responses/{response}/input_items": Route(
        "The input of a stored response", _SESSION, _ITEMS, None, (400, *_STATE_ERRORS), query=_PAGING
    ),
    "POST /{id}/v1/conversations": Route(
        "Open a conversation for OpenAI's Responses",
        _SESSION,
        _CONVERSATION,
        _object("", metadata=_OBJECT, items={**_MESSAGES, "minItems": 0, "maxItems": 20}),
        (400, *_STATE_ERRORS, 413, 429, 500),
        needs_body=False,
    ),
    "GET /{id}/v1/conversations/{conversation}": Route("A conversation", _SESSION, _CONVERSATION, None, _STATE_ERRORS),
    "POST /{id}/v1/conversations/{conversation}": Route(
        "Change the metadata of a conversation",
        _SESSION,
        _CONVERSATION,
        _object("metadata", metadata=_OBJECT),
        (400, *_STATE_ERRORS, 413, 429, 500),
    ),
    "DELETE /{id}/v1/conversations/{conversation}": Route(
        "Refer to a conversation no longer; its turns stay recorded", _SESSION, _DELETED, None, (*_STATE_ERRORS, 500)
    ),
    "GET /{id}/v1/conversations/{conversation}/items": Route(
        "The items of a conversation", _SESSION, _ITEMS, None, (400, *_STATE_ERRORS), query=_PAGING
    ),
    "POST /{id}/v1/conversations/{conversation}/items": Route(
        "Add items to a conversation",
        _SESSION,
        _ITEMS,
        _object("items", items={**_MESSAGES, "maxItems": 20}),
        (400, *_STATE_ERRORS, 413, 429, 500),
    ),
    "GET /{id}/v1/conversations/{conversation}/items/{item}": Route(
        "An item of a conversation", _SESSION, _object("id type"), None, _STATE_ERRORS
    ),
    "DELETE /{id}/v1/conversations/{conversation}/items/{item}": Route(
        "Delete an item; what was sampled stays recorded",
        _SESSION,
        _CONVERSATION,
        None,
        (400, *_STATE_ERRORS, 429, 500),
    ),
    "POST /{id}/tokenize": _TOKENIZE,
    "POST /{id}/v1/tokenize": _TOKENIZE,
    "POST /{id}/v1/responses/input_tokens": Route(
        "Count the tokens of a prompt: OpenAI's Responses",
        _SESSION,
        _object("object input_tokens", input_tokens={"type": "integer"}),
        _DIALECTS["v1/responses"].request,
        (400, 401, 404, 413, 500, 503),
    ),
}


def describe_routes(router: web.UrlDispatcher) -> Schema:
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


def find_route(method: str, path: str) -> Route | None:
    """The description of a route; None if it has none."""
    if (route := _ROUTES.get(f"{method} {path}")) is not None:
        return route
    below = path.removeprefix("/{id}/")
    dialect = ROUTES.get(below.removesuffix("/count_tokens"))
    # A dialect may be served at several paths, of which one is described.
    route = next((route for each, route in _DIALECTS.items() if ROUTES[each] is dialect), None)
    if route is not None and below.endswith("/count_tokens"):
        errors = tuple(status for status in route.errors if status not in (429, 409))
        count = _object("input_tokens", input_tokens={"type": "integer"})
        return Route(f"Count the tokens of a prompt: {route.summary}", _SESSION, count, route.request, errors)
    return route


def _operation(method: str, path: str) -> Schema:
    route = find_route(method, path) or Route("", _NONE, {})
    # Streams have no schema: readers do not agree whether it would describe all of it or each event.
    content = {route.content_type: {"schema": route.response}} | ({route.stream_type: {}} if route.stream_type else {})
    responses: Schema = {
        str(route.status): {"description": "Success.", **({"content": content} if route.status == 200 else {})}
    }
    for status in sorted({*route.errors, 405}):
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        responses[str(status)] = {"description": _ERRORS.get(status, "Refused."), "content": error}
    if path == "/healthz":
        responses["503"]["content"] = content
    operation: Schema = {"summary": route.summary, "responses": responses, "security": _SECURITY[route.security]}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}} for name in names]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        body = {"application/json": {"schema": route.request}}
        operation["requestBody"] = {"required": route.needs_body, "content": body}
    return operation
