"""A CodeAgent of smolagents, which sends `stop` with every request and calls its tools in code."""

import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, tool


@tool
def write(text: str) -> str:
    """Write the note.

    Args:
        text: Of the note.
    """
    Path("note.txt").write_text(text)
    return "written"


print(CodeAgent(tools=[write], model=OpenAIModel("policy"), verbosity_level=0).run(sys.argv[1]))
