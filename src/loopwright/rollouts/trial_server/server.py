"""The trial server: trials are submitted, followed, cancelled and collected over HTTP, by whoever holds its token."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web
from pydantic import Field, ValidationError, field_validator

from loopwright.core.config import Config, explain, size_bytes
from loopwright.execution.sandbox import SandboxError
from loopwright.gateway.gateway import AdvertiseError, is_loopback
from loopwright.gateway.refusal import Refusal, refusal_of
from loopwright.gateway.server.body import parse_object
from loopwright.gateway.server.metrics import CONTENT_TYPE, family
from loopwright.gateway.server.request_handler import json_response
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_host import GatewayHost
from loopwright.rollouts.trial_server.queue import STATUSES, TrialEntry, TrialQueue
from loopwright.rollouts.trial_server.runner import TrialRunner
from loopwright.rollouts.trial_server.submission import Submission, checked_key, digest_of

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_LONGEST_S = 60.0
_LISTED = 100
_RETRY_S = 2
_CHECK_S = 15.0


class TrialServerConfig(Config):
    """How a trial server serves."""

    host: str = "127.0.0.1"
    """Where it listens; by default only this machine reaches it."""
    port: int = Field(default=8500, ge=0, le=65535)
    """0 for any that is free."""
    concurrency: int = Field(default=4, ge=1)
    """How many trials run at a time."""
    queue: int = Field(default=1000, ge=1)
    """How many may wait; a further one is refused until there is room."""
    body: int = Field(default=8 * 2**20, ge=1024)
    """The largest submission, for example "8MiB"."""
    artifacts: int = Field(default=16 * 2**20, ge=0)
    """What is kept of one trial's files at most, for example "16MiB"."""
    keep_s: float = Field(default=7 * 86400.0, gt=0)
    """Seconds after which a trial that ended is forgotten, with its result."""

    @field_validator("body", "artifacts", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return size_bytes(value)

    @property
    def public(self) -> bool:
        """Whether other machines reach it."""
        return not is_loopback(self.host)


class TrialServer:
    """A queue, its runner, and the routes to them.

    async with TrialServer(TrialServerConfig(), token, output=Path("trials"), home=Path()) as server:
        …                                   # trials are submitted to server.address
    """

    def __init__(
        self,
        config: TrialServerConfig,
        token: str,
        *,
        output: Path,
        home: Path,
        own: GatewayHost | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.config, self._token = config, token.encode()
        self._output, self._home, self._own, self._say = output, home, own, say
        self._standing: set[tuple[str, tuple[str, ...]]] = set()
        """Sandboxes that can be had, and what is readable in them."""
        self.port = 0
        app = web.Application(client_max_size=config.body, middlewares=[self._guarded])
        self._runner_of_app = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, keepalive_timeout=75.0
        )
        add = app.router.add_route
        add("GET", "/healthz", self._health)
        add("GET", "/metrics", self._metrics)
        add("POST", "/trials", self._submit)
        add("GET", "/trials", self._list)
        add("GET", "/trials/{id}", self._show)
        add("POST", "/trials/{id}/cancel", self._cancel)
        add("GET", "/trials/{id}/result", self._result)
        add("GET", "/trials/{id}/artifacts", self._artifacts)
        add("GET", "/trials/{id}/artifacts/{name:.+}", self._artifact)

    @property
    def address(self) -> str:
        """Where it listens."""
        host = self.config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def __aenter__(self) -> Self:
        self.queue = TrialQueue(self._output, most=self.config.queue)
        self.recovered = self.queue.recover()
        self.runner = TrialRunner(
            self.queue,
            self._home,
            concurrency=self.config.concurrency,
            artifact_bytes=self.config.artifacts,
            own=self._own,
            say=self._say,
        )
        try:
            if self._own is not None:
                await self._own.start()
            await self._runner_of_app.setup()
            site = web.TCPSite(self._runner_of_app, self.config.host, self.config.port)
            try:
                await site.start()
            except OSError as error:
                where = f"{self.config.host}:{self.config.port}"
                said = f"cannot listen at {where}: {error.strerror or error}. Choose another --port."
                raise AdvertiseError(said) from error
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        self.port = self._runner_of_app.addresses[0][1]
        self.runner.fill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._runner_of_app.cleanup()
        await self.runner.close()
        if self._own is not None:
            await self._own.aclose()
        self.queue.close()

    # -- routes -------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        counts = {**dict.fromkeys(STATUSES, 0), **self.queue.counts()}
        lines = (
            *family(
                "loopwright_trials",
                "gauge",
                "Trials by status, as long as they are kept.",
                [("", {"status": status}, count) for status, count in counts.items()],
            ),
            *family(
                "loopwright_trials_ended_total",
                "counter",
                "Trials that ended since the server was started, by outcome.",
                [("", {"outcome": outcome}, count) for outcome, count in sorted(self.runner.outcomes.items())],
            ),
        )
        return web.Response(body="\n".join([*lines, ""]).encode(), headers={"content-type": CONTENT_TYPE})

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        body = parse_object(await request.read())
        key = checked_key(request.headers.get("idempotency-key") or body.get("key"))
        body.pop("key", None)
        submission = await self._checked(body)
        entry = self.queue.add(key, digest_of(body), orjson.dumps(body))
        self.queue.forget(self.config.keep_s)
        self.runner.fill()
        entry = self.queue.find(entry.id)
        return json_response({**entry.as_json(), "moved": self._moved(entry, submission)})

    async def _checked(self, body: dict[str, Any]) -> Submission:
        """What is asked for; Refusal if it can never be done here."""
        try:
            submission = Submission.model_validate(body)
            await self._stands(submission.loop)
        except ValidationError as error:
            key, message = next(explain(error, Submission))
            raise Refusal(400, "invalid", f"{key}: {message}" if key else message, param=key, retry=False) from error
        except SandboxError as error:
            raise Refusal(400, "invalid", f"loop.sandbox: {error}", param="loop.sandbox", retry=False) from error
        except TimeoutError as error:
            said = f"loop.sandbox: {submission.loop.sandbox} could not be looked at within {_CHECK_S:g} s"
            raise Refusal(503, "busy", said, param="loop.sandbox") from error
        if submission.gateway is None and self._own is None:
            said = "gateway: say where the policy is; this trial server has no engine of its own (--engine)"
            raise Refusal(400, "invalid", said, param="gateway", retry=False)
        return submission

    async def _stands(self, loop: RemoteConfig) -> None:
        """That its sandbox can be had: looked at once, while others are answered."""
        sandbox, asked = loop.walls(self._home), (loop.sandbox, loop.readable)
        if asked not in self._standing:
            async with asyncio.timeout(_CHECK_S):
                await asyncio.to_thread(sandbox.check)
            self._standing.add(asked)

    def _moved(self, entry: TrialEntry, submission: Submission) -> bool:
        """Whether a trial that is not over was submitted with another gateway than now."""
        body = self.queue.body(entry.id)
        return bool(body) and Submission.model_validate(orjson.loads(body)).gateway != submission.gateway

    async def _list(self, request: web.Request) -> web.StreamResponse:
        listed = [entry.as_json() for entry in self.queue.latest(_LISTED)]
        return json_response({"counts": self.queue.counts(), "trials": listed})

    async def _show(self, request: web.Request) -> web.StreamResponse:
        try:
            wait_s = min(max(float(request.query.get("wait_s", "0")), 0.0), _LONGEST_S)
        except ValueError as error:
            raise Refusal(400, "invalid", "wait_s: give a number of seconds", param="wait_s", retry=False) from error
        entry = await self.runner.wait(request.match_info["id"], wait_s, request.query.get("seen"))
        return json_response(entry.as_json())

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        return json_response((await self.runner.cancel(request.match_info["id"])).as_json())

    async def _result(self, request: web.Request) -> web.StreamResponse:
        entry = self.queue.find(request.match_info["id"])
        result = self.queue.result(entry.id)
        if result is None:
            raise Refusal(
                409,
                entry.status,
                f"the trial has no result: it is {entry.status}; GET /trials/{entry.id} says more",
                retry=False,
            )
        return web.Response(body=result, content_type="application/json")

    async def _artifacts(self, request: web.Request) -> web.StreamResponse:
        entry = self.queue.find(request.match_info["id"])
        found = [{"name": name, "size_bytes": size} for name, size in self.queue.artifacts(entry.id)]
        return json_response({"artifacts": found})

    async def _artifact(self, request: web.Request) -> web.StreamResponse:
        id, name = request.match_info["id"], request.match_info["name"]
        data = self.queue.artifact(id, name)
        if data is None:
            raise Refusal(404, "not_found", f"the trial has no artifact {name[:200]!r}", retry=False)
        headers = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
        return web.Response(body=data, content_type="application/octet-stream", headers=headers)

    # -- who may, and what is refused ---------------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path != "/healthz":
                self._admit(request)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            most = self.config.body
            refused = Refusal(413, "too_large", f"the submission is larger than {most} bytes", retry=False)
        except web.HTTPException as error:
            kind = "not_found" if error.status == 404 else "invalid"
            refused = Refusal(error.status, kind, f"{request.method} {request.path[:200]}: {error.reason}", retry=False)
        except ConnectionResetError:
            raise
        except Exception as error:
            refused = refusal_of(error)
            if refused.status == 500:
                log.exception("%s %s failed", request.method, request.match_info.route.resource)
        told = {"message": str(refused), "type": refused.kind, "code": refused.kind, "param": refused.param}
        headers = {"retry-after": str(_RETRY_S)} if refused.status == 429 else {}
        return json_response({"error": told}, refused.status, headers=headers)

    def _admit(self, request: web.Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self._token):
            raise Refusal(401, "authentication", "this needs the trial server's token", retry=False)
