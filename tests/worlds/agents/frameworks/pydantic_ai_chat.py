"""A pydantic-ai agent over chat completions whose output type is sent as a JSON schema."""

import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput


class Done(BaseModel):
    said: str


agent = Agent("openai-chat:policy", output_type=NativeOutput(Done))


@agent.tool_plain
def write(text: str) -> str:
    """Write the note."""
    Path("note.txt").write_text(text)
    return "written"


print(agent.run_sync(sys.argv[1]).output.said)
