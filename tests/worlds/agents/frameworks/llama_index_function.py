"""A FunctionAgent of LlamaIndex, which streams chat completions."""

import asyncio
import os
import sys
from pathlib import Path

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def write(text: str) -> str:
    """Write the note."""
    Path("note.txt").write_text(text)
    return "written"


model = OpenAILike(
    model="policy",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    is_function_calling_model=True,
)
agent = FunctionAgent(llm=model, tools=[write], system_prompt="Write notes.")


async def main(task: str) -> None:
    print(await agent.run(task))


asyncio.run(main(sys.argv[1]))
