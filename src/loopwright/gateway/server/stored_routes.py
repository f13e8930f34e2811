"""Routes for what a session has stored: responses and conversations, as OpenAI's SDK reads, adds and deletes them.

Deleting one ends references to it. The turns stay in the session's record, which only its owner can delete.
"""

from typing import Any

from aiohttp import web

from loopwright.core.task import Message
from loopwright.gateway.dialects import fields
from loopwright.gateway.dialects.fields import BadRequest
from loopwright.gateway.dialects.responses import Responses
from loopwright.gateway.dialects.stored_responses import (
    conversation_object,
    find_response,
    item_list,
    items_of,
    metadata_of,
    page_of,
    response_object,
    without_item,
)
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.server.request_handler import RequestHandler, json_response
from loopwright.gateway.sessions.history import Conversation
from loopwright.gateway.sessions.served_session import ServedSession

_MAX_ITEMS = 20
"""Items of one request, as at OpenAI."""


class StoredRoutes:
    """The stored responses and conversations of a session, for requests with its key."""

    def __init__(self, handler: RequestHandler, model: str) -> None:
        self._handler, self._model = handler, model

    def mount(self, app: web.Application) -> None:
        """Add the routes."""
        add, response, conversation = app.router.add_route, "/{id}/v1/responses/{response}", "/{id}/v1/conversations"
        add("GET", response, self._show_response)
        add("DELETE", response, self._delete_response)
        add("GET", f"{response}/input_items", self._list_input)
        add("POST", conversation, self._open_conversation)
        conversation += "/{conversation}"
        add("GET", conversation, self._show_conversation)
        add("POST", conversation, self._update_conversation)
        add("DELETE", conversation, self._delete_conversation)
        add("GET", f"{conversation}/items", self._list_items)
        add("POST", f"{conversation}/items", self._add_items)
        add("GET", f"{conversation}/items/{{item}}", self._show_item)
        add("DELETE", f"{conversation}/items/{{item}}", self._delete_item)

    def _find_session(self, request: web.Request) -> tuple[ServedSession, Responses]:
        session = self._handler.session(request)
        if session.status != "open":
            raise session.refusal()
        inner = session.session
        dialect = Responses(inner.engine.tokenizer, inner.sampling, inner.template.grammar, session.history)
        return session, dialect

    # -- responses ----------------------------------------------------------------------------------------------

    async def _show_response(self, request: web.Request) -> web.StreamResponse:
        session, dialect = self._find_session(request)
        if request.query.get("stream", "false") != "false":
            raise BadRequest("stream: a stored response is returned as a whole; leave it out", "stream")
        return json_response(response_object(session, dialect, request.match_info["response"], self._model))

    async def _delete_response(self, request: web.Request) -> web.StreamResponse:
        session, _ = self._find_session(request)
        call_id, _ = find_response(session, request.match_info["response"])
        await session.history.delete_turn(call_id)
        return json_response({"id": f"resp_{call_id}", "object": "response", "deleted": True})

    async def _list_input(self, request: web.Request) -> web.StreamResponse:
        session, _ = self._find_session(request)
        call_id, node = find_response(session, request.match_info["response"])
        *messages, _ = session.history.messages_up_to(node)
        return json_response(item_list(items_of(messages, f"{call_id}_input"), request.query))

    # -- conversations ------------------------------------------------------------------------------------------

    async def _open_conversation(self, request: web.Request) -> web.StreamResponse:
        session, dialect = self._find_session(request)
        body = await self._handler.read_small_object(request, allow_empty=True)
        created_at, metadata, messages = fields.now(), metadata_of(body), _parse_items(dialect, body)
        id = await session.history.open_conversation(created_at, metadata, messages)
        return json_response(conversation_object(id, Conversation(created_at, metadata)))

    def _find_conversation(self, request: web.Request) -> tuple[ServedSession, Responses, str, Conversation]:
        (session, dialect), id = self._find_session(request), request.match_info["conversation"]
        if (conversation := session.history.find(id)) is None:
            message = f"conversation {id[:80]!r} is not in this session; open one with POST /v1/conversations"
            raise Refusal(404, "not_found", message, param="conversation", retry=False)
        return session, dialect, id, conversation

    async def _show_conversation(self, request: web.Request) -> web.StreamResponse:
        _, _, id, conversation = self._find_conversation(request)
        return json_response(conversation_object(id, conversation))

    async def _update_conversation(self, request: web.Request) -> web.StreamResponse:
        session, _, id, _ = self._find_conversation(request)
        metadata = metadata_of(await self._handler.read_small_object(request))
        return json_response(conversation_object(id, await session.history.set_metadata(id, metadata)))

    async def _delete_conversation(self, request: web.Request) -> web.StreamResponse:
        session, _, id, _ = self._find_conversation(request)
        await session.history.delete_conversation(id)
        return json_response({"id": id, "object": "conversation.deleted", "deleted": True})

    async def _list_items(self, request: web.Request) -> web.StreamResponse:
        session, _, id, _ = self._find_conversation(request)
        return json_response(item_list(items_of(session.history.messages_of(id)), request.query))

    async def _show_item(self, request: web.Request) -> web.StreamResponse:
        session, _, id, _ = self._find_conversation(request)
        item_id = request.match_info["item"]
        for item in items_of(session.history.messages_of(id)):
            if item["id"] == item_id:
                return json_response(item)
        raise Refusal(404, "not_found", f"item {item_id[:80]!r} is not in this conversation", param="item", retry=False)

    async def _add_items(self, request: web.Request) -> web.StreamResponse:
        session, dialect, id, _ = self._find_conversation(request)
        messages = _parse_items(dialect, await self._handler.read_small_object(request))
        if not messages:
            raise BadRequest("items: at least one item is required", "items")
        return json_response(page_of(items_of(await session.history.add_messages(id, messages))))

    async def _delete_item(self, request: web.Request) -> web.StreamResponse:
        session, _, id, _ = self._find_conversation(request)
        item_id = request.match_info["item"]
        conversation = await session.history.edit_messages(id, lambda messages: without_item(messages, item_id))
        return json_response(conversation_object(id, conversation))


def _parse_items(dialect: Responses, body: dict[str, Any]) -> list[Message]:
    items = fields.objects(body.get("items"), "items")
    if len(items) > _MAX_ITEMS:
        raise BadRequest(f"items: at most {_MAX_ITEMS} at a time, got {len(items)}", "items")
    return dialect.parse_input(items, "items")
