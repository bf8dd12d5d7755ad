"""A LangGraph agent that uses the chat completions API."""

import sys
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def write(text: str) -> str:
    """Write the note."""
    Path("note.txt").write_text(text)
    return "written"


# LangGraph sends the agent's earlier replies back with this name.
agent = create_react_agent(ChatOpenAI(model="policy"), [write], name="worker")
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
