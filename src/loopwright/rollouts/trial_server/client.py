"""The client of a trial server: a remote worker whose agents run on another machine."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.gateway.client import GatewayClient, GatewayLost, endpoint
from loopwright.gateway.gateway import AdvertiseError
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.settings import SERVER_TOKEN, is_loopback
from loopwright.rollouts.pools.base import PoolDown, SerializationError, Worker
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.worker import RemoteRequest
from loopwright.rollouts.trial_server.submission import RUN_KEYS, trial_id

_POLL_S = 30.0
_ANSWER_S = 30.0
"""Seconds for an answer, in addition to the time that the server was asked to wait."""
_PAUSE_S = 1.0
_GRACE_S = 5.0
"""Seconds in addition to queue and deadline; less than the timeout of our caller."""
_CANCEL_S = 4.0
_MAX_SUBMISSIONS = 32


class TrialServerLost(GatewayLost):
    """A trial server that cannot be reached, or that lost a trial."""


class TrialServerClient:
    """A trial server, reached over HTTP.

    `patience_s` is how long it may be unreachable, for example during a restart, before its trials count as lost.
    """

    def __init__(self, url: str, token: str | None = None, *, connections: int = 100, patience_s: float = 30.0) -> None:
        self._http = GatewayClient(url, connections=connections, kind="trial server")
        self.url, self._token, self.patience_s = self._http.url, token, patience_s

    async def check(self, gateway_url: str = "") -> None:
        """Checks that the server is running, accepts our token, and can reach this gateway."""
        if gateway_url and is_loopback(endpoint(gateway_url)[0]) and not is_loopback(endpoint(self.url)[0]):
            raise AdvertiseError(
                f"the gateway is at {gateway_url}, which agents at the trial server {self.url} cannot reach. Set where "
                'it listens and its address: [run.gateway] host = "0.0.0.0", advertise_host = "10.0.0.1".'
            )
        try:
            await self.request("GET", "/trials", expect="counts")
        except Refusal as error:
            await self.close()
            raise TrialServerLost(self.refusal_message(error)) from error
        except TrialServerLost:
            await self.close()
            raise

    async def request(
        self, method: str, path: str, body: Any = None, *, wait_s: float = 0.0, expect: str = "status"
    ) -> dict[str, Any]:
        """The server's answer. Refusal if it refuses, TrialServerLost if it is unreachable or not a trial server."""
        try:
            answer = await self._http.request(method, path, body, key=self._token, timeout_s=wait_s + _ANSWER_S)
        except GatewayLost as error:
            raise TrialServerLost(str(error)) from error
        if expect not in answer:
            raise TrialServerLost(f"{self.url} answered {method} {path} without {expect!r}. Is it a trial server?")
        return answer

    def refusal_message(self, error: Refusal) -> str:
        """A refusal as an error message, with the fix."""
        fix = f" Give its token with `token_file` or {SERVER_TOKEN}." if error.status == 401 else ""
        return f"the trial server at {self.url} refused the request: {error}.{fix}"

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


class TrialServerWorker(Worker):
    """Has a trial server run each rollout. A trial that the server already has does not run twice."""

    def __init__(
        self,
        client: TrialServerClient,
        config: RemoteConfig,
        *,
        run: str,
        run_id: str,
        passed_env: Mapping[str, str] | None = None,
        run_tests: bool = False,
    ) -> None:
        self._client, self._config, self._run_id = client, config, run_id
        self._common_fields = {
            "loop": config.model_dump(mode="json", exclude_unset=True, exclude=set(RUN_KEYS)),
            "run": run,
            "passed": dict(passed_env or {}),
            "verify": run_tests,
            "artifacts": list(config.artifacts),
        }

    async def handle(self, request: RemoteRequest) -> Episode:
        rollout, access, config = request.request, request.access, self._config
        body = {
            **self._common_fields,
            "task": {**rollout.task.as_json(), "label": None},  # the label is for the judger, which runs here
            "trial": rollout.trial,
            "seed": rollout.seed,
        }
        if rollout.sampling is not None:
            body["sampling"] = rollout.sampling.model_dump(mode="json", exclude_unset=True)
        if access.url:
            body["gateway"] = {"url": access.url, "token": access.token}
        # The rollout's seed contains the run's seed, the trial and the attempt.
        trial = _SubmittedTrial(self._client, f"{self._run_id}:{rollout.seed}", body)
        try:
            async with asyncio.timeout(config.queue_s + config.total_s + _GRACE_S) as limit:
                return replace(await trial.episode(), task=rollout.task)
        except TimeoutError:
            await trial.cancel()
            if not limit.expired():
                raise
            reason = (
                f"the trial server did not finish within {config.queue_s:g} s in its queue and {config.total_s:g} s"
            )
            return Episode(rollout.task).failed(Outcome.LOST, Fault.INFRA, reason)
        except asyncio.CancelledError:
            # In a separate task: a second cancellation must not leave the agent running.
            await asyncio.shield(asyncio.ensure_future(trial.cancel()))
            raise
        except Refusal as error:
            if error.status == 413:
                return Episode(rollout.task).failed(Outcome.CRASHED, Fault.WORKLOAD, f"the trial server: {error}")
            if error.status in (400, 401, 403):  # every other trial would be refused too
                raise PoolDown(self._client.refusal_message(error)) from error
            raise TrialServerLost(f"the trial server at {self._client.url}: {error}") from error

    async def close(self) -> None:
        await self._client.close()


class _SubmittedTrial:
    """One rollout at a trial server."""

    def __init__(self, client: TrialServerClient, key: str, body: Mapping[str, Any]) -> None:
        self._client, self._key, self._body = client, key, body
        self._id = trial_id(key)

    async def episode(self) -> Episode:
        """The trial's episode. An earlier submission of the same trial is used if it can still succeed."""
        for number in range(_MAX_SUBMISSIONS):
            key = f"{self._key}.{number}" if number else self._key
            self._id = trial_id(key)
            entry = await self._submit(key)
            if entry["status"] in ("cancelling", "cancelled", "lost", "conflict"):
                continue
            if entry.get("moved"):  # its agent uses the gateway of an earlier process of this run, which is gone
                await self.cancel()
                continue
            return await self._wait()
        raise TrialServerLost(
            f"trial {self._key} was submitted {_MAX_SUBMISSIONS} times; each time it was cancelled or lost, or its "
            f"key belonged to another trial. See the log of {self._client.url}"
        )

    async def _submit(self, key: str) -> dict[str, Any]:
        while True:
            try:
                return await self._request("POST", "/trials", {**self._body, "key": key})
            except Refusal as error:
                if error.status == 409:  # the trial with this key differs, for example after a change of the loop
                    return {"status": "conflict"}
                if error.status != 429:
                    raise
                await asyncio.sleep(_PAUSE_S)  # its queue is full; our own timeout limits how long we try
            except ValueError as error:  # a task that is not plain data
                raise SerializationError(str(error)) from error

    async def _wait(self) -> Episode:
        while True:
            entry = await self._request("GET", f"/trials/{self._id}?wait_s={_POLL_S:g}", wait_s=_POLL_S)
            if entry["status"] == "ended":
                return await self._result()
            if entry["status"] in ("cancelled", "lost"):
                raise TrialServerLost(
                    f"trial {self._id} at {self._client.url} is {entry['status']}: {entry.get('reason')}"
                )

    async def _request(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """The server's answer, even if it is unreachable for a while."""
        clock, lost_at = asyncio.get_running_loop().time, None
        while True:
            try:
                return await self._client.request(method, path, body, **options)
            except TrialServerLost:
                lost_at = clock() if lost_at is None else lost_at
                if clock() - lost_at >= self._client.patience_s:
                    raise
                await asyncio.sleep(_PAUSE_S)

    async def _result(self) -> Episode:
        try:
            result = await self._request("GET", f"/trials/{self._id}/result", expect="episode")
            episode = Episode.from_json(result["episode"])
            server = {"url": self._client.url, "id": self._id, "attempts": result["attempts"]}
            artifacts = result["artifacts"]
            if self._body["artifacts"]:
                server |= {"artifacts": artifacts["kept"], "left_off": artifacts["left_off"]}
            return replace(episode, evidence={**episode.evidence, "server": server})
        except (KeyError, TypeError, ValueError) as error:
            raise TrialServerLost(f"{self._client.url} sent no episode: {error!r}. Is it a trial server?") from error

    async def cancel(self) -> None:
        """Cancel the trial at the server, if the server can be reached."""
        with suppress(GatewayLost, Refusal, TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                await self._client.request("POST", f"/trials/{self._id}/cancel")
