"""A ReAct module of DSPy, which writes each step into a new prompt, and then extracts an answer."""

import sys
from pathlib import Path

import dspy


def write(text: str) -> str:
    """Write the note."""
    Path("note.txt").write_text(text)
    return "written"


dspy.configure(lm=dspy.LM("openai/policy", cache=False))
print(dspy.ReAct("task -> said", tools=[write])(task=sys.argv[1]).said)
