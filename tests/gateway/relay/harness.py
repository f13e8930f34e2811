"""A gateway with a relay, and the workers that connect to it."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

from loopwright.gateway.gateway import Gateway, GatewayConfig
from loopwright.gateway.relay.relay import Relay, RelayConfig
from loopwright.gateway.relay.worker import RelayWorker
from tests.gateway.harness import until

TOKEN = "a-token-of-the-gateway"


@asynccontextmanager
async def relayed(*engines, tokenizer=None, port=0, output=None, **settings):
    """A gateway with a relay, and a worker for each engine."""
    relay = Relay(RelayConfig(**{"heartbeat_s": 0.5, "wait_s": 20.0, "rest_s": 0.02, **settings}), tokenizer)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(
            Gateway(relay, GatewayConfig(keepalive_s=0.05, port=port), token=TOKEN, output=output)
        )
        for number, engine in enumerate(engines):
            await stack.enter_async_context(working(gateway, engine, f"w{number}"))
        await until(lambda: len(relay.describe()) == len(engines))
        try:
            yield gateway
        finally:
            await relay.close()


def door(gateway):
    return f"{gateway.address.replace('http', 'ws', 1)}/ws/worker"


@asynccontextmanager
async def working(gateway, engine, name="w", url=None):
    worker = RelayWorker(engine, url or door(gateway), TOKEN, name=name, drain_s=5.0)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await asyncio.wait([task], timeout=10)
        if task.cancel():
            await asyncio.wait([task])
        await engine.close()
