"""A crew of CrewAI over the OpenAI SDK, whose agent calls its tool."""

import sys
from pathlib import Path

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("write")
def write(text: str) -> str:
    """Write the note."""
    Path("note.txt").write_text(text)
    return "written"


agent = Agent(
    role="Writer",
    goal="Write notes",
    backstory="You write notes.",
    llm=LLM(model="policy", provider="openai"),
    tools=[write],
)
task = Task(description=sys.argv[1], expected_output="What was done", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff().raw)
