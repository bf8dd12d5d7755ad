"""A named agent of Semantic Kernel, which sends its name with its instructions."""

import asyncio
import sys
from pathlib import Path

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Notes:
    @kernel_function(description="Write the note.")
    def write(self, text: str) -> str:
        Path("note.txt").write_text(text)
        return "written"


agent = ChatCompletionAgent(
    service=OpenAIChatCompletion(ai_model_id="policy", async_client=AsyncOpenAI()),
    name="writer",
    instructions="Write notes.",
    plugins=[Notes()],
)
print(asyncio.run(agent.get_response(messages=sys.argv[1])).message.content)
