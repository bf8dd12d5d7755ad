"""A google-adk agent that writes the note and transfers to a sub-agent, which gives the answer."""

import asyncio
import sys
from pathlib import Path

from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part


def write(text: str) -> dict[str, str]:
    """Write the note."""
    Path("note.txt").write_text(text)
    return {"status": "written"}


model = LiteLlm(model="openai/policy")
reporter = Agent(
    name="reporter",
    model=model,
    description="Says what was done.",
    instruction="Say what was done.",
    disallow_transfer_to_parent=True,
    disallow_transfer_to_peers=True,
)
writer = Agent(
    name="writer",
    model=model,
    instruction="Do the task, then transfer to the reporter.",
    tools=[write],
    sub_agents=[reporter],
)


async def main(task: str) -> None:
    runner = InMemoryRunner(agent=writer, app_name="notes")
    session = await runner.session_service.create_session(app_name="notes", user_id="user")
    asked = Content(role="user", parts=[Part(text=task)])
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=asked):
        if event.is_final_response():
            print(event.content.parts[0].text)


asyncio.run(main(sys.argv[1]))
