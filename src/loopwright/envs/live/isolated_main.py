"""The child process of `isolated.py`: hosts copies of an environment and handles messages until its parent leaves."""

import faulthandler
import fcntl
import os
import pickle
import signal
import socket
import sys
from typing import Any

from loopwright.core.errors import LoopwrightError
from loopwright.core.imports import look_first_in
from loopwright.envs.live.channel import Channel
from loopwright.envs.live.isolated import Failure, RenderRequest, ResetRequest, Welcome, frame
from loopwright.envs.live.regime_server import RegimeServer, ServerTarget
from loopwright.envs.live.server import ServerError
from loopwright.envs.live.wire import Unsendable, make_sendable


def main() -> None:
    """Create the copies, then handle one message after another."""
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
        return _render(server) if type(request) is RenderRequest else server.step(request.action)
    except ServerError as error:
        return Failure(str(error), is_unusable=True)
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's environment may raise anything
        server.discard()
        return Failure(f"{type(error).__name__}: {error}")


def _render(server: RegimeServer) -> Any:
    try:
        return server.render()
    except Exception as error:
        # Not a reason to build the copy again: it may go on without images.
        raise ServerError(f"render() failed: {type(error).__name__}: {error}") from error


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
