"""The trial server: clients with its token submit, follow, cancel and collect trials over HTTP."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import Field, ValidationError

from loopwright.core.config import Config, Size, explain
from loopwright.execution.sandbox import SandboxError
from loopwright.gateway.dialects.base import parse_object
from loopwright.gateway.gateway import AdvertiseError
from loopwright.gateway.refusal import Refusal, refusal_of
from loopwright.gateway.server.observer import metrics_response
from loopwright.gateway.server.request_handler import json_response
from loopwright.gateway.settings import is_loopback
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_host import GatewayHost
from loopwright.rollouts.trial_server.queue import STATUSES, TrialQueue
from loopwright.rollouts.trial_server.runner import TrialRunner
from loopwright.rollouts.trial_server.submission import Submission, check_key, submission_digest

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MAX_WAIT_S = 60.0
_MAX_LISTED = 100
_RETRY_S = 2
_CHECK_S = 15.0


class TrialServerConfig(Config):
    """Settings of a trial server."""

    host: str = "127.0.0.1"
    """The address to listen at; by default only this machine can connect."""
    port: int = Field(default=8500, ge=0, le=65535)
    """0 for any free port."""
    concurrency: int = Field(default=4, ge=1)
    """How many trials run at a time."""
    queue: int = Field(default=1000, ge=1)
    """How many trials may be queued; more are refused until there is space."""
    body: Size = Field(default=8 * 2**20, ge=1024)
    """The largest submission, for example "8MiB"."""
    artifacts: Size = Field(default=16 * 2**20, ge=0)
    """Maximum total size of one trial's artifacts, for example "16MiB"."""
    keep_s: float = Field(default=7 * 86400.0, gt=0)
    """Seconds after which a trial that ended is deleted with its result."""

    @property
    def public(self) -> bool:
        """Whether other machines can connect."""
        return not is_loopback(self.host)


class TrialServer:
    """A queue of trials, its runner, and their HTTP routes.

    async with TrialServer(TrialServerConfig(), token, output=Path("trials"), scenario_dir=Path()) as server:
        …                                   # trials are submitted to server.address
    """

    def __init__(
        self,
        config: TrialServerConfig,
        token: str,
        *,
        output: Path,
        scenario_dir: Path,
        host: GatewayHost | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.config, self._token = config, token.encode()
        self._output, self._scenario_dir, self._host, self._say = output, scenario_dir, host, say
        self._available: set[tuple[str, tuple[str, ...], str]] = set()
        """Sandboxes that were checked, with their readable directories."""
        self.port = 0
        app = web.Application(client_max_size=config.body, middlewares=[self._guard])
        self._app_runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=75.0,
            auto_decompress=False,  # a small body could become a huge one, even without the token
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
        """The URL that it listens at."""
        host = self.config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def __aenter__(self) -> Self:
        self.queue = TrialQueue(self._output, max_queued=self.config.queue)
        self.recovered = self.queue.recover()
        self.runner = TrialRunner(
            self.queue,
            self._scenario_dir,
            concurrency=self.config.concurrency,
            artifact_bytes=self.config.artifacts,
            host=self._host,
            say=self._say,
        )
        try:
            if self._host is not None:
                await self._host.start()
            await self._app_runner.setup()
            site = web.TCPSite(self._app_runner, self.config.host, self.config.port)
            try:
                await site.start()
            except OSError as error:
                where = f"{self.config.host}:{self.config.port}"
                message = f"cannot listen at {where}: {error.strerror or error}. Choose another --port."
                raise AdvertiseError(message) from error
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        self.port = self._app_runner.addresses[0][1]
        self.runner.start_queued()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._app_runner.cleanup()
        await self.runner.close()
        if self._host is not None:
            await self._host.aclose()
        self.queue.close()

    # -- routes -------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        counts = {**dict.fromkeys(STATUSES, 0), **self.queue.counts()}
        trials = GaugeMetricFamily("loopwright_trials", "Trials by status, while they are stored.", labels=["status"])
        for status, count in counts.items():
            trials.add_metric([status], count)
        outcomes = CounterMetricFamily(
            "loopwright_trials_ended",
            "Trials that ended since the server was started, by outcome.",
            labels=["outcome"],
        )
        for outcome, count in sorted(self.runner.outcomes.items()):
            outcomes.add_metric([outcome], count)
        return metrics_response(lambda: (trials, outcomes))

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        body = parse_object(await request.read())
        key = check_key(request.headers.get("idempotency-key") or body.get("key"))
        body.pop("key", None)
        submission = await self._validate(body)
        entry = self.queue.add(key, submission_digest(body), orjson.dumps(body))
        self.queue.delete_older(self.config.keep_s)
        self.runner.start_queued()
        entry, queued = self.queue.find(entry.id), self.queue.body(entry.id)
        # Whether a trial that has not ended was submitted with another gateway than now.
        moved = bool(queued) and Submission.model_validate(orjson.loads(queued)).gateway != submission.gateway
        return json_response({**entry.as_json(), "moved": moved})

    async def _validate(self, body: dict[str, Any]) -> Submission:
        """The submission; Refusal if it cannot be run here."""
        try:
            submission = Submission.model_validate(body)
            await self._check_sandbox(submission.loop)
        except ValidationError as error:
            key, message = next(explain(error, Submission))
            raise Refusal(400, "invalid", f"{key}: {message}" if key else message, param=key, retry=False) from error
        except SandboxError as error:
            raise Refusal(400, "invalid", f"loop.sandbox: {error}", param="loop.sandbox", retry=False) from error
        except TimeoutError as error:
            message = f"loop.sandbox: {submission.loop.sandbox} could not be checked within {_CHECK_S:g} s"
            raise Refusal(503, "busy", message, param="loop.sandbox") from error
        if submission.gateway is None and self._host is None:
            message = "gateway: give the address of the policy; this trial server was started without --engine"
            raise Refusal(400, "invalid", message, param="gateway", retry=False)
        return submission

    async def _check_sandbox(self, loop: RemoteConfig) -> None:
        """SandboxError if the sandbox is not available. Checked once, while other requests are answered."""
        if loop.exposes(self._output, self._scenario_dir):
            raise SandboxError("`readable` would show agents the server's own output: queue, results and tokens")
        sandbox, key = loop.build_sandbox(self._scenario_dir), (loop.sandbox, loop.readable, loop.harbor)
        if key not in self._available:
            async with asyncio.timeout(_CHECK_S):
                await asyncio.to_thread(sandbox.check)
            self._available.add(key)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        trials = [entry.as_json() for entry in self.queue.latest(_MAX_LISTED)]
        return json_response({"counts": self.queue.counts(), "trials": trials})

    async def _show(self, request: web.Request) -> web.StreamResponse:
        try:
            wait_s = min(max(float(request.query.get("wait_s", "0")), 0.0), _MAX_WAIT_S)
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
                f"the trial has no result: it is {entry.status}; see GET /trials/{entry.id}",
                retry=False,
            )
        return web.Response(body=result, content_type="application/json")

    async def _artifacts(self, request: web.Request) -> web.StreamResponse:
        entry = self.queue.find(request.match_info["id"])
        artifacts = [{"name": name, "size_bytes": size} for name, size in self.queue.artifacts(entry.id)]
        return json_response({"artifacts": artifacts})

    async def _artifact(self, request: web.Request) -> web.StreamResponse:
        id, name = request.match_info["id"], request.match_info["name"]
        data = self.queue.artifact(id, name)
        if data is None:
            raise Refusal(404, "not_found", f"the trial has no artifact {name[:200]!r}", retry=False)
        headers = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
        return web.Response(body=data, content_type="application/octet-stream", headers=headers)

    # -- authentication and errors ------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            token = token.strip() if scheme.lower() == "bearer" else ""
            authorised = hmac.compare_digest(token.encode("utf-8", "replace"), self._token)
            if request.path != "/healthz" and not authorised:
                raise Refusal(401, "authentication", "this needs the trial server's token", retry=False)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            message = f"the submission is larger than {self.config.body} bytes"
            refusal = Refusal(413, "too_large", message, retry=False)
        except web.HTTPException as error:
            kind = "not_found" if error.status == 404 else "invalid"
            refusal = Refusal(error.status, kind, f"{request.method} {request.path[:200]}: {error.reason}", retry=False)
        except ConnectionResetError:
            raise
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status == 500:
                log.exception("%s %s failed", request.method, request.match_info.route.resource)
        body = {"message": str(refusal), "type": refusal.kind, "code": refusal.kind, "param": refusal.param}
        headers = {"retry-after": str(_RETRY_S)} if refusal.status == 429 else {}
        return json_response({"error": body}, refusal.status, headers=headers)
