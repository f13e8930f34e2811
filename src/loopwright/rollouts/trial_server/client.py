"""The client of a trial server: a remote worker whose agents run elsewhere; it brings their episodes home."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.gateway.client import GatewayClient, GatewayLost, endpoint
from loopwright.gateway.gateway import AdvertiseError, is_loopback
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.settings import SERVER_TOKEN
from loopwright.rollouts.pools.base import PoolDown, SerializationError, Worker
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.worker import RemoteRequest
from loopwright.rollouts.trial_server.submission import OF_THE_RUN, id_of

_POLL_S = 30.0
_ANSWER_S = 30.0
"""Seconds for an answer, beyond those that the server was asked to wait."""
_PAUSE_S = 1.0
_GRACE_S = 5.0
"""Seconds beyond queue and deadline; fewer than whoever waits for us grants."""
_CANCEL_S = 4.0
_MOST_KEYS = 32


class TrialServerLost(GatewayLost):
    """A trial server that cannot be reached, or that lost a trial."""


class TrialServerClient(GatewayClient):
    """A trial server elsewhere, over one HTTP session.

    `patience_s` is how long it may be away, as when it is started anew, before its trials count as lost.
    """

    kind = "trial server"

    def __init__(self, url: str, token: str | None = None, *, connections: int = 100, patience_s: float = 30.0) -> None:
        super().__init__(url, token, connections=connections)
        self.patience_s = patience_s

    async def check(self, gateway: str = "") -> None:
        """That it is there, takes our token, and could reach this gateway."""
        if gateway and is_loopback(endpoint(gateway)[0]) and not is_loopback(endpoint(self.url)[0]):
            raise AdvertiseError(
                f"the gateway is at {gateway}, which agents at the trial server {self.url} cannot reach. Have it "
                'listen elsewhere, and say where: [run.gateway] host = "0.0.0.0", advertise_host = "10.0.0.1".'
            )
        try:
            await self.told("GET", "/trials", wanted="counts")
        except Refusal as error:
            await self.close()
            raise TrialServerLost(_unauthorised(self.url, error)) from error
        except TrialServerLost:
            await self.close()
            raise

    async def told(
        self, method: str, path: str, body: Any = None, *, wait_s: float = 0.0, wanted: str = "status"
    ) -> dict[str, Any]:
        """What it answers. Refusal if it will not, TrialServerLost if it cannot be asked, or is somebody else."""
        try:
            told = await self.ask(method, path, body, key=self._token, timeout_s=wait_s + _ANSWER_S)
        except GatewayLost as error:
            raise TrialServerLost(str(error)) from error
        if wanted not in told:
            raise TrialServerLost(f"{self.url} answered {method} {path} without {wanted!r}. Is it a trial server?")
        return told


class TrialServerWorker(Worker):
    """Has a trial server make each rollout. A trial that is known there is not run twice."""

    def __init__(
        self,
        client: TrialServerClient,
        config: RemoteConfig,
        *,
        run: str,
        run_id: str,
        passed: Mapping[str, str] | None = None,
        verifies: bool = False,
    ) -> None:
        self._client, self._config, self._run_id = client, config, run_id
        self._shared = {
            "loop": config.model_dump(mode="json", exclude_unset=True, exclude=set(OF_THE_RUN)),
            "run": run,
            "passed": dict(passed or {}),
            "verify": verifies,
            "artifacts": list(config.artifacts),
        }

    async def handle(self, order: RemoteRequest) -> Episode:
        # The seed tells the run's seed, the trial and the attempt at it.
        flight = _Flight(self._client, f"{self._run_id}:{order.request.seed}", self._body(order))
        task, config = order.request.task, self._config
        try:
            async with asyncio.timeout(config.queue_s + config.deadline_s + _GRACE_S) as limit:
                return replace(await flight.episode(), task=task)
        except TimeoutError:
            await flight.cancel()
            if not limit.expired():
                raise
            said = f"the trial server was not done within {config.queue_s:g} s in its queue and {config.deadline_s:g} s"
            return Episode(task).failed(Outcome.LOST, Fault.INFRA, said)
        except asyncio.CancelledError:
            # In a task of its own: a second cancellation must not leave the agent at work.
            await asyncio.shield(asyncio.ensure_future(flight.cancel()))
            raise
        except Refusal as error:
            return self._refused(Episode(task), error)

    def _body(self, order: RemoteRequest) -> dict[str, Any]:
        access, request = order.access, order.request
        # Without its label: that is for the judger, who is here.
        task = {**request.task.as_json(), "label": None}
        body = {**self._shared, "task": task, "trial": request.trial, "seed": request.seed}
        if request.sampling is not None:
            body["sampling"] = request.sampling.model_dump(mode="json", exclude_unset=True)
        if access.url:
            body["gateway"] = {"url": access.url, "token": access.token}
        return body

    def _refused(self, episode: Episode, error: Refusal) -> Episode:
        if error.status == 413:
            return episode.failed(Outcome.CRASHED, Fault.WORKLOAD, f"the trial server: {error}")
        if error.status in (400, 401, 403):  # and so would all others be
            raise PoolDown(_unauthorised(self._client.url, error)) from error
        raise TrialServerLost(f"the trial server at {self._client.url}: {error}") from error

    async def close(self) -> None:
        await self._client.close()


class _Flight:
    """One rollout at a trial server."""

    def __init__(self, client: TrialServerClient, key: str, body: Mapping[str, Any]) -> None:
        self._client, self._key, self._body = client, key, body
        self._id = id_of(key)

    async def episode(self) -> Episode:
        """What became of it; an earlier submission of the same trial counts, if it can still come to something."""
        for number in range(_MOST_KEYS):
            key = f"{self._key}.{number}" if number else self._key
            self._id = id_of(key)
            told = await self._submitted(key)
            if told["status"] in ("cancelling", "cancelled", "lost", "conflict"):
                continue
            if told.get("moved"):  # its agent talks to a gateway that is gone: the one of our own former life
                await self.cancel()
                continue
            return await self._followed()
        raise TrialServerLost(
            f"trial {self._key} was submitted {_MOST_KEYS} times; each time it was cancelled or lost there, or its key "
            f"was another trial's. The log of {self._client.url} says why"
        )

    async def _submitted(self, key: str) -> dict[str, Any]:
        while True:
            try:
                return await self._told("POST", "/trials", {**self._body, "key": key})
            except Refusal as error:
                if error.status == 409:  # a trial of this key asks for something else, as before a change of the loop
                    return {"status": "conflict"}
                if error.status != 429:
                    raise
                await asyncio.sleep(_PAUSE_S)  # its queue is full, for as long as ours has patience
            except ValueError as error:  # a task that is no plain data
                raise SerializationError(str(error)) from error

    async def _followed(self) -> Episode:
        while True:
            told = await self._told("GET", f"/trials/{self._id}?wait_s={_POLL_S:g}", wait_s=_POLL_S)
            if told["status"] == "ended":
                return await self._result()
            if told["status"] in ("cancelled", "lost"):
                raise TrialServerLost(
                    f"trial {self._id} at {self._client.url} is {told['status']}: {told.get('reason')}"
                )

    async def _told(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """What the server answers, also if it is away for a while."""
        clock, gone_at = asyncio.get_running_loop().time, None
        while True:
            try:
                return await self._client.told(method, path, body, **options)
            except TrialServerLost:
                gone_at = clock() if gone_at is None else gone_at
                if clock() - gone_at >= self._client.patience_s:
                    raise
                await asyncio.sleep(_PAUSE_S)

    async def _result(self) -> Episode:
        try:
            told = await self._told("GET", f"/trials/{self._id}/result", wanted="episode")
            episode = Episode.from_json(told["episode"])
            where = {"url": self._client.url, "id": self._id, "attempts": told["attempts"]}
            kept, left_off = told["artifacts"]["kept"], told["artifacts"]["left_off"]
            files = {"artifacts": kept, "left_off": left_off} if self._body["artifacts"] else {}
            return replace(episode, evidence={**episode.evidence, "server": {**where, **files}})
        except (KeyError, TypeError, ValueError) as error:
            raise TrialServerLost(f"{self._client.url} gave no episode: {error!r}. Is it a trial server?") from error

    async def cancel(self) -> None:
        """Have it ended there, if somebody is there."""
        with suppress(GatewayLost, Refusal, TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                await self._client.told("POST", f"/trials/{self._id}/cancel")


def _unauthorised(url: str, error: Refusal) -> str:
    said = f"the trial server at {url} refuses: {error}."
    return f"{said} Give its token by `token_file`, or in {SERVER_TOKEN}." if error.status == 401 else said
