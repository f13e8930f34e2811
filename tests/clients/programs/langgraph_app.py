"""A LangGraph app with tools over LangChain's client, which can leave the history to the server."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

MODES = {
    "chat": {},
    "responses": {"use_responses_api": True},
    "responses, use_previous_response_id": {"use_previous_response_id": True},
}


@tool
def price(item: str) -> int:
    """What an item costs."""
    return {"tea": 3, "cake": 4}[item]


model = ChatOpenAI(model="policy", **MODES[sys.argv[1]]).bind_tools([price])
graph = StateGraph(MessagesState)
graph.add_node("think", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([price]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
app = graph.compile()
messages = [("system", "You keep a shop.")]
for question in ("Who are you?", "Say a verse.", "What do tea and cake cost?", "Thank you."):
    messages = [*messages, ("user", question)]
    if "verse" in question:
        parts = app.stream({"messages": messages}, stream_mode=["values", "messages"])
        messages = [state for mode, state in parts if mode == "values"][-1]["messages"]
    else:
        messages = app.invoke({"messages": messages})["messages"]
    print(json.dumps(messages[-1].text))
