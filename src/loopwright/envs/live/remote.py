"""Remote servers: an environment behind a socket that is stepped as if it were here.

One request, one answer, in order, so that a step costs one round trip. Every answer has a deadline (`timeout_s`).
While the server works on a request it says `pong` every `heartbeat_s` by itself; silence for three of those means
that it is dead or cut off, long before the deadline of a slow step. A connection that broke is never used again.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Any, NoReturn

from loopwright.core.errors import InvalidAction
from loopwright.envs.live.channel import Address, Channel
from loopwright.envs.live.reading import checker, reader
from loopwright.envs.live.server import ServerError, ServerLost
from loopwright.envs.live.wire import VERSION, Message, Unsendable, WireError, revived, space_from

_BEATS_MISSED = 3
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
_LONGEST_TRY_S = 3600.0
_OTHER_VERSION = "Serve it with a version that speaks the same."
_LOOK = "See whether it runs, and its log; reset() looks for it again."


class RemoteServer:
    """A GymServer at `unix:///path` or `tcp://host:port`, for one thread.

    server = RemoteServer("unix:///run/sim.sock")
    observation, info = server.reset(seed=1)

    `timeout_s`: how long any answer may take, the greeting included. `connect_timeout_s`: how long to look for the
    server, with growing pauses, here and when `reset()` has to look for it again. `heartbeat_s`: how often it must
    give a sign of life while it works. `validate`: check each observation and reward against the declared space.
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
        self._lost = "it was never reached"
        self._welcome: Message = {}
        self._connect()
        try:
            self.observation_space = space_from(self._welcome.get("observation_space"), "observation_space")
            self.action_space = space_from(self._welcome.get("action_space"), "action_space")
            self.metadata = self._map(self._welcome, "metadata")
        except (WireError, ServerError) as error:
            self.close()
            raise ServerError(f"the greeting of the server at {self.address} cannot be used: {error}") from error
        self._read = reader(self.observation_space)
        self._check: Callable[[Any], str | None] | None = checker(self.observation_space) if validate else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. A server that was lost, now or before, is looked for again; its environment is new."""
        request = {"type": "reset", "seed": seed, "options": options}
        fresh = self._channel is None
        if fresh:
            self._connect()
        try:
            reply = self._ask(request, "state")
        except ServerLost as error:
            # It went away between two episodes: no harm is done yet. One that just came and went is not chased.
            if fresh or not isinstance(error.__cause__, EOFError | ConnectionError):
                raise
            self._connect()
            reply = self._ask(request, "state")
        return self._observation(reply), self._map(reply, "info")

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Act. ServerLost ends the episode; after a ServerError the connection is still good."""
        reply = self._ask({"type": "step", "action": action}, "result")
        observation = self._observation(reply)
        reward, terminated, truncated = reply.get("reward"), reply.get("terminated"), reply.get("truncated")
        if type(reward) is not float:
            if type(reward) is not int:
                self._refuse("reward", reward, "a number")
            reward = float(reward)
        if self._check is not None and not math.isfinite(reward):
            self._refuse("reward", reward, "a finite number")
        if type(terminated) is not bool:
            self._refuse("terminated", terminated, "true or false")
        if type(truncated) is not bool:
            self._refuse("truncated", truncated, "true or false")
        return observation, reward, terminated, truncated, self._map(reply, "info")

    def ping(self) -> None:
        """Ask for a sign of life: a ServerLost if there is none."""
        self._ask({"type": "ping"}, "pong")

    def close(self) -> None:
        """Say goodbye and hang up. It can be called again."""
        if self._channel is not None:
            # An error means that it is gone already.
            with suppress(OSError):
                self._channel.send({"type": "close"})
            self._drop("it was closed")

    # Talking

    def _ask(self, request: Message, expected: str) -> Message:
        """Send a request and wait for its answer."""
        channel = self._channel
        if channel is None:
            raise ServerLost(
                f"the server at {self.address} is not connected: {self._lost}. Call reset() to look for it."
            )
        until_s = time.monotonic() + self._timeout_s
        try:
            channel.send(request)
            reply = channel.receive(until_s)
            while reply["type"] == "pong" != expected:
                reply = channel.receive_on(until_s)
        except Unsendable as error:
            raise InvalidAction(f"{request['type']!r} cannot be sent to {self.address}: {error}") from error
        except WireError as error:
            self._lose(f"it does not speak the protocol: {error}", error)
        except TimeoutError as error:
            self._lose(self._overdue(request["type"], until_s), error)
        except (OSError, EOFError) as error:
            self._lose(
                f"the connection broke while it worked on {request['type']!r} ({error or type(error).__name__})", error
            )
        except BaseException:
            # Ctrl-C, for instance: the answer is still on its way, and would be taken for that to the next request.
            self._drop("a call was interrupted")
            raise
        if reply["type"] != expected:
            self._unexpected(request["type"], reply)
        return reply

    def _overdue(self, request: str, until_s: float) -> str:
        if time.monotonic() < until_s - 1e-3:
            silent_s = _BEATS_MISSED * self._beat_s()
            return f"no sign of life for {silent_s:g} s while it worked on {request!r}; a slow server says pong"
        return f"no answer to {request!r} within {self._timeout_s:g} s (timeout_s)"

    def _unexpected(self, request: str, reply: Message) -> NoReturn:
        """An error that it reports, or an answer to something else."""
        kind, words = reply.get("kind"), reply.get("message")
        if reply["type"] == "error" and kind == "action":
            raise InvalidAction(f"the server at {self.address} cannot read the action: {words}")
        if reply["type"] == "error" and kind == "environment":
            raise ServerError(f"the environment at {self.address} failed in {request!r}: {words}")
        if reply["type"] == "error" and kind == "version":
            self._lose(f"it refused {request!r} ({kind}): {words}", advice=_OTHER_VERSION)
        if reply["type"] == "error":
            self._lose(f"it refused {request!r} ({kind}): {words}")
        self._lose(f"it answered {request!r} with {reply['type']!r}: that is not the protocol")

    def _observation(self, reply: Message) -> Any:
        try:
            observation = self._read(reply.get("obs"), "obs")
        except WireError as error:
            raise ServerError(f"the server at {self.address} gave {error}") from error
        if self._check is not None and (wrong := self._check(observation)):
            raise ServerError(f"the server at {self.address} gave {wrong}")
        return observation

    def _map(self, reply: Message, field: str) -> dict[str, Any]:
        """A map that may hold anything, or be left out."""
        found = reply.get(field)
        if not found and (found is None or type(found) is dict):
            return {}
        if type(found) is not dict:
            self._refuse(field, found, "a map")
        try:
            return {key: revived(value, field) for key, value in found.items()}
        except WireError as error:
            raise ServerError(f"the server at {self.address} gave {error}") from error

    def _refuse(self, field: str, value: Any, declared: str) -> NoReturn:
        raise ServerError(f"the server at {self.address} gave {field}: {value!r} where {declared} is due")

    # Connecting

    def _connect(self) -> None:
        """Look for the server until it greets us; what answers but is not ours is not asked twice."""
        until_s, wait_s = time.monotonic() + self._connect_timeout_s, _FIRST_WAIT_S
        while True:
            left_s = until_s - time.monotonic()
            try:
                self._channel = Channel(self.address.connect(min(max(0.001, left_s), _LONGEST_TRY_S)))
                self._greet()
                return
            except ServerLost as error:
                if not isinstance(error.__cause__, EOFError | ConnectionError) or left_s <= wait_s:
                    raise
            except OSError as error:
                if left_s <= wait_s:
                    self._lose(f"nobody answers there ({error.strerror or error})", error)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _greet(self) -> None:
        assert self._channel is not None  # noqa: S101
        self._channel.be_patient(self._timeout_s)
        name = f"loopwright {version('loopwright')}"
        hello = {"type": "hello", "version": VERSION, "name": name, "heartbeat_s": float(self._heartbeat_s)}
        try:
            welcome = self._ask(hello, "welcome")
        except ServerError:
            self._drop("its environment could not be made")
            raise
        if welcome.get("version") != VERSION:
            theirs = f"it speaks version {welcome.get('version')!r} of the protocol, this is version {VERSION}"
            self._lose(theirs, advice=_OTHER_VERSION)
        declared = ("observation_space", "action_space")
        if self._welcome and any(welcome.get(name) != self._welcome.get(name) for name in declared):
            theirs = "it came back with other spaces than before: nothing that was learned would fit"
            self._lose(theirs, advice="Serve the same environment again, or start a new run.")
        self._welcome = welcome
        self._channel.be_patient(min(self._timeout_s, _BEATS_MISSED * self._beat_s()))

    def _beat_s(self) -> float:
        """How often the server promised to give a sign of life; infinity if it did not."""
        promised = self._welcome.get("heartbeat_s")
        return float(promised) if isinstance(promised, int | float) and promised > 0 else math.inf

    def _lose(self, why: str, cause: BaseException | None = None, *, advice: str = _LOOK) -> NoReturn:
        self._drop(why)
        raise ServerLost(f"lost the server at {self.address}: {why}. {advice}") from cause

    def _drop(self, why: str) -> None:
        self._lost = why
        if self._channel is not None:
            self._channel.close()
            self._channel = None
