"""Stored responses and conversations, as OpenAI's API returns them: objects, items, and lists of items."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loopwright.engines.base import Sampling
from loopwright.gateway.dialects import fields
from loopwright.gateway.dialects.base import TurnRequest
from loopwright.gateway.dialects.fields import BadRequest
from loopwright.gateway.dialects.response_items import ToolOrigin
from loopwright.gateway.dialects.responses import Responses, output_items, sent_tool
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.sessions.turn import Turn

if TYPE_CHECKING:
    from loopwright.gateway.sessions.history import Conversation, StoredMessage
    from loopwright.gateway.sessions.served_session import ServedSession

_PAGE, _MAX_PAGE = 20, 100
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


def find_response(session: "ServedSession", id: str) -> tuple[str, int]:
    """The call and the node of a response. Refusal if the session does not have it, or has it no longer."""
    call_id = id.removeprefix("resp_")
    node = session.history.node_of(call_id)
    if node is None or session.history.records[node].dialect != Responses.name:
        raise Refusal(404, "not_found", f"response {id[:80]!r} is not in this session", param="id", retry=False)
    return call_id, node


def response_object(session: "ServedSession", dialect: Responses, id: str, default_model: str) -> dict[str, Any]:
    """A response of the session. What only its request contained, such as the format of the text, is not repeated."""
    call_id, number = find_response(session, id)
    graph, record = session.session.graph, session.history.records[number]
    node, (messages, tools) = graph.nodes[number], graph.conversation(number)
    echo = {
        "instructions": messages[0]["content"] if record.has_instructions else None,
        "previous_response_id": record.response.get("previous_response_id"),
        "metadata": record.response.get("metadata") or {},
        "tools": [sent_tool({"type": "function", **tool["function"]}) for tool in tools],
        **({"conversation": {"id": record.conversation}} if record.conversation else {}),
    }
    sampling = Sampling(**{name: node.sampling[name] for name in _SAMPLING if name in node.sampling})
    model, origins = record.response.get("model") or default_model, _origins(record.response)
    request = TurnRequest(messages, sampling, model=model, tool_origins=origins, echo=echo)
    opening = len(node.ids) - node.sampled
    prompt_tokens, ids = len(graph.ids(node.parent or 0)) + opening, node.ids[opening:]
    is_finished = node.finish in ("stop", "length")
    message = node.message if is_finished else {"role": "assistant", "content": ""}
    turn = Turn(message, node.finish or "cut", number, prompt_tokens, node.sampled, ids=ids)
    data = dialect.render(request, call_id, [turn])
    known = {"created_at": record.response.get("created_at", 0), "completed_at": None, "max_output_tokens": None}
    if not is_finished:
        known |= {"status": "in_progress" if session.is_running(number) else "cancelled", "output": [], "usage": None}
    return {**data, **known}


def conversation_object(id: str, conversation: "Conversation") -> dict[str, Any]:
    """A conversation."""
    head = {"id": id, "object": "conversation", "created_at": conversation.created_at}
    return {**head, "metadata": conversation.metadata}


def items_of(messages: Sequence["StoredMessage"], scope: str = "") -> list[dict[str, Any]]:
    """The items of messages. Items of a turn have the ids of its response, others an id from `scope` and position."""
    items: list[dict[str, Any]] = []
    for position, stored in enumerate(messages):
        message, id = stored.message, stored.id or f"{scope}_{position}"
        match message.get("role"):
            case "assistant":
                turn = Turn(message, "stop", 0, 0, 0)
                items += output_items(turn, id, _origins(stored.record.response))
            case "tool":
                output = {"type": "function_call_output", "call_id": message["tool_call_id"]}
                items.append({"id": f"fco_{id}", **output, "output": message["content"], "status": "completed"})
            case role:
                part = {"type": "input_text", "text": message["content"]}
                item = {"id": f"msg_{id}", "type": "message", "role": role, "status": "completed"}
                items.append({**item, "content": [part]})
    return items


def without_item(messages: Sequence["StoredMessage"], item_id: str) -> list["StoredMessage"]:
    """The messages, without one of their items. Refusal if they do not have it."""
    for index, stored in enumerate(messages):
        items = items_of([stored])
        item = next((each for each in items if each["id"] == item_id), None)
        if item is None:
            continue
        message, is_call = dict(stored.message), item["type"] not in ("reasoning", "message")
        if item["type"] == "reasoning":
            del message["reasoning_content"]
        elif not is_call:
            message["content"] = ""
        elif item is not items[-1]:
            raise BadRequest(
                f"item: {item_id[:80]!r} is followed by other calls of its turn; delete those first", "item"
            )
        else:
            message["tool_calls"] = list(message.get("tool_calls") or ())[:-1]
        # Reasoning that leads to nothing is deleted with what it led to.
        is_left = bool(message.get("content") or message.get("tool_calls"))
        rest = [replace(stored, message={name: value for name, value in message.items() if value != []})]
        return [*messages[:index], *(rest if is_left and len(items) > 1 else ()), *messages[index + 1 :]]
    raise Refusal(404, "not_found", f"item {item_id[:80]!r} is not in this conversation", param="item", retry=False)


def item_list(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of items, as the query asks for it: `limit`, `order` and `after`."""
    limit, order, after = query.get("limit", str(_PAGE)), query.get("order", "desc"), query.get("after")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_PAGE:
        raise BadRequest(f"limit: expected 1 to {_MAX_PAGE}, got {limit!r:.60}", "limit")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order: expected 'asc' or 'desc', got {order!r:.60}", "order")
    items = items if order == "asc" else items[::-1]
    if after is not None:
        start = next((index for index, item in enumerate(items, 1) if item["id"] == after), None)
        if start is None:
            raise BadRequest(f"after: there is no item {after!r:.100}", "after")
        items = items[start:]
    return page_of(items[: int(limit)], has_more=len(items) > int(limit))


def page_of(items: Sequence[dict[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    """A list of items, in OpenAI's format."""
    first_id, last_id = (items[0]["id"], items[-1]["id"]) if items else ("", "")
    return {"object": "list", "data": items, "first_id": first_id, "last_id": last_id, "has_more": has_more}


def metadata_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a request."""
    if not isinstance(metadata := body.get("metadata") or {}, dict):
        raise BadRequest(f"metadata: expected an object, got {fields.short_repr(metadata)}", "metadata")
    fields.storable_json(metadata, "metadata")
    return metadata


def _origins(record: Mapping[str, Any]) -> dict[str, ToolOrigin]:
    return {name: ToolOrigin(*origin) for name, origin in record.get("origins", {}).items()}
