"""The store: rows of many calls in few statements, in an order that means the same."""

import asyncio
import sqlite3
import time
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from loopwright.core.episode import Node, Span
from loopwright.core.errors import StorageError
from loopwright.gateway.dialects.base import TurnRequest
from loopwright.gateway.sessions.graph import key_of
from loopwright.gateway.sessions.session_config import is_generated, is_id, new_id
from loopwright.gateway.sessions.store import INTENT, NODE, RESULT, DiskStore, load_nodes, node_row
from tests.gateway.harness import ADD, run, serve, user


@contextmanager
def opened(path):
    store = DiskStore(path)
    try:
        yield store
    finally:
        store.close()


EMPTY = Node(0, {"role": "assistant", "content": ""}, finish="cut")


def intent(session, number, begun_at=1.0, node=EMPTY):
    call = ("call", 0, b"digest", "chat", "{}", "seed", begun_at, "exact", "", None, "{}")
    return INTENT, (*node_row(session, number, node, None), *call)


def result(session, number, ended_at=2.0, node=EMPTY):
    _, _, _, *turn = node_row(session, number, node, key_of(node.message))
    return RESULT, (*turn, ended_at, None, None, session, number)


def given(session, number, node):
    return NODE, node_row(session, number, node, key_of(node.message))


def calls_of(store):
    query = "SELECT session, number, begun_at, ended_at, verdict FROM nodes WHERE call IS NOT NULL"
    return store.rows(f"{query} ORDER BY session, number")


@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 33, 71])
def test_t04_many_calls_at_once_are_all_written(tmp_path, count):
    async def story():
        with opened(tmp_path) as store:
            nodes = [Node(0, user(f"{n}"), (n, 2**40 + n), (0.0, 0.0)) for n in range(count)]
            turns = [
                Node(1, {"role": "assistant", "content": f"{n}"}, (n,), (-0.5,), (Span(0, 1, n),), "stop")
                for n in range(count)
            ]
            done = [store.write([given(n, 1, node), intent(n, 2)]) for n, node in enumerate(nodes)]
            await asyncio.gather(*done)
            odd = range(1, count, 2)
            await asyncio.gather(*(store.write([result(n, 2, 2.0 + n, turns[n])]) for n in odd))
            assert calls_of(store) == [(n, 2, 1.0, 2.0 + n if n % 2 else None, "exact") for n in range(count)]
            for n, node in enumerate(nodes):
                turn = replace(turns[n], parent=0) if n % 2 else EMPTY  # a result does not move a turn
                key = key_of(turn.message) if n % 2 else None
                assert load_nodes(store.rows, n) == [(node, key_of(node.message)), (turn, key)]

    run(story)


def test_t04_a_call_that_is_alone_does_not_wait_for_others(tmp_path):
    async def story():
        with opened(tmp_path) as store:
            earlier = store.write([intent(1, 1)])
            store.calls = 1
            assert store.write([intent(2, 1)]).done(), "committed at once"
            assert earlier.done(), "together with what waited"
            await asyncio.sleep(0)
            store.calls = 2
            later = store.write([intent(3, 1)])
            assert not later.done(), "others may write in the same iteration of the event loop"
            await later
            assert [session for session, *_ in calls_of(store)] == [1, 2, 3]

    run(story)


def test_t04_calls_that_arrive_together_share_their_commits(tmp_path):
    async def story():
        async with serve(output=tmp_path) as gateway:
            sessions = [(await gateway.open(f"s{n}")).served for n in range(8)]
            requests = [TurnRequest([user(f"{n}")], session.config.defaults) for n, session in enumerate(sessions)]
            statements = []
            for connection in gateway.store.connections:
                connection.set_trace_callback(statements.append)
            calls = [
                session.call("chat.completions", request, b"digest", is_retry=False)
                for session, request in zip(sessions, requests, strict=True)
            ]
            for call in calls:
                call.join()
            await asyncio.gather(*(call.result() for call in calls))
            assert statements.count("COMMIT") == 2, "one for all intents, and one for all results"
            assert gateway.store.calls == 0

    run(story)


def test_t05_generated_ids_start_with_the_time_and_are_recognised():
    earlier = int(time.time())
    id = new_id()
    assert is_id(id)
    assert earlier <= int(id[2:10], 16) <= time.time(), "neighbours in the indexes were opened at the same time"
    assert is_generated(id)
    assert not is_generated("s-trial-7")


def test_t04_a_call_that_was_given_up_and_begins_again_has_not_ended(tmp_path):
    """Both may be written together: which came last counts."""

    async def story():
        with opened(tmp_path) as store:
            await store.write([intent(1, 1), intent(2, 1)])
            await store.write([result(1, 1), result(2, 1), intent(1, 1, begun_at=3.0)])
            assert calls_of(store) == [(1, 1, 3.0, None, "exact"), (2, 1, 1.0, 2.0, "exact")]

    run(story)


def test_a_failed_write_is_reported_to_all_that_it_was_written_with(tmp_path):
    async def story():
        with opened(tmp_path) as store:
            written = await asyncio.gather(
                store.write([intent(1, 1)]), store.write([(NODE, (1, None, *[b""] * 8))]), return_exceptions=True
            )
            assert any(isinstance(each, StorageError) for each in written)
            kept = [(1, 1, 1.0, None, "exact")] if written[0] is None else []
            assert calls_of(store) == kept
            await store.write([intent(1, 2)])

    run(story)


def test_after_a_failed_write_there_must_be_room_for_it(tmp_path):
    async def story():
        with opened(tmp_path) as store:
            sizes, large = [], [given(1, 1, Node(0, user("x" * 100_000), (), ()))]
            store._allocate = sizes.append
            for is_refusing in (1, 0):
                for connection in store.connections:
                    connection.execute(f"PRAGMA query_only = {is_refusing}")
                if is_refusing:
                    for write in (lambda: store.write(large), store.check):
                        with pytest.raises(StorageError):
                            await write()
            await store.check()
            assert sizes
            assert sizes[0] > 200_000
            await store.write(large)
            await store.check()
            assert len(sizes) == 1, "it was written"

    run(story)


def test_t04_a_write_continues_when_nobody_waits_any_more(tmp_path):
    async def story():
        with opened(tmp_path) as store:
            waiting = asyncio.ensure_future(store.write([intent(1, 1)]))
            waiting.cancel()
            await store.write([intent(2, 1)])
            assert [session for session, *_ in calls_of(store)] == [1, 2]

    run(story)


def test_t15_a_write_that_waits_for_another_writer_does_not_hold_the_event_loop(tmp_path):
    """Given a user who has locked the file, the loop goes on, and the write is done when the lock is gone."""

    async def story():
        with opened(tmp_path) as store, closing(sqlite3.connect(store.path, isolation_level=None)) as user_shell:
            user_shell.execute("BEGIN IMMEDIATE")
            write = store.write([intent(1, 1)])
            for _ in range(100):  # with a store that waits, the first one would take 10 s and fail
                await asyncio.sleep(0.001)
            assert not write.done()
            later = store.write([intent(2, 1)])
            user_shell.execute("ROLLBACK")
            await asyncio.gather(write, later)
            assert [session for session, *_ in calls_of(store)] == [1, 2]

    run(story)


def test_t04_small_and_large_writes_keep_their_order(tmp_path):
    """Given a node that grows and shrinks, in writes of the event loop and of the thread, the last one counts."""
    sizes = [1, 40_000, 2, 3, 50_000, 60_000, 4]

    async def story():
        with opened(tmp_path) as store:
            writes = []
            for size in sizes:
                node = Node(0, user(f"{size}"), (7,) * size, (0.0,) * size)
                writes.append(store.write([given(1, 1, node)]))
                await asyncio.sleep(0)
            await asyncio.gather(*writes)
            assert [len(node.ids) for node, _ in load_nodes(store.rows, 1)] == sizes[-1:]

    run(story)


def test_the_log_does_not_grow_without_bound(tmp_path):
    async def story():
        with opened(tmp_path) as store:
            node = Node(0, user("x" * 100_000), (7,) * 1000, (0.0,) * 1000)
            for number in range(600):
                await store.write([given(number, 1, node)] * 3)
            assert store.path.stat().st_size > 20_000_000, "checkpoints keep up, also while the disk is slow"
            assert store.path.with_name("gateway.db-wal").stat().st_size < 120_000_000

    run(story)


def test_t04_tools_and_calls_are_found_again_after_a_restart(tmp_path):
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": {}}]}
    said["tool_calls"][0]["function"] = {"name": "add", "arguments": '{"a": 1}'}
    told = [user("hi"), said, {"role": "tool", "tool_call_id": "a", "content": "2"}]

    async def story():
        async with serve(output=tmp_path) as gateway:
            session = await gateway.open("s")
            await session.served.session.turn(told, [ADD])
            await session.served.save()
            before = len(session.served.session.graph.nodes)
        async with serve(output=tmp_path) as gateway:
            session = (await gateway.open("s")).served.session
            assert len(session.graph.nodes) == before
            turn = await session.turn(told, [ADD])
            assert session.graph.nodes[turn.node].parent == before - 2, "all messages are known"
            assert len(session.graph.nodes) == before + 1

    run(story)
