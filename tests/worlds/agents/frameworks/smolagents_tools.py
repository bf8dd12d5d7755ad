"""A ToolCallingAgent of smolagents, which sends `stop` and `tool_choice: required`."""

import sys
from pathlib import Path

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def write(text: str) -> str:
    """Write the note.

    Args:
        text: Of the note.
    """
    Path("note.txt").write_text(text)
    return "written"


agent = ToolCallingAgent(tools=[write], model=OpenAIModel("policy"), verbosity_level=0)
print(agent.run(sys.argv[1]))
