"""Fake vLLM, llama.cpp and SGLang servers with the tiny model behind them, and ways in which they misbehave."""

import asyncio
import math
import threading
import time
from contextlib import aclosing, contextmanager
from pathlib import Path

import orjson
import torch
from aiohttp import web

from loopwright.engines.base import ContextFull, Sampling, engines
from loopwright.engines.inprocess.engine import TransformersConfig, TransformersEngine

WEIGHTS = 5
"""A seed whose model happens to end its greedy answer to the contract's prompt."""
CONTEXT = 512
WIRES = ("vllm", "llamacpp", "sglang")
TROUBLES = ("500", "killed", "silent", "lengths", "json", "list", "error", "endless", "nan", "ids")


class Server:
    """A fast engine and a slow one, each behind every protocol: `/fast/vllm`, `/slow/sglang`."""

    def __init__(self):
        self.url, self.requests, self.aborted, self.connections, self.stale = "", [], 0, set(), set()
        self.raw, self.mark = False, "default"
        self.engines = {
            name: TransformersEngine(TransformersConfig(model="tiny", seed=WEIGHTS, max_context=CONTEXT), Path())
            for name in ("fast", "slow")
        }
        self.engines["slow"].model.register_forward_pre_hook(lambda *_: time.sleep(0.03))

    @property
    def model(self):
        return self.engines["fast"].model

    def app(self):
        @web.middleware
        async def hang_up(request, handler):
            """Abort a connection that the client still has in its pool, as a restarted server does."""
            if request.transport in self.stale:
                request.transport.abort()
            return await handler(request)

        app = web.Application(client_max_size=2**26, middlewares=[hang_up])
        app.router.add_get("/{speed}/vllm/v1/models", self.models)
        app.router.add_post("/{speed}/vllm/v1/completions", self.vllm)
        app.router.add_post("/{speed}/llamacpp/completion", self.llamacpp)
        app.router.add_post("/{speed}/sglang/generate", self.sglang)
        app.router.add_get("/{speed}/{wire}/health", self.health)
        app.router.add_get("/{speed}/vllm/weight_info", self.weight_info)
        for route in ("pause", "collective_rpc", "resume", "update_weight_version"):
            app.router.add_post(f"/{{speed}}/vllm/{route}", self.weights)
        for route in ("pause_generation", "update_weights_from_disk", "continue_generation"):
            app.router.add_post(f"/{{speed}}/sglang/{route}", self.weights)
        return app

    async def generate(self, request, ids, sampling, seed):
        """Generate tokens with their logprobs, one at a time."""
        body = await request.json()
        self.requests.append((request.path.rpartition("/")[2], body, request.headers.get("Authorization")))
        self.connections.add(request.transport)
        engine, finished = self.engines[request.match_info["speed"]], False
        try:
            async with aclosing(engine.generate(ids, sampling, seed=str(seed))) as stream:
                async for chunk in stream:
                    for token, logprob in zip(chunk.ids, chunk.logprobs, strict=True):
                        yield token, logprob
                    finished = chunk.finish
            self.finish = finished
        finally:
            self.aborted += not finished

    async def health(self, request):
        return web.Response()

    async def weights(self, request):
        body = await request.json()
        self.requests.append((request.path_qs.partition("/vllm/")[2] or request.path.rpartition("/")[2], body, None))
        self.mark = body.get("new_version", self.mark)
        return web.json_response({"success": True})

    async def weight_info(self, request):
        return web.json_response({"weight_version": self.mark})

    async def models(self, request):
        return web.json_response({"data": [{"id": "policy", "max_model_len": CONTEXT}, {"id": "other"}]})

    async def vllm(self, request):
        body = await request.json()
        if trouble := _trouble(body["prompt"]):
            return await self.trouble(request, trouble, _vllm_event)
        if (most := body["max_tokens"]) > CONTEXT:
            return _refused(f"max_tokens={most} cannot be greater than max_model_len={CONTEXT}.")
        sampling = Sampling(
            **{key: body[key] for key in ("temperature", "top_p", "top_k", "min_p", "max_tokens") if key in body}
        )
        events = []
        async with aclosing(self.generate(request, body["prompt"], sampling, body.get("seed"))) as stream:
            if not body.get("stream"):
                logprobs = [-0.5 if self.raw else logprob async for _, logprob in stream]
                return web.json_response({"choices": [{"logprobs": {"token_logprobs": logprobs}}]})
            response = await _start_stream(request)
            async for token, logprob in stream:
                events.append((token, logprob))
                if len(events) > 1:  # the last one is sent when its finish reason is known
                    await _send(response, _vllm_event([events.pop(0)], None))
        await _send(response, _vllm_event(events, self.finish))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def llamacpp(self, request):
        body = await request.json()
        prompt = body["prompt"]
        if trouble := _trouble(prompt):
            return await self.trouble(request, trouble, _llamacpp_answer)
        if body["n_probs"] > 1000:
            self.requests.append(("all", body, request.headers.get("Authorization")))
            with torch.inference_mode():
                logits = self.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
            values, ids = logits.log_softmax(-1).sort(descending=True)
            entries = [{"id": i, "logprob": v} for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
            forced = body["logit_bias"][0][0]
            return web.json_response(
                {
                    "tokens": [forced],
                    "completion_probabilities": [{"id": forced, "top_logprobs": entries}],
                    "stop_type": "limit",
                }
            )
        names = {
            "temperature": "temperature",
            "top_p": "top_p",
            "top_k": "top_k",
            "min_p": "min_p",
            "n_predict": "max_tokens",
        }
        sampling = Sampling(**{ours: body[theirs] for theirs, ours in names.items()})
        try:
            tokens = [each async for each in self.generate(request, prompt, sampling, body["seed"])]
        except ContextFull as error:
            entries = f"request ({error.length} tokens) exceeds the available context size ({CONTEXT} tokens)"
            return _refused(entries)
        return web.json_response(_llamacpp_answer(tokens, self.finish))

    async def sglang(self, request):
        body = await request.json()
        params, ids = body["sampling_params"], body["input_ids"]
        if trouble := _trouble(ids):
            return await self.trouble(request, trouble, _sglang_event)
        response = await _start_stream(request)
        if len(ids) + params["max_new_tokens"] > CONTEXT:
            message = f"Requested token count exceeds the model's maximum context length of {CONTEXT} tokens."
            await _send(response, {"error": {"message": message, "code": 400}})
            return response
        sampling = Sampling(temperature=params["temperature"], max_tokens=params["max_new_tokens"])
        events = []
        async with aclosing(self.generate(request, ids, sampling, params["sampling_seed"])) as stream:
            async for event in stream:
                events.append(event)
                if len(events) > 1:
                    await _send(response, _sglang_event(events[:-1], None))
        await _send(response, _sglang_event(events, self.finish))
        return response

    async def trouble(self, request, kind, event):
        """Send one token and then misbehave."""
        streams = event is not _llamacpp_answer
        self.requests.append((kind, None, None))
        if kind == "500":
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        if kind == "silent" and not streams:
            await asyncio.sleep(60)
        one = [(65, -0.5)]
        payload = {
            "lengths": lambda: _without_logprob(event([*one, (66, -0.5)], "stop")),
            "json": lambda: b"{this is no JSON",
            "list": lambda: [1, 2],
            "error": lambda: {"error": {"message": "EngineCore encountered an issue"}},
            "nan": lambda: event([*one, (66, None)], "stop"),
            "ids": lambda: event([*one, ("A", -0.5)], "stop"),
        }.get(kind, lambda: None)()
        if not streams:
            if kind == "killed":
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b'{"tokens": [')
                request.transport.abort()
                return response
            if kind == "endless":
                payload = _llamacpp_answer(one, None) | {"stop_type": "none"}
            return web.Response(body=payload if isinstance(payload, bytes) else orjson.dumps(payload))
        response = await _start_stream(request)
        await _send(response, event(one, None))
        if kind == "silent":
            await asyncio.sleep(60)
        if kind == "killed":
            request.transport.abort()
        if payload is not None:
            await _send(response, payload)
        return response


def _trouble(ids):
    """The misbehaviour that a prompt beginning with 0 asks for."""
    return TROUBLES[ids[1]] if ids[0] == 0 and len(ids) == 2 else None


def _refused(message):
    return web.json_response({"error": {"message": message, "code": 400}}, status=400)


async def _start_stream(request):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def _send(response, event):
    await response.write(b"data: " + (event if isinstance(event, bytes) else orjson.dumps(event)) + b"\n\n")


def _vllm_event(tokens, finish):
    logprobs = {
        "tokens": [f"token_id:{token}" for token, _ in tokens],
        "token_logprobs": [logprob for _, logprob in tokens],
    }
    return {"choices": [{"text": "x", "logprobs": logprobs, "finish_reason": finish}]}


def _sglang_event(tokens, finish):
    entries = [[logprob, token, None] for token, logprob in tokens]
    reason = finish and {"type": finish}
    return {
        "text": "x",
        "meta_info": {"completion_tokens": len(tokens), "output_token_logprobs": entries, "finish_reason": reason},
    }


def _llamacpp_answer(tokens, finish):
    """Tokens that end within a character have no logprob."""
    entries, text = [], b""
    for token, logprob in tokens:
        text += bytes([token]) if isinstance(token, int) and token < 256 else b""
        if _valid(text) == len(text):
            chance = None if logprob is None else math.exp(logprob)
            entries.append({"id": token, "prob": chance, "top_probs": [{"id": token, "prob": chance}]})
    stop_type = {"stop": "eos", "length": "limit"}.get(finish, "none")
    return {"tokens": [token for token, _ in tokens], "completion_probabilities": entries, "stop_type": stop_type}


def _valid(text):
    """llama.cpp's validate_utf8: how much of a text is whole characters."""
    size = len(text)
    for i in range(1, 5):
        if i > size:
            break
        c = text[size - i]
        if (c & 0xE0) == 0xC0:
            if i < 2:
                return size - i
        elif (c & 0xF0) == 0xE0:
            if i < 3:
                return size - i
        elif (c & 0xF8) == 0xF0 and i < 4:
            return size - i
    return size


def _without_logprob(event):
    """The same event with one logprob missing."""
    if "choices" in event:
        event["choices"][0]["logprobs"]["token_logprobs"].pop()
    elif "meta_info" in event:
        event["meta_info"]["completion_tokens"] += 2
    else:
        event["completion_probabilities"].pop()
    return event


@contextmanager
def serve(port=0):
    """Run the server in a separate thread."""
    server, loop = Server(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin():
        runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def end(runner):
        await runner.cleanup()
        for engine in server.engines.values():
            await engine.close()

    runner = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(end(runner), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def engine_of(server, wire, *, speed="fast", directory=None, **config):
    kind = engines.get(wire)
    return kind(kind.Config(url=f"{server.url}/{speed}/{wire}", tokenizer="tiny", **config), directory or Path())


def run(server, wire, steps, **config):
    async def main():
        engine = engine_of(server, wire, **config)
        try:
            return await asyncio.wait_for(steps(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(main())


async def chunks_from(engine, prompt=(72, 105), seed="s", **sampling):
    settings = Sampling(**{"max_tokens": 24, **sampling})
    return [chunk async for chunk in engine.generate(list(prompt), settings, seed=seed)]
