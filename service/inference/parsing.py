"""Split a sampled reply with vLLM's parsers into thinking, content and tool calls.

Invariant: `ReplyParser.parse` never raises. Text that cannot be parsed stays content.

vLLM's parsers do not report a call that they cannot read. So this module counts the calls that the
text begins. If the parser found fewer, the turn is malformed, and none of its calls is executed:
with only some results, the policy could take one call's result for another's. Importing this module
takes eleven seconds if vLLM is not imported yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import Parser, ParserManager
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tokenizers.hf import get_cached_tokenizer

from actors.environment.policy import ParsedCall, ParsedReply
from actors.environment.protocol import MalformedCall, ToolSchema
from actors.environment.rendering import ChatRenderer
from actors.environment.template_traits import USUAL, call_form, form_of
from actors.environment.template_traits import reasoning_parser as reasoning_form
from actors.environment.tokenizer import load_tokenizer
from actors.environment.tool_calls import parse_tool_calls
from actors.types import TokenIds
from actors.user_code import FaultLog
from service.inference.settings import AUTO, NONE, EngineSettings

_CACHED_TOOL_SETS = 64
# Tokens at a prompt's end that may hold the mark with which a template opens a thought, and the
# line break after it.
_PROMPT_END_TOKENS = 8

logger = logging.getLogger(__name__)
_fault_log = FaultLog(logger)


# Other names of the same parsers in vLLM's registry.
_SAME_FORM = {"qwen3_json": "hermes", "qwen3_coder": "qwen3_xml", "glm45": "glm47"}
UNREADABLE = MalformedCall(reason="unreadable", message="The tool call could not be read.")


def load_parser(settings: EngineSettings) -> ReplyParser:
    """Load a model's tokenizer, and return the parser of the model's replies.

    Raises: ValueError if the tokenizer cannot be loaded, or if the settings name a parser that does
        not exist or cannot be used with the tokenizer.
    """
    # Some parsers log a traceback for a reply that they cannot parse, which is not an engine error.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    try:
        tokenizer = get_cached_tokenizer(
            load_tokenizer(settings.model, chat_template=settings.chat_template)
        )
    except OSError as error:
        raise ValueError(
            f"inference: the tokenizer of {settings.model} cannot be loaded: {error}; expected a "
            "model's directory or name with readable tokenizer files"
        ) from error
    inference = settings.inference
    parser = find_parser(
        tokenizer,
        tool_parser=inference.tool_parser,
        reasoning_parser=inference.reasoning_parser,
        stop_token_ids=settings.stop_token_ids,
    )
    logger.info(
        "inference: replies are parsed by %s for calls, by %s for thinking",
        parser.tool_parser or "nothing",
        parser.reasoning_parser or "nothing",
    )
    return parser


def find_parser(
    tokenizer: Any,
    *,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    stop_token_ids: Sequence[int] = (),
) -> ReplyParser:
    """Return a parser of replies that uses vLLM's parsers of tool calls and of thinking.

    Args: tokenizer: a result of vLLM's `get_cached_tokenizer`; another tokenizer would build its
    vocabulary again for each reply. tool_parser, reasoning_parser: the name of a parser in vLLM;
    auto chooses the parser that fits the chat template, none uses no parser.
    Raises: ValueError if vLLM does not know a name, or the parser does not fit the tokenizer.
    """
    renderer = ChatRenderer(tokenizer)
    form, thinking = call_form(renderer), reasoning_form(renderer)
    return ReplyParser(
        tokenizer,
        tool_parser=_chosen(
            tool_parser, form.parser if form else NONE, tokenizer, setting="tool_parser"
        ),
        reasoning_parser=_chosen(
            reasoning_parser, thinking or NONE, tokenizer, setting="reasoning_parser"
        ),
        stop_token_ids=stop_token_ids,
    )


def _chosen(wanted: str, found: str, tokenizer: Any, *, setting: str) -> str | None:
    """Return the parser to use: `wanted`, or `found` if `wanted` is auto; None for no parser.

    found: the parser that fits the chat template. setting: tool_parser or reasoning_parser.
    """
    name = found if wanted == AUTO else wanted
    if name == NONE:
        return None
    try:
        _compose(tokenizer, **{setting: name})
    except ImportError as error:
        raise ValueError(
            f"inference.{setting} is {wanted!r}, and vLLM's parser {name} needs a package that is "
            f"not installed ({error}); install the package, or set inference.{setting} to {NONE}"
        ) from error
    except TypeError as error:
        if wanted == AUTO:
            logger.warning(
                "inference: the chat template is that of vLLM's parser %s, which cannot be used "
                "with the tokenizer (%s)",
                name,
                error,
            )
            return None
        raise ValueError(
            f"inference.{setting} is {name!r}, which vLLM cannot use with this model: {error}; "
            f"expected {AUTO}, {NONE} or another of vLLM's names"
        ) from error
    return name


def _compose(
    tokenizer: Any, *, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> type[Parser] | None:
    """Return vLLM's class for the parsers; None without names. Raises: TypeError if it refuses."""
    return ParserManager.get_parser(
        tool_parser_name=tool_parser,
        reasoning_parser_name=reasoning_parser,
        enable_auto_tools=True,
        tokenizer=tokenizer,
    )


class ReplyParser:
    """A parser of one model's replies; `find_parser` creates it."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_parser: str | None,
        reasoning_parser: str | None,
        stop_token_ids: Sequence[int],
    ) -> None:
        self.tokenizer = tokenizer
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self._end_ids = {tokenizer.eos_token_id, tokenizer.pad_token_id, *stop_token_ids}
        # None if the parser is not in the table; malformed calls are then not detected.
        self._form = form_of(_SAME_FORM.get(tool_parser or "", tool_parser))
        self._thought_marks = self._marks_of_thought()
        self._parser_class: Callable[[bool, bool], type[Parser] | None] = lru_cache(
            self._compose_class
        )
        self._request: Callable[[tuple[ToolSchema, ...]], ChatCompletionRequest] = lru_cache(
            _CACHED_TOOL_SETS
        )(_minimal_request)

    def parse(
        self, prompt: TokenIds, sampled: TokenIds, tools: tuple[ToolSchema, ...]
    ) -> ParsedReply:
        """Split a sampled reply, and return its thinking, content and tool calls.

        Args: prompt: [P] int32, the prompt, whose last tokens may begin the reply's thinking.
        sampled: [A] int32, the reply. tools: the tools that the prompt declares; if empty, the
        reply is not searched for calls.
        """
        text = self._text(sampled)
        try:
            return self._parse(text, sampled, tools, opens_thought=self._opens_thought(prompt))
        except Exception as error:  # noqa: BLE001
            # vLLM's parsers may raise anything on unexpected text, and the policy samples any text.
            _fault_log.log(f"inference: {self.tool_parser}, {self.reasoning_parser}", error)
            reads_calls = bool(tools) and self.tool_parser is not None
            return ParsedReply(content=text, calls=(UNREADABLE,) if reads_calls else ())

    def _parse(
        self,
        text: str,
        sampled: TokenIds,
        tools: tuple[ToolSchema, ...],
        *,
        opens_thought: bool,
    ) -> ParsedReply:
        # Some parsers treat a text without marks as an unfinished thought; a model with thinking
        # switched off writes such texts.
        thinks = opens_thought or any(mark in text for mark in self._thought_marks)
        thinks = self.reasoning_parser is not None and (thinks or not self._thought_marks)
        # Parse without calls too: some parsers drop the markup that they could not read.
        plain = self._run(text, sampled, (), reads_calls=False, reads_thought=thinks)
        if not tools or self.tool_parser is None:
            return plain
        parsed = self._run(text, sampled, tools, reads_calls=True, reads_thought=thinks)
        if parsed.calls:
            read = [call.arguments for call in parsed.calls if isinstance(call, ParsedCall)]
            if self._form is None or not self._form.has_unread(plain.content, read):
                return parsed
            return replace(plain, calls=(UNREADABLE,))
        # A reply that is only a thought, finished or not, has no content.
        return replace(plain, calls=self._faults(plain.content or text, tools))

    def _run(
        self,
        text: str,
        sampled: TokenIds,
        tools: tuple[ToolSchema, ...],
        *,
        reads_calls: bool,
        reads_thought: bool,
    ) -> ParsedReply:
        parser_class = self._parser_class(reads_calls, reads_thought)
        if parser_class is None:
            return ParsedReply(content=text)
        request = self._request(tools)
        # A new parser for each reply, because parsers have state.
        reasoning, content, calls = parser_class(self.tokenizer, request.tools).parse(
            text, request, enable_auto_tools=True, model_output_token_ids=sampled.tolist()
        )
        return ParsedReply(
            content=content or "",
            reasoning=reasoning,
            calls=tuple(
                ParsedCall(
                    name=_sound(call.name),
                    arguments=_sound(call.arguments),
                    id=call.id or make_tool_call_id(),
                )
                for call in calls or ()
            ),
        )

    def _faults(self, text: str, tools: tuple[ToolSchema, ...]) -> tuple[MalformedCall, ...]:
        """Return the malformed tool calls of a text in which vLLM's parser has found no call."""
        if self._form is USUAL:
            found = parse_tool_calls(text, tools)
            if faults := tuple(call for call in found if isinstance(call, MalformedCall)):
                return faults
        start = None if self._form is None else self._form.start
        return (UNREADABLE,) if start is not None and start in text else ()

    def _text(self, sampled: TokenIds) -> str:
        """Return the text without the end tokens. The parsers need the other special tokens."""
        ids = sampled.tolist()
        while ids and ids[-1] in self._end_ids:
            ids.pop()
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _opens_thought(self, prompt: TokenIds) -> bool:
        if not self._thought_marks:
            return False
        end = self.tokenizer.decode(
            prompt[-_PROMPT_END_TOKENS:].tolist(), skip_special_tokens=False
        )
        is_open: bool = end.rstrip().endswith(self._thought_marks[0])
        return is_open

    def _marks_of_thought(self) -> tuple[str, ...]:
        """Return the strings around a model's thinking, such as <think> and </think>; or none."""
        parser_class = _compose(self.tokenizer, reasoning_parser=self.reasoning_parser)
        reasoning = None if parser_class is None else parser_class(self.tokenizer).reasoning_parser
        if reasoning is None:
            return ()
        marks = reasoning.reasoning_start_str, reasoning.reasoning_end_str
        return tuple(marks) if all(marks) else ()

    def _compose_class(self, reads_calls: bool, reads_thought: bool) -> type[Parser] | None:
        return _compose(
            self.tokenizer,
            tool_parser=self.tool_parser if reads_calls else None,
            reasoning_parser=self.reasoning_parser if reads_thought else None,
        )


def _minimal_request(tools: tuple[ToolSchema, ...]) -> ChatCompletionRequest:
    """Make the chat request that vLLM's parsers require in addition to the text."""
    body: dict[str, Any] = {"messages": []}
    if tools:
        body |= {"tools": [tool.for_template() for tool in tools], "tool_choice": "auto"}
    return ChatCompletionRequest.model_validate(body)


def _sound(text: str) -> str:
    """Return the text with "?" for lone surrogates, which JSON can contain but UTF-8 cannot."""
    return text.encode(errors="replace").decode()
