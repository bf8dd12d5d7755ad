"""A Strands agent with a tool; it streams chat completions."""

import os
import sys
from pathlib import Path

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def write(text: str) -> str:
    """Write the note.

    Args:
        text: Of the note.
    """
    Path("note.txt").write_text(text)
    return "written"


client = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
model = OpenAIModel(client_args=client, model_id="policy")
agent = Agent(model=model, system_prompt="Write notes.", tools=[write], callback_handler=None)
print(agent(sys.argv[1]))
