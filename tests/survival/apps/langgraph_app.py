"""A LangGraph app: a graph of a model and its tools, streamed. All it knows of the gateway is a base URL."""

import sys
from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def price(item: str) -> int:
    """What an item costs."""
    return {"tea": 3, "cake": 4}[item]


def main(task: str) -> None:
    """The model's answer once it stops calling tools."""
    model = ChatOpenAI(model="policy", streaming=True).bind_tools([price])

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([price]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    pieces = 0
    for message, _ in graph.compile().stream({"messages": [("user", task)]}, stream_mode="messages"):
        if isinstance(message, AIMessageChunk) and message.content:
            print(message.content, end="", flush=True)
            pieces += 1
    print(f"\n{pieces} pieces")


main(sys.argv[1])
