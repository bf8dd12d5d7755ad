"""A pydantic-ai agent whose output type is, as by default, sent as a tool that it must call."""

import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic_ai import Agent


class Done(BaseModel):
    said: str


agent = Agent("openai-chat:policy", output_type=Done)


@agent.tool_plain
def write(text: str) -> str:
    """Write the note."""
    Path("note.txt").write_text(text)
    return "written"


print(agent.run_sync(sys.argv[1]).output.said)
