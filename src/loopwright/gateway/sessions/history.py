"""What the requests of a client refer to: the turns of its session, by call, and the conversations that it opened.

Deleted responses and conversations can no longer be referred to. What was recorded of them stays: it is the episode's.
"""

import asyncio
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import orjson

from loopwright.core.task import Message
from loopwright.gateway.dialects.base import StoredConversation
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.sessions.call import CallRecord, SessionCall
from loopwright.gateway.sessions.graph import RAW
from loopwright.gateway.sessions.store import OBJECT, DiskStore

if TYPE_CHECKING:
    from loopwright.gateway.sessions.served_session import ServedSession

_MAX_CONVERSATIONS = 1024
"""Conversations that a client may open."""
_MAX_BYTES = 2**22
"""What conversations may contain besides their turns: items that the client added, and metadata."""
_MAX_ADDED = 2048
"""Items that a client may add to a conversation. Every change writes all of them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that a client opened; its turns are those of the session that name it."""

    created_at: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    added: Sequence[tuple[int, Sequence[Message]]] = ()
    """Messages that the client added, after how many nodes of the session: turns with later nodes contain them."""
    start: int = 0
    """Turns with earlier nodes left it when an item was deleted; `added` has the messages that remained."""
    remaining_ids: Sequence[str] = ()
    """The ids of those messages."""
    position: int = 0
    """The position of the next message."""

    def add(self, count: int, messages: Sequence[Message]) -> "Conversation":
        """With more messages, in a session that has so many nodes."""
        return replace(self, added=[*self.added, (count, messages)])


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a stored conversation."""

    message: Message
    id: str = ""
    """Part of the ids of its items: the call that sampled it, or the conversation and its position there."""
    record: CallRecord = CallRecord()  # noqa: RUF009  frozen


class SessionHistory:
    """The turns and conversations of one session."""

    def __init__(self, owner: "ServedSession") -> None:
        self._owner = weakref.proxy(owner)  # no cycle: a session that leaves memory is freed at once
        self.records: dict[int, CallRecord] = {}
        """What is recorded of the request of each turn, by its node."""
        self._nodes: dict[str, int] = {}
        """The first turn of each call."""
        self._turns: dict[str, list[int]] = {}
        """The turns of each conversation."""
        self._conversations: dict[str, Conversation] = {}
        self._sizes: dict[str, int] = {}
        self._deleted: set[str] = set()
        self._lock = asyncio.Lock()

    def add(self, call: SessionCall) -> None:
        """Add the turns of a call."""
        node = self._nodes[call.id] = call.drafts[0].node
        for draft in call.drafts:
            self.records[draft.node] = call.record
        if call.record.conversation:
            self._turns.setdefault(call.record.conversation, []).append(node)

    def remove(self, call: SessionCall) -> None:
        """Remove a call that was refused."""
        self.records = {node: record for node, record in self.records.items() if record is not call.record}
        self._nodes.pop(call.id, None)
        if call.record.conversation:
            self._turns[call.record.conversation].remove(call.drafts[0].node)

    def restore(self, rows: Sequence[tuple[int, str, CallRecord]], store: DiskStore) -> None:
        """Continue with the calls of a stored session: the node, call and record of each turn."""
        for node, call_id, record in rows:
            self.records[node] = record
            if call_id not in self._nodes:
                self._nodes[call_id] = node
                if record.conversation:
                    self._turns.setdefault(record.conversation, []).append(node)
        for id, data in store.rows("SELECT id, data FROM objects WHERE session = ?", (self._owner.number,)):
            if data:
                self._conversations[id], self._sizes[id] = Conversation(**orjson.loads(data)), len(data)
            else:
                self._deleted.add(id)

    # -- turns --------------------------------------------------------------------------------------------------

    def turn(self, call_id: str) -> StoredConversation | None:
        """The conversation up to the turn of a finished call."""
        return None if (node := self.node_of(call_id)) is None else self._conversation_at(node)

    def message(self, call_id: str) -> Message | None:
        """The turn of a finished call, if it is part of a conversation."""
        node = self.node_of(call_id)
        return None if node is None or not self._is_turn(node) else self._owner.session.graph.nodes[node].message

    def node_of(self, call_id: str) -> int | None:
        """The turn of a call that was not deleted."""
        return None if call_id in self._deleted else self._nodes.get(call_id)

    def messages_up_to(self, node: int) -> list[StoredMessage]:
        """The messages of a turn's conversation, its own included, without its instructions."""
        nodes, calls = self._owner.session.graph.nodes, {number: id for id, number in self._nodes.items()}
        messages, at = [], node
        while at:
            messages.append(StoredMessage(nodes[at].message, calls.get(at, ""), self.records.get(at, CallRecord())))
            at = nodes[at].parent or 0
        return messages[::-1][self.records[node].has_instructions :]

    async def delete_turn(self, call_id: str) -> None:
        """Refer to a call no longer."""
        await self._owner.save([(OBJECT, (self._owner.number, call_id, ""))])
        self._deleted.add(call_id)

    def _conversation_at(self, node: int) -> StoredConversation | None:
        if not self._is_turn(node):
            return None
        messages, tools = self._owner.session.graph.conversation(node)
        return StoredConversation(messages, tools, self.records[node].has_instructions)

    def _is_turn(self, node: int) -> bool:
        """Whether it is a finished turn, and not the continuation of raw text."""
        nodes = self._owner.session.graph.nodes
        is_raw = nodes[nodes[node].parent or 0].message.get("role") == RAW
        return nodes[node].finish in ("stop", "length") and not is_raw

    # -- conversations ------------------------------------------------------------------------------------------

    def find(self, id: str) -> Conversation | None:
        """A conversation that was not deleted."""
        if id in self._deleted:
            return None
        return self._conversations.get(id) or (Conversation() if id in self._turns else None)

    def conversation(self, id: str) -> StoredConversation | None:
        """A conversation up to its last finished turn, and what its client has added since."""
        if self.find(id) is None:
            return None
        node, added = self._last_turn(id)
        stored = (self._conversation_at(node) if node else None) or StoredConversation(())
        return replace(stored, messages=[*stored.messages, *added]) if added else stored

    def messages_of(self, id: str) -> list[StoredMessage]:
        """All messages of a conversation."""
        node, added = self._last_turn(id)
        messages = [*(self.messages_up_to(node) if node else ()), *map(StoredMessage, added)]
        conversation, scope = self._conversations.get(id, Conversation()), id.removeprefix("conv_")
        ids = conversation.remaining_ids
        for index, stored in enumerate(messages):
            if index < len(ids):
                record = self.records.get(self._nodes.get(ids[index], 0), CallRecord())
                messages[index] = replace(stored, id=ids[index], record=record)
            elif not stored.id:
                messages[index] = replace(stored, id=f"{scope}_{conversation.position + index - len(ids)}")
        return messages

    async def open_conversation(self, created_at: int, metadata: Mapping[str, Any], messages: Sequence[Message]) -> str:
        """The id of a new conversation that starts with these messages."""
        if len(self._conversations.keys() | self._turns.keys()) >= _MAX_CONVERSATIONS:
            raise Refusal.out_of_quota(f"{_MAX_CONVERSATIONS} conversations are open")
        id, conversation = f"conv_{secrets.token_hex(16)}", Conversation(created_at, metadata)
        async with self._lock:
            await self._write(id, conversation.add(self._count, messages) if messages else conversation)
        return id

    async def add_messages(self, id: str, messages: Sequence[Message]) -> list[StoredMessage]:
        """Add messages to a conversation, whose next turn follows them."""
        async with self._lock:
            await self._write(id, (self.find(id) or Conversation()).add(self._count, messages))
            return self.messages_of(id)[-len(messages) :]

    async def edit_messages(self, id: str, edit: Callable[[list[StoredMessage]], list[StoredMessage]]) -> Conversation:
        """The conversation, with other messages for its next turn. The turns before it stay in the record."""
        async with self._lock:
            messages, former = self.messages_of(id), self.find(id) or Conversation()
            remaining = edit(messages)
            conversation = replace(
                former,
                added=[(self._count, [stored.message for stored in remaining])],
                start=self._count,
                remaining_ids=[stored.id for stored in remaining],
                position=former.position + len(messages) - len(former.remaining_ids),
            )
            await self._write(id, conversation)
        return conversation

    async def set_metadata(self, id: str, metadata: Mapping[str, Any]) -> Conversation:
        """The conversation, with other metadata."""
        async with self._lock:
            conversation = replace(self.find(id) or Conversation(), metadata=metadata)
            await self._write(id, conversation)
        return conversation

    async def delete_conversation(self, id: str) -> None:
        """Refer to a conversation no longer."""
        async with self._lock:
            if id in self._turns:  # its turns would bring it back
                await self._owner.save([(OBJECT, (self._owner.number, id, ""))])
                self._deleted.add(id)
            else:
                await self._owner.save([("DELETE FROM objects WHERE session = ? AND id = ?", (self._owner.number, id))])
            self._conversations.pop(id, None)
            self._sizes.pop(id, None)

    @property
    def _count(self) -> int:
        return len(self._owner.session.graph.nodes)

    async def _write(self, id: str, conversation: Conversation) -> None:
        if sum(len(messages) for _, messages in conversation.added) > _MAX_ADDED:
            raise Refusal.out_of_quota(f"a conversation may have {_MAX_ADDED} items that its client added")
        data = orjson.dumps(conversation).decode()
        if sum(self._sizes.values()) - self._sizes.get(id, 0) + len(data) > _MAX_BYTES:
            raise Refusal.out_of_quota(f"its conversations have {_MAX_BYTES} bytes of items and metadata")
        await self._owner.save([(OBJECT, (self._owner.number, id, data))])
        self._conversations[id], self._sizes[id] = conversation, len(data)

    def _last_turn(self, id: str) -> tuple[int, list[Message]]:
        """The last finished turn of a conversation, 0 if there is none, and the messages that were added after it."""
        nodes = self._owner.session.graph.nodes
        conversation = self._conversations.get(id, Conversation())
        turns = [node for node in self._turns.get(id, ()) if node >= conversation.start]
        last = next((node for node in reversed(turns) if nodes[node].finish in ("stop", "length")), 0)
        return last, [message for count, messages in conversation.added if count > last for message in messages]
