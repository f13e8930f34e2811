"""The client of the live protocol: an environment behind a socket, stepped as if it were in this process.

One request, one response, in order, so that a step costs one round trip. Every response has a deadline (`timeout_s`).
While the server works on a request it sends `pong` every `heartbeat_s`; if three are missing it is dead or unreachable,
which is noticed long before the deadline of a slow step. A broken connection is never used again.
"""

import math
import time
from contextlib import suppress
from importlib.metadata import version
from typing import Any, NoReturn

from loopwright.core.errors import InvalidAction
from loopwright.envs.live.address import Address
from loopwright.envs.live.channel import Channel
from loopwright.envs.live.samples import checker, reader
from loopwright.envs.live.server import ServerError, ServerLost
from loopwright.envs.live.wire import VERSION, Message, Unsendable, WireError, decode_arrays, decode_space

_MISSED_HEARTBEATS = 3
_FIRST_WAIT_S, _MAX_WAIT_S = 0.02, 1.0
_MAX_CONNECT_S = 3600.0
_USE_SAME_VERSION = "Use the same protocol version on both sides."
_CHECK_SERVER = "Check that it runs, and its log; reset() reconnects."


class RemoteServer:
    """A GymServer at `unix:///path` or `tcp://host:port`, for one thread.

        server = RemoteServer("unix:///run/sim.sock")
        observation, info = server.reset(seed=1)

    `timeout_s`: how long any response may take. `connect_timeout_s`: how long to try to connect, with growing pauses,
    here and when `reset()` has to reconnect. `heartbeat_s`: how often the server must give a sign of life while it
    works. `validate`: check each observation and reward against the declared space.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 10.0,
        heartbeat_s: float = 5.0,
        validate: bool = False,
    ) -> None:
        self.address = Address.parse(address)
        self._timeout_s, self._connect_timeout_s, self._heartbeat_s = timeout_s, connect_timeout_s, heartbeat_s
        self._channel: Channel | None = None
        self._disconnect_reason = "it was never connected"
        self._welcome: Message = {}
        self._connect()
        try:
            self.observation_space = decode_space(self._welcome.get("observation_space"), "observation_space")
            self.action_space = decode_space(self._welcome.get("action_space"), "action_space")
            self.metadata = self._map(self._welcome, "metadata")
        except (WireError, ServerError) as error:
            self.close()
            raise ServerError(f"the server at {self.address} sent an unusable 'welcome': {error}") from error
        self._read = reader(self.observation_space)
        self._check = checker(self.observation_space) if validate else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. Reconnects if the server was lost; its environment is a new one then."""
        request = {"type": "reset", "seed": seed, "options": options}
        reconnected = self._channel is None
        if reconnected:
            self._connect()
        try:
            response = self._request(request, "state")
        except ServerLost as error:
            # Between two episodes nothing is lost: reconnect, but only once.
            if reconnected or not isinstance(error.__cause__, EOFError | ConnectionError):
                raise
            self._connect()
            response = self._request(request, "state")
        return self._observation(response), self._map(response, "info")

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step. ServerLost ends the episode; after a ServerError the connection is still usable."""
        response = self._request({"type": "step", "action": action}, "result")
        observation = self._observation(response)
        reward, terminated, truncated = response.get("reward"), response.get("terminated"), response.get("truncated")
        if type(reward) is not float:
            if type(reward) is not int:
                self._reject("reward", reward, "a number")
            reward = float(reward)
        if self._check is not None and not math.isfinite(reward):
            self._reject("reward", reward, "a finite number")
        if type(terminated) is not bool:
            self._reject("terminated", terminated, "true or false")
        if type(truncated) is not bool:
            self._reject("truncated", truncated, "true or false")
        return observation, reward, terminated, truncated, self._map(response, "info")

    def ping(self) -> None:
        """Check that the server responds. Raises ServerLost."""
        self._request({"type": "ping"}, "pong")

    def close(self) -> None:
        """Close the connection. May be called again."""
        if self._channel is not None:
            with suppress(OSError):  # the server is gone already
                self._channel.send({"type": "close"})
            self._disconnect("it was closed")

    # Requests and responses

    def _request(self, request: Message, expected: str) -> Message:
        """Send a request and wait for its response."""
        channel, kind = self._channel, request["type"]
        if channel is None:
            raise ServerLost(
                f"the server at {self.address} is not connected: {self._disconnect_reason}. Call reset() to reconnect."
            )
        deadline_s = time.monotonic() + self._timeout_s
        try:
            channel.send(request)
            response: Message = channel.receive(deadline_s)
            while response["type"] == "pong" != expected:
                response = channel.receive_within(deadline_s)
        except Unsendable as error:
            raise InvalidAction(f"{kind!r} cannot be sent to {self.address}: {error}") from error
        except WireError as error:
            self._lose(f"it violated the protocol: {error}", error)
        except TimeoutError as error:
            if time.monotonic() < deadline_s - 1e-3:
                silent_s = _MISSED_HEARTBEATS * self._server_heartbeat_s()
                self._lose(f"no heartbeat for {silent_s:g} s during {kind!r}; a slow server sends 'pong'", error)
            self._lose(f"no response to {kind!r} within {self._timeout_s:g} s (timeout_s)", error)
        except (OSError, EOFError) as error:
            self._lose(f"the connection broke during {kind!r} ({error or type(error).__name__})", error)
        except BaseException:
            # Ctrl-C, for instance: the pending response would be taken for that of the next request.
            self._disconnect("a call was interrupted")
            raise
        if response["type"] != expected:
            self._raise_unexpected(kind, response)
        return response

    def _raise_unexpected(self, request: str, response: Message) -> NoReturn:
        """Raise the error that the server reports, or for a response to something else."""
        if response["type"] != "error":
            self._lose(f"it violated the protocol: it sent {response['type']!r} in response to {request!r}")
        kind, message = response.get("kind"), response.get("message")
        if kind == "action":
            raise InvalidAction(f"the server at {self.address} cannot read the action: {message}")
        if kind == "environment":
            raise ServerError(f"the environment at {self.address} failed in {request!r}: {message}")
        advice = _USE_SAME_VERSION if kind == "version" else _CHECK_SERVER
        self._lose(f"it refused {request!r} ({kind}): {message}", advice=advice)

    def _observation(self, response: Message) -> Any:
        try:
            observation = self._read(response.get("obs"), "obs")
        except WireError as error:
            raise ServerError(f"the server at {self.address} sent {error}") from error
        if self._check is not None and (problem := self._check(observation)):
            raise ServerError(f"the server at {self.address} sent {problem}")
        return observation

    def _map(self, response: Message, field: str) -> dict[str, Any]:
        """An optional field with a map of any values."""
        value = response.get(field)
        if not value and (value is None or type(value) is dict):
            return {}
        if type(value) is not dict:
            self._reject(field, value, "a map")
        try:
            return {key: decode_arrays(item, field) for key, item in value.items()}
        except WireError as error:
            raise ServerError(f"the server at {self.address} sent {error}") from error

    def _reject(self, field: str, value: Any, expected: str) -> NoReturn:
        raise ServerError(f"the server at {self.address} sent {field}: expected {expected}, got {value!r}")

    # Connecting

    def _connect(self) -> None:
        """Try until the server sends `welcome`. A server that responds otherwise is not tried again."""
        deadline_s, wait_s = time.monotonic() + self._connect_timeout_s, _FIRST_WAIT_S
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                channel = Channel(self.address.connect(min(max(0.001, left_s), _MAX_CONNECT_S)))
                self._channel = channel
                self._greet(channel)
                return
            except ServerLost as error:
                if not isinstance(error.__cause__, EOFError | ConnectionError) or left_s <= wait_s:
                    raise
            except OSError as error:
                if left_s <= wait_s:
                    self._lose(f"cannot connect ({error.strerror or error})", error)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)

    def _greet(self, channel: Channel) -> None:
        channel.set_timeout(self._timeout_s)
        name = f"loopwright {version('loopwright')}"
        hello = {"type": "hello", "version": VERSION, "name": name, "heartbeat_s": float(self._heartbeat_s)}
        try:
            welcome = self._request(hello, "welcome")
        except ServerError:
            self._disconnect("its environment could not be created")
            raise
        if welcome.get("version") != VERSION:
            reason = f"it uses version {welcome.get('version')!r} of the protocol, this client version {VERSION}"
            self._lose(reason, advice=_USE_SAME_VERSION)
        if self._welcome and any(welcome.get(s) != self._welcome.get(s) for s in ("observation_space", "action_space")):
            reason = "its spaces have changed since the last connection, so nothing learned would fit"
            self._lose(reason, advice="Serve the same environment again, or start a new run.")
        self._welcome = welcome
        channel.set_timeout(min(self._timeout_s, _MISSED_HEARTBEATS * self._server_heartbeat_s()))

    def _server_heartbeat_s(self) -> float:
        """The heartbeat interval that the server promised, or infinity."""
        interval_s = self._welcome.get("heartbeat_s")
        return float(interval_s) if isinstance(interval_s, int | float) and interval_s > 0 else math.inf

    def _lose(self, reason: str, cause: BaseException | None = None, *, advice: str = _CHECK_SERVER) -> NoReturn:
        self._disconnect(reason)
        raise ServerLost(f"lost the server at {self.address}: {reason}. {advice}", restarts=True) from cause

    def _disconnect(self, reason: str) -> None:
        self._disconnect_reason = reason
        if self._channel is not None:
            self._channel.close()
            self._channel = None
