"""Isolation: an environment in a separate child process, so that a crash, a hang or a segmentation fault costs the
episodes in progress and not the run.

One child hosts any number of copies, and one message steps all of them:

    process = EnvProcess(ServerTarget("gymnasium:CartPole-v1"), copies=8, timeout_s=30.0)
    process.call([ResetRequest(n, seed=n) for n in range(8)])               # one message there, one back
    responses = process.call([StepRequest(n, 1) for n in range(8)])         # in the order of the requests
    process.call([StepRequest(0, 1), ResetRequest(1), StepRequest(2, 0)])   # resets and steps may be mixed
    process.close()

A request names the copy that it is for. The child handles the requests of a message one after another and responds with
one list: what each call returned, unchanged, or a `Failure`. A copy that raised is built again by its next reset; the
other copies are not affected. If the child dies or does not respond within `timeout_s`, or the call is interrupted, it
is killed with everything that it started, `call` raises ServerLost, and the next `call` starts a new child, in which
every copy needs a reset.

The wire: a socket pair; frames of four length bytes and a pickle. The child trusts its parent and is trusted, since it
runs the code that would otherwise run in this process. The first message is the target and the number of copies, the
first response the spaces and the metadata. The child ends when its parent does, also after `kill -9`: the kernel kills
it when the write end of `_lifeline` closes.
"""

import faulthandler
import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from loopwright.core.errors import LoopwrightError
from loopwright.core.imports import look_first_in
from loopwright.core.outcome import Outcome
from loopwright.envs.live.channel import Channel
from loopwright.envs.live.regime_server import RegimeServer, ServerTarget
from loopwright.envs.live.server import ServerError, ServerLost
from loopwright.envs.live.wire import HEADER_BYTES, MAX_FRAME_BYTES, Unsendable, make_sendable

_START_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 5.0
_RESET_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """Begin an episode of one copy."""

    copy: int
    seed: int | None = None
    options: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One step of one copy."""

    copy: int
    action: Any


@dataclass(frozen=True, slots=True)
class RenderRequest:
    """An image of the state of one copy."""

    copy: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A copy raised: the exception's type and message. It is built again by its next reset."""

    reason: str
    is_unusable: bool = False
    """Whether it responds, but with something unusable, so that building it again would not help."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The child's first response: what the environment declares, or why it cannot be created."""

    observation_space: Any = None
    action_space: Any = None
    metadata: Any = None
    problem: str | None = None


def frame(message: Any) -> bytes:
    """A message as bytes. Raises Unsendable."""
    try:
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # an object's own `__reduce__` may raise anything
        raise Unsendable(f"{type(error).__name__}: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise Unsendable(f"the message has {len(body):,} bytes; at most {MAX_FRAME_BYTES:,} are allowed")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class EnvProcess:
    """A child process with copies of an environment. For one thread. Raises ServerError if it cannot be created."""

    def __init__(self, target: ServerTarget, *, copies: int = 1, timeout_s: float | None = None) -> None:
        self._target, self.copies, self._timeout_s = target, copies, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self.starts = 0
        """How many processes were started so far: copies need a reset whenever it has grown."""
        welcome = self._start()
        self.observation_space, self.action_space = welcome.observation_space, welcome.action_space
        self.metadata: dict[str, Any] = dict(welcome.metadata or {})

    def call(self, requests: Sequence[ResetRequest | StepRequest | RenderRequest]) -> list[Any]:
        """One response per request: what the environment returned, or a Failure. Raises ServerLost."""
        kind = type(requests[0]).__name__.removesuffix("Request").lower()
        if self._channel is None:
            welcome = self._start()
            spaces = welcome.observation_space, welcome.action_space
            if spaces != (self.observation_space, self.action_space):
                self.close()
                raise ServerError("the environment's spaces have changed since its process was started first")
        assert self._channel is not None  # noqa: S101
        try:
            self._channel.send(requests)
            responses: list[Any] = self._channel.receive()
        except Unsendable:
            raise  # nothing was sent
        except TimeoutError:
            self._lose(f"it did not respond to {kind!r} within {self._timeout_s:g} s (timeout_s)", Outcome.TIMEOUT)
        except (OSError, EOFError):
            self._lose(f"its process {self._death()} in {kind!r}", Outcome.CRASHED)
        except Exception as error:  # noqa: BLE001  unpickling a user's objects
            self._lose(f"its response to {kind!r} cannot be read here: {error!r}", Outcome.CRASHED)
        except BaseException:
            # Interrupted: the pending response would be taken for that of the next call.
            self.kill()
            raise
        return responses

    def close(self) -> None:
        """Close all copies and end the process. May be called again."""
        if self._channel is not None and self._process is not None:
            with suppress(OSError, subprocess.TimeoutExpired, Unsendable):
                self._channel.send(None)
                self._process.wait(_CLOSE_TIMEOUT_S)
            self.kill()

    def kill(self) -> None:
        """End the process and everything that it started, at once."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._lifeline)
            os.close(self._traceback)
            self._process = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _start(self) -> Welcome:
        self.starts += 1
        ours, theirs = socket.socketpair()
        read_end, self._lifeline = os.pipe()
        self._traceback = os.memfd_create("traceback")
        fds = theirs.fileno(), read_end, self._traceback
        try:
            # In a new session, so that Ctrl-C reaches this process only, and its children are killed with it.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from loopwright.envs.live.isolated import run_child; run_child()",
                    *map(str, fds),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=fds,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(read_end)
        self._channel = Channel(ours, frame=frame, unpack=pickle.loads)
        self._channel.set_timeout(_START_TIMEOUT_S)
        try:
            self._channel.send((self._target, self.copies, sys.path))
            welcome: Welcome = self._channel.receive()
        except TimeoutError:
            self._lose(f"it was not created within {_START_TIMEOUT_S:g} s", Outcome.TIMEOUT)
        except (OSError, EOFError):
            self._lose(f"its process {self._death()} while it was created", Outcome.CRASHED)
        except BaseException:
            self.kill()
            raise
        if welcome.problem is not None:
            self.kill()
            raise ServerError(welcome.problem)
        if self._timeout_s is not None:
            self._channel.set_timeout(self._timeout_s)
        return welcome

    def _death(self) -> str:
        """How the process died, and where, if Python could tell."""
        assert self._process is not None  # noqa: S101
        try:
            code = self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        lines = os.pread(self._traceback, 65536, 0).decode(errors="replace").splitlines()
        where = next((line.strip() for line in lines if line.startswith("  File ")), None)
        return f"{how} ({where})" if where else how

    def _lose(self, reason: str, outcome: Outcome) -> NoReturn:
        self.kill()
        raise ServerLost(f"the environment {self._target.path!r} failed: {reason}", outcome=outcome, restarts=True)


class IsolatedServer:
    """One copy of an environment in a child process, as a GymServer."""

    def __init__(
        self,
        target: ServerTarget,
        *,
        timeout_s: float | None = None,
        process: EnvProcess | None = None,
        copy: int = 0,
    ) -> None:
        self._process, self._copy = process or EnvProcess(target, timeout_s=timeout_s), copy
        self.observation_space, self.action_space = self._process.observation_space, self._process.action_space
        self.metadata, self.render_mode = self._process.metadata, target.args.get("render_mode")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, in a new process if the last one is gone. A reset that fails is tried again."""
        request = ResetRequest(self._copy, seed, options)
        for _ in range(_RESET_ATTEMPTS - 1):
            with suppress(ServerLost):
                return cast("tuple[Any, dict[str, Any]]", self._call(request))
        return cast("tuple[Any, dict[str, Any]]", self._call(request))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step. ServerLost ends the episode; the next reset builds the environment again."""
        return cast("tuple[Any, float, bool, bool, dict[str, Any]]", self._call(StepRequest(self._copy, action)))

    def render(self) -> Any:
        """An image of the current state."""
        return self._call(RenderRequest(self._copy))

    @classmethod
    def several(cls, target: ServerTarget, count: int, *, timeout_s: float | None = None) -> "list[IsolatedServer]":
        """Copies that share one child process."""
        process = EnvProcess(target, copies=count, timeout_s=timeout_s)
        return [cls(target, process=process, copy=copy) for copy in range(count)]

    def reset_copies(self, requests: Sequence[tuple[int, int | None, dict[str, Any] | None]]) -> list[Any]:
        """Begin episodes of several copies, given as (copy, seed, options), in one message; as `step_copies`."""
        return self._call_copies([ResetRequest(*request) for request in requests])

    def step_copies(self, actions: Sequence[Any]) -> list[Any]:
        """One step of every copy in the process, in one message. What a copy raised stands in place of its response."""
        return self._call_copies([StepRequest(copy, action) for copy, action in enumerate(actions)])

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _call_copies(self, requests: Sequence[ResetRequest | StepRequest]) -> list[Any]:
        try:
            responses = self._process.call(requests)
        except ServerLost as error:
            return [error] * len(requests)
        return [_failure(response) if type(response) is Failure else response for response in responses]

    def _call(self, request: ResetRequest | StepRequest | RenderRequest) -> Any:
        (response,) = self._process.call([request])
        if type(response) is Failure:
            raise _failure(response)
        return response


def _failure(response: Failure) -> ServerError | ServerLost:
    if response.is_unusable:
        return ServerError(response.reason)
    return ServerLost(f"the environment failed: {response.reason}", outcome=Outcome.CRASHED, restarts=True)


# The child process


def run_child() -> None:
    """The child process: create the copies, then handle one message after another until the parent leaves."""
    connection, lifeline, traceback = map(int, sys.argv[1:])
    _die_with_parent(lifeline)
    faulthandler.enable(traceback, all_threads=False)
    channel = Channel(socket.socket(fileno=connection), frame=frame, unpack=pickle.loads)
    try:
        target, copies, sys.path[:] = channel.receive()
        servers: list[RegimeServer] = []
        channel.send(_create(target, copies, servers))
        while servers and (requests := channel.receive()) is not None:
            responses = [_handle(servers[request.copy], request) for request in requests]
            try:
                channel.send(responses)
            except Unsendable:
                channel.send([_sendable(response) for response in responses])
    except (EOFError, OSError):
        return  # the parent is gone
    for server in servers:
        server.close()


def _die_with_parent(lifeline: int) -> None:
    """Let the kernel kill this process when the parent's end of the pipe closes, whatever runs here at that time."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        os.read(lifeline, 1)  # nothing is ever written: the end of the file means that the parent died before this
    except BlockingIOError:
        return
    os._exit(1)


def _create(target: ServerTarget, copies: int, servers: list[RegimeServer]) -> Welcome:
    look_first_in(target.directory)
    try:
        servers += [RegimeServer(target) for _ in range(copies)]
    except LoopwrightError as error:
        return Welcome(problem=str(error))
    first = servers[0]
    welcome = Welcome(first.observation_space, first.action_space, make_sendable(first.metadata))
    try:
        frame(welcome)
    except Unsendable as error:
        servers.clear()
        return Welcome(problem=f"the spaces of {target.path!r} cannot be sent to another process: {error}")
    return welcome


def _handle(server: RegimeServer, request: Any) -> Any:
    """What a copy returns, or a Failure for whatever it raises."""
    try:
        if type(request) is ResetRequest:
            return server.reset(seed=request.seed, options=request.options)
        return server.render() if type(request) is RenderRequest else server.step(request.action)
    except ServerError as error:
        return Failure(str(error), is_unusable=True)
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's environment may raise anything
        if type(request) is RenderRequest and isinstance(error, Exception):
            # Not a reason to build the copy again: it may continue without images.
            return Failure(f"render() failed: {type(error).__name__}: {error}", is_unusable=True)
        server.discard()
        return Failure(f"{type(error).__name__}: {error}")


def _sendable(response: Any) -> Any:
    """A response of which everything can be sent: `info` may hold anything."""
    try:
        frame(response)
    except Unsendable as error:
        if not isinstance(response, tuple) or not response:
            return Failure(f"the response cannot be sent: {error}")
        response = *response[:-1], make_sendable(response[-1])
        try:
            frame(response)
        except Unsendable as other:
            return Failure(f"the response cannot be sent: {other}")
    return response
