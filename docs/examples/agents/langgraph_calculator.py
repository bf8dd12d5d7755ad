"""A LangGraph agent with a tool. It needs only OPENAI_BASE_URL and OPENAI_API_KEY.

    $ pip install langgraph langchain-openai
    $ python langgraph_calculator.py "What is 3+4?"

It prints its calculations, and then its answer.
"""

import operator
import re
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ARGUMENTS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}


@tool(args_schema=ARGUMENTS)
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    found = re.fullmatch(r"(\d+)([-+*])(\d+)", expression)
    if found is None:
        return "error: write two numbers with +, - or * between them"
    result = OPERATIONS[found[2]](int(found[1]), int(found[3]))
    print(f"{expression} = {result}")
    return str(result)


def main(question: str) -> None:
    model = ChatOpenAI(model="policy", max_retries=5).bind_tools([calculator])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    ended = graph.compile().invoke({"messages": [("user", question)]})
    print(ended["messages"][-1].content)


if __name__ == "__main__":
    main(*sys.argv[1:])
