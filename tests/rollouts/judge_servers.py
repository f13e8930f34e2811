"""A real HTTP judge server on loopback, in a separate thread, so that any event loop can call it."""

import asyncio
import threading
from contextlib import contextmanager

from aiohttp import web


class Server:
    """Answers by path, and records its requests."""

    def __init__(self):
        self.requests, self.connections, self.url = [], set(), ""
        self.over = asyncio.Event()
        self.broken = 0
        """How many requests are refused first."""

    async def judge(self, request):
        body = await self._record(request)
        if self.broken:
            self.broken -= 1
            return web.Response(status=503, text="busy")
        return web.json_response([_verdict(each) for each in body] if isinstance(body, list) else _verdict(body))

    async def answer(self, request):
        """The answer that the query asks for, unchanged."""
        await self._record(request)
        return web.Response(status=int(request.query.get("status", 200)), text=request.query["text"])

    async def hang(self, request):
        await self._record(request)
        await self.over.wait()
        return web.Response(status=500)

    async def chat(self, request):
        body = await self._record(request)
        text = request.match_info["text"]
        if text == "exact":
            prompt = body["messages"][1]["content"]
            text = '{"score": 10}' if "<answer>\n4\n" in prompt else "Reasons.\nScore: 5"
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    async def _record(self, request):
        body = await request.json()
        self.connections.add(request.transport.get_extra_info("peername"))
        self.requests.append((dict(request.headers), body))
        return body


def _verdict(body):
    """A verdict by the answer; one answer gets an error, another an invalid verdict."""
    odd = {"unclear": {"error": "cannot tell"}, "odd": {"reward": "much"}}
    return odd.get(body.get("answer"), {"reward": float(body.get("answer") == body.get("label"))})


@contextmanager
def serving():
    server, loop, ready = Server(), asyncio.new_event_loop(), threading.Event()
    app = web.Application()
    app.router.add_post("/judge", server.judge)
    app.router.add_post("/answer", server.answer)
    app.router.add_post("/hang", server.hang)
    app.router.add_post("/chat/{text}/chat/completions", server.chat)
    app.router.add_post("/hang/chat/completions", server.hang)
    runner = web.AppRunner(app, shutdown_timeout=0.0)

    async def start():
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()

    def work():
        loop.run_until_complete(start())
        loop.run_forever()
        server.over.set()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
