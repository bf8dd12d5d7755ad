"""vLLM's parsers in a process of their own, and tokenizers of several families for them.

Importing the parsers takes eleven seconds, warns, and changes how torch compiles, which other tests
in the same process do not need. So the functions that the child process runs import them when they
are called.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from actors.environment.policy import ParsedReply
from actors.environment.protocol import ToolSchema
from actors.trainer.tiny.tokenizer import CHAT_TEMPLATE, build_tokenizer
from service.inference.settings import NONE, EngineSettings
from worlds.models.published_templates import published, tokenizer_of

if TYPE_CHECKING:
    from service.inference.parsing import ReplyParser

# The lines of each family's chat template that show the form of its calls, or that it thinks.
TEMPLATES = {
    "tiny": CHAT_TEMPLATE,
    "qwen3": r"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n"
    "</tool_call>\n{%- if '</think>' in content %}",
    "qwen3_coder": r"<tool_call>\n<function=example_function_name>\n<parameter=example_parameter>",
    "glm": "<tool_call>{{ tc.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>",
    "llama": 'Respond in the format {"name": function name, "parameters": dictionary of argument',
    "mistral": "{{- '[TOOL_CALLS]' }}{{- tool_call.function.name }}{{- '[ARGS]' }}",
    "none": "{{ messages[0].content }}",
}
MARKS = {
    "qwen3": ["<think>", "</think>"],
    "glm": ["<think>", "</think>"],
    "llama": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
}

_SPECIAL = re.compile(r"<[|\uff5c][^>]*[|\uff5c]>|\[[A-Z_]+\]")


@cache
def family(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the tiny vocabulary and a family's marks and template."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(MARKS.get(name, []))
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def found_parsers(name: str) -> tuple[str | None, str | None]:
    return names_of(_parser(name))


def loaded_parsers(settings: EngineSettings) -> tuple[str | None, str | None]:
    from service.inference.parsing import load_parser

    return names_of(load_parser(settings))


def names_of(parser: ReplyParser) -> tuple[str | None, str | None]:
    return parser.tool_parser, parser.reasoning_parser


def parse(name: str, prompt: str, text: str, tools: tuple[ToolSchema, ...]) -> ParsedReply:
    """Parse a reply of a family's model that ended by itself."""
    return _parsed(_parser(name), prompt, f"{text}<|end|>", tools)


def parse_by(parser: str, text: str, tools: tuple[ToolSchema, ...]) -> ParsedReply:
    """Parse with a parser of vLLM, over a tokenizer that knows the special tokens of the text."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    from service.inference.parsing import find_parser

    tokenizer = build_tokenizer()
    tokenizer.add_tokens(sorted({*_SPECIAL.findall(text), "<|python_tag|>"}))
    found = find_parser(get_cached_tokenizer(tokenizer), tool_parser=parser, reasoning_parser=NONE)
    return _parsed(found, "", text, tools)


def parse_published(
    name: str, texts: Sequence[str], tools: tuple[ToolSchema, ...]
) -> list[ParsedReply]:
    """Parse with the parser and the tokenizer of a published chat template."""
    parser = _published_parser(name)
    return [_parsed(parser, "", text, tools) for text in texts]


def published_parser(name: str) -> str | None:
    """Return the name of the parser of calls that fits a published chat template.

    The two forms of Mistral's calls have one parser, which looks for the token [ARGS].
    """
    try:
        parser = _published_parser(name)
    except ValueError as error:
        # vLLM reads Cohere's calls with a package that is not installed here.
        assert isinstance(error.__cause__, ImportError), error
        return None
    has_token = parser.tool_parser == "mistral" and "[ARGS]" in parser.tokenizer.get_vocab()
    return "mistral [ARGS]" if has_token else parser.tool_parser


@cache
def _published_parser(name: str) -> ReplyParser:
    from vllm.tokenizers.hf import get_cached_tokenizer

    from service.inference.parsing import find_parser

    [template] = [each for each in published() if each.name == name]
    return find_parser(get_cached_tokenizer(tokenizer_of(template)), reasoning_parser=NONE)


def parse_loaded(settings: EngineSettings, text: str, tools: tuple[ToolSchema, ...]) -> ParsedReply:
    """Parse as an engine of these settings does."""
    from service.inference.parsing import load_parser

    return _parsed(load_parser(settings), "", text, tools)


def vllm_names() -> tuple[set[str], set[str]]:
    """Return the names of vLLM's tool parsers and of its reasoning parsers."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    return set(ToolParserManager.lazy_parsers), set(ReasoningParserManager.lazy_parsers)


@contextmanager
def parser_process() -> Iterator[Callable[..., Any]]:
    """Yield a function that calls another function of this module in a process with vLLM."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        yield lambda call, *arguments: pool.submit(call, *arguments).result()


@cache
def _parser(name: str) -> ReplyParser:
    from vllm.tokenizers.hf import get_cached_tokenizer

    from service.inference.parsing import find_parser

    return find_parser(get_cached_tokenizer(family(name)))


def _parsed(
    parser: ReplyParser, prompt: str, text: str, tools: tuple[ToolSchema, ...]
) -> ParsedReply:
    prompt_ids, sampled = (
        np.array(parser.tokenizer.encode(each, add_special_tokens=False), dtype=np.int32)
        for each in (prompt, text)
    )
    return parser.parse(prompt_ids, sampled, tools)
