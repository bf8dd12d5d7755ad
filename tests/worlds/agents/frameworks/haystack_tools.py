"""A Haystack agent with a tool, over chat completions."""

import os
import sys
from pathlib import Path
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def write(text: Annotated[str, "Text of the note"]) -> str:
    """Write the note."""
    Path("note.txt").write_text(text)
    return "written"


model = OpenAIChatGenerator(model="policy", api_base_url=os.environ["OPENAI_BASE_URL"])
agent = Agent(chat_generator=model, tools=[write], system_prompt="Write notes.")
agent.warm_up()
print(agent.run(messages=[ChatMessage.from_user(sys.argv[1])])["last_message"].text)
