"""An agent of the OpenAI Agents SDK, over Responses, with its own tool.

    $ pip install openai-agents
    $ python openai_agents_calculator.py "What is 3+4?"

OPENAI_BASE_URL and OPENAI_API_KEY name its model. It prints its calculations, and then its answer.
Its tracing is off, because traces would go to OpenAI with the session's key.
"""

import json
import operator
import re
import sys

from agents import Agent, FunctionTool, Runner, set_tracing_disabled

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


async def calculate(context: object, arguments: str) -> str:
    expression = json.loads(arguments).get("expression", "")
    found = re.fullmatch(r"(\d+)([-+*])(\d+)", expression)
    if found is None:
        return "error: write two numbers with +, - or * between them"
    result = OPERATIONS[found[2]](int(found[1]), int(found[3]))
    print(f"{expression} = {result}")
    return str(result)


CALCULATOR = FunctionTool(
    name="calculator",
    description="Evaluate an arithmetic expression.",
    params_json_schema={
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
    on_invoke_tool=calculate,
    strict_json_schema=False,
)


def main(question: str) -> None:
    set_tracing_disabled(True)
    agent = Agent(name="calculator", model="policy", tools=[CALCULATOR])
    print(Runner.run_sync(agent, question).final_output)


if __name__ == "__main__":
    main(*sys.argv[1:])
