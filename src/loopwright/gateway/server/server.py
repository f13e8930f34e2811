"""The gateway's HTTP server: routes, keys and refusals. What a dialect's request becomes stands in `answer.py`."""

import hmac
import importlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import ValidationError

from loopwright.core.config import explain
from loopwright.core.outcome import Outcome
from loopwright.engines.base import Sampling
from loopwright.gateway.dialects.base import ROUTES, Dialect
from loopwright.gateway.dialects.chat import ChatCompletions
from loopwright.gateway.gateway import is_loopback
from loopwright.gateway.refusal import Refusal, refusal_of
from loopwright.gateway.server.access_log import RequestObserver
from loopwright.gateway.server.admin import Admin
from loopwright.gateway.server.body import parse_object
from loopwright.gateway.server.operations import Operations
from loopwright.gateway.server.request_handler import Answer, json_response
from loopwright.gateway.sessions.served_session import ServedSession
from loopwright.gateway.sessions.session_config import SessionConfig, is_ours

if TYPE_CHECKING:
    from loopwright.gateway.gateway import Gateway

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Listens, and hands each request to the session that it is for."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway, self._config = gateway, gateway.config
        # Refusals need none, and a relay has none before its first worker comes.
        tokenizer: Any = getattr(gateway.engine, "tokenizer", None)
        self._plain = ChatCompletions(tokenizer, Sampling())
        self._dialects = _dialects()
        # Each dialect speaks for itself where there is no session to speak of.
        self._voices = {path: made(tokenizer, Sampling()) for path, made in self._dialects.items()}
        self._watch = watch = RequestObserver(gateway)
        around = [watch.middleware, self._refusals]
        self._app = web.Application(client_max_size=self._config.body_bytes, middlewares=around)
        self._runner = web.AppRunner(
            self._app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=75.0,
            shutdown_timeout=self._config.drain_s,
        )
        self.port = 0
        add = self._app.router.add_route
        for path in self._dialects:  # first: routes are tried in turn
            add("POST", f"/{{id}}/{path}", self._speaks(path))
            add("POST", f"/{{id}}/{path}/count_tokens", self._counts(path))
        Operations(gateway, watch, lambda request: self._is_admin(_key(request))).mount(self._app)
        add("POST", "/sessions", self._open)
        add("POST", "/sessions/{id}", self._open)
        add("GET", "/sessions/{id}", self._show)
        add("DELETE", "/sessions/{id}", self._delete)
        add("POST", "/sessions/{id}/complete", self._complete)
        add("POST", "/sessions/{id}/freeze", self._freeze)
        self._admin = Admin(gateway, lambda request: self._is_admin(_key(request)))
        self._admin.mount(self._app)
        add("GET", "/{id}/v1/models", self._models)
        add("GET", "/{id}/v1/models/{model:.+}", self._models)
        add("GET", "/{id}/models", self._models)

    async def start(self) -> None:
        """Listen."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.host, self._config.port, backlog=1024)
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Take no more requests; those under way get a moment to end."""
        for site in self._runner.sites:
            await site.stop()
        if self._runner.server is not None:
            await self._admin.end(self._runner.server)
        await self._runner.cleanup()
        self._watch.close()

    # -- dialects -----------------------------------------------------------------------------------------------

    def _speaks(self, path: str) -> Handler:
        async def speak(request: web.Request) -> web.StreamResponse:
            dialect, served = self._heard(request, path)
            return await Answer(request, dialect, served, self._config).give()

        return speak

    def _counts(self, path: str) -> Handler:
        async def count(request: web.Request) -> web.StreamResponse:
            dialect, served = self._heard(request, path)
            ask = dialect.parse(parse_object(await request.read()), request.headers)
            session = served.session
            tokens = session.count(ask.messages, ask.tools, ask.manner(session.template.grammar))
            return json_response(dialect.counted(tokens))

        return count

    def _heard(self, request: web.Request, path: str) -> tuple[Dialect, ServedSession]:
        served = self._session(request)
        dialect = served.voices.get(path)
        if dialect is None:
            dialect = served.voices[path] = self._dialects[path](
                served.session.engine.tokenizer, served.config.defaults
            )
        return dialect, served

    def _session(self, request: web.Request, *, admin: bool = False) -> ServedSession:
        served = self._gateway.find(request.match_info["id"])
        key = _key(request)
        if served.admits(key) or (admin and self._is_admin(key)):
            return served
        raise Refusal.key()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        name = self._config.model
        listed = getattr(self._voices.get("v1/messages"), "models", None)
        if "anthropic-version" in request.headers and listed is not None:
            told = listed([name])
            return json_response(told if "model" not in request.match_info else told["data"][0])
        model = {"id": name, "object": "model", "created": 0, "owned_by": "loopwright"}
        if "model" in request.match_info:
            return json_response({**model, "id": request.match_info["model"]})
        return json_response({"object": "list", "data": [model]})

    # -- sessions -----------------------------------------------------------------------------------------------

    async def _open(self, request: web.Request) -> web.StreamResponse:
        id, admin = request.match_info.get("id"), self._is_admin(_key(request))
        if self._gateway.token is not None and not admin:
            raise Refusal(401, "authentication", "opening a session needs the gateway's token", retry=False)
        if self._gateway.token is None and not self._config.public and not self._meant(request.url.host or ""):
            # A page in a browser here may have pointed a name of its own at this machine.
            raise Refusal(403, "authentication", "this gateway opens sessions for this machine only", retry=False)
        if id is not None and is_ours(id) and not admin:
            self._session(request)  # or everybody who has seen its URL would be told its key
        try:
            config = SessionConfig.model_validate(parse_object(await request.read(), empty=True))
        except ValidationError as error:
            key, message = next(explain(error, SessionConfig))
            raise Refusal(400, "invalid", f"{key}: {message}" if key else message, param=key, retry=False) from error
        return json_response((await self._gateway.open(id, config)).as_json())

    async def _show(self, request: web.Request) -> web.StreamResponse:
        return json_response(self._session(request, admin=True).checked(request.query.get("snapshot")))

    async def _freeze(self, request: web.Request) -> web.StreamResponse:
        served = self._session(request, admin=True)
        await served.freeze()
        return json_response({"id": served.id, "status": served.status, "snapshot": served.snapshot})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        served = self._session(request, admin=True)
        body = parse_object(await request.read(), empty=True)
        given, reason = body.get("outcome", Outcome.OK), str(body.get("reason") or "")
        if given not in list(Outcome):
            raise Refusal(400, "invalid", f"outcome: one of {', '.join(Outcome)}", param="outcome", retry=False)
        await served.close("complete", Outcome(given), reason)
        return json_response(served.describe())

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        served = self._session(request, admin=True)
        await self._gateway.delete(served.id)
        return json_response({"id": served.id, "deleted": True})

    def _meant(self, host: str) -> bool:
        """Whether a request was sent to this gateway by one of its own names."""
        return is_loopback(host) or host == urlsplit(self._gateway.address).hostname

    def _is_admin(self, key: str) -> bool:
        token = self._gateway.token
        return token is not None and hmac.compare_digest(key.encode("utf-8", "replace"), token.encode())

    # -- refusals -----------------------------------------------------------------------------------------------

    @web.middleware
    async def _refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whatever goes wrong is told in the words of the dialect that was spoken."""
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            most = self._config.body_bytes
            refused = Refusal(413, "too_large", f"the request is larger than {most} bytes", retry=False)
        except web.HTTPException as error:
            said = f"{request.method} {request.path[:200]}: {error.reason.lower()}"
            refused = Refusal(error.status, "not_found" if error.status == 404 else "invalid", said, retry=False)
        except ConnectionResetError:
            raise
        except Exception as error:
            refused = refusal_of(error)
            if refused.status == 500:
                log.exception("%s %s failed", request.method, request.match_info.route.resource)
        answer = told(refused, self._voice(request))
        if refused.status == 405 and (allowed := request.match_info.http_exception) is not None:
            answer.headers["allow"] = allowed.headers.get("allow", "")
        return answer

    def _voice(self, request: web.Request) -> Dialect:
        _, _, path = request.path.lstrip("/").partition("/")
        path = path.removesuffix("/count_tokens")
        if "anthropic-version" in request.headers:
            path = "v1/messages"
        return self._voices.get(path, self._plain)


def told(refused: Refusal, dialect: Dialect) -> web.Response:
    """A refusal as an answer."""
    body = dialect.error(refused.status, str(refused), kind=refused.kind, param=refused.param)
    return json_response(body, refused.status, headers={} if refused.retry else {"x-should-retry": "false"})


def _key(request: web.Request) -> str:
    """The key that a request brings, as either SDK sends it."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _dialects() -> dict[str, type[Dialect]]:
    found: dict[str, type[Dialect]] = {}
    for path, place in ROUTES.items():
        module, _, name = place.partition(":")
        with suppress(ModuleNotFoundError):
            made: Any = getattr(importlib.import_module(module), name)
            found[path] = made
    return found
