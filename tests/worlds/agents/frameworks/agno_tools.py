"""An agno agent with a tool, over chat completions."""

import sys
from pathlib import Path

from agno.agent import Agent
from agno.models.openai import OpenAIChat


def write(text: str) -> str:
    """Write the note.

    Args:
        text (str): Of the note.
    """
    Path("note.txt").write_text(text)
    return "written"


agent = Agent(model=OpenAIChat(id="policy"), instructions="Write notes.", tools=[write])
print(agent.run(sys.argv[1]).content)
