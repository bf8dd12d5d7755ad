"""An openai-agents agent that uses the Responses API; its output type is sent as a JSON schema."""

import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_tracing_disabled
from pydantic import BaseModel

set_tracing_disabled(True)


class Done(BaseModel):
    said: str


@function_tool
def write(text: str) -> str:
    """Write the note."""
    Path("note.txt").write_text(text)
    return "written"


agent = Agent("writer", model="policy", tools=[write], output_type=Done)
print(Runner.run_sync(agent, sys.argv[1]).final_output.said)
