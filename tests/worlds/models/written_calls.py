"""Calls as the models of each parser of vLLM write them, with and without faults."""

from __future__ import annotations

from dataclasses import dataclass

from actors.environment.template_traits import CALL_FORMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Calls as the models of one parser write them, with and without faults."""

    call: str
    """A call of `weather`, in which {} is the city."""
    unread: tuple[str, ...]
    """Calls of `population` that the parser cannot read, although it reads the call before them."""
    before: str = ""
    between: str = "\n"
    after: str = ""
    mentions: tuple[str, ...] = ("thought", "before", "after")
    """Where the parser reads a good call beside prose that mentions the start."""
    mark: str
    """The text that begins a call; a city may have it in its name, unless it is empty."""

    def reply(self, *calls: str) -> str:
        return self.before + self.between.join(calls) + self.after

    @property
    def start(self) -> str:
        text = self.before + self.call
        return next(form.start for form in CALL_FORMS if form.start and text.startswith(form.start))

    def weather(self, city: str) -> str:
        return self.call.replace("{}", city)


JSON_CALL = '{"name": "weather", "arguments": {"city": "{}"}}'
XML_CALL = "\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n"
XML_UNREAD = (
    "\n<oops>\n",
    '\n{"name": "population", "arguments": {"city": "Rome"}}\n',
    '\n{"name": "population", "argu',
)
IN_LIST = ('"population"', "{}", "7")
BEGIN, SEP, END = (
    f"<\uff5ctool\u2581{each}\uff5c>" for each in ("call\u2581begin", "sep", "call\u2581end")
)
GROUP = {
    "before": "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "after": "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "mark": BEGIN,
}
QWEN = Written(
    call=f"<tool_call>{XML_CALL}</tool_call>",
    unread=(
        *(f"<tool_call>{each}</tool_call>" for each in XML_UNREAD),
        "<tool_call>\n<functionpopulation>\n</function>\n</tool_call>",
    ),
    mark="<tool_call>\n<function=x>",
)
GLM = Written(
    mentions=("after",),
    call="<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    unread=(
        "<tool_call>\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        '<tool_call>{"name": "population", "arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
    ),
    mark="<tool_call>",
)
WRITTEN = {
    "hermes": Written(
        mentions=(),
        call=f"<tool_call>{JSON_CALL}</tool_call>",
        unread=("<tool_call>oops</tool_call>", '<tool_call>{"name": "population"}</tool_call>'),
        mark="<tool_call>",
    ),
    "qwen3_xml": QWEN,
    "qwen3_coder": QWEN,
    "seed_oss": Written(
        call=f"<seed:tool_call>{XML_CALL}</seed:tool_call>",
        unread=tuple(f"<seed:tool_call>{each}</seed:tool_call>" for each in XML_UNREAD),
        mark="<seed:tool_call>",
    ),
    "glm45": GLM,
    "glm47": GLM,
    "minimax_m2": Written(
        before="<minimax:tool_call>\n",
        call='<invoke name="weather">\n<parameter name="city">{}</parameter>\n</invoke>',
        unread=(
            '<invoke name="population"\n<parameter name="city">Rome</parameter>\n</invoke>',
            '<invoke population>\n<parameter name="city">Rome</parameter>\n</invoke>',
            "</minimax:tool_call><minimax:tool_call>{oops}</minimax:tool_call><minimax:tool_call>",
        ),
        after="\n</minimax:tool_call>",
        mark="<invoke name=",
    ),
    "deepseek_v3": Written(
        call=f'{BEGIN}function{SEP}weather\n```json\n{{"city": "{{}}"}}\n```{END}',
        unread=(
            f'{BEGIN}function{SEP}population\n{{"city": "Rome"}}{END}',
            f'{BEGIN}function{SEP}population\n```json\n{{"city":\n"Rome"}}\n```{END}',
        ),
        **GROUP,
    ),
    "deepseek_v31": Written(
        call=f'{BEGIN}weather{SEP}{{"city": "{{}}"}}{END}',
        unread=(
            f'{BEGIN}population{{"city": "Rome"}}{END}',
            f'{BEGIN}population{SEP}{{"city":\n"Rome"}}{END}',
        ),
        **GROUP,
    ),
    "kimi_k2": Written(
        before="<|tool_calls_section_begin|>",
        between="",
        call="<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "{}"}<|tool_call_end|>',
        unread=("<|tool_call_begin|>population<|tool_call_argument_begin|>{}<|tool_call_end|>",),
        after="<|tool_calls_section_end|>",
        mark="<|tool_call_begin|>",
    ),
    "gemma4": Written(
        between="",
        call='<|tool_call>call:weather{city:<|"|>{}<|"|>}<tool_call|>',
        unread=("<|tool_call>population{Rome}<tool_call|>",),
        mark="<|tool_call>",
    ),
    "functiongemma": Written(
        between="",
        call="<start_function_call>call:weather{city:<escape>{}<escape>}<end_function_call>",
        unread=("<start_function_call>population{}<end_function_call>",),
        mark="<start_function_call>",
    ),
    "longcat": Written(
        mentions=(),
        call=f"<longcat_tool_call>{JSON_CALL}</longcat_tool_call>",
        unread=("<longcat_tool_call>oops</longcat_tool_call>",),
        mark="<longcat_tool_call>",
    ),
    "granite": Written(
        before="<|tool_call|>[",
        between=", ",
        call=JSON_CALL,
        unread=IN_LIST,
        after="]",
        mark="<|tool_call|>",
    ),
    "mistral [ARGS]": Written(
        mentions=(), between="", call='[TOOL_CALLS]weather[ARGS]{"city": "{}"}', unread=(), mark=""
    ),
    "mistral": Written(
        mentions=("after",),
        before="[TOOL_CALLS][",
        between=", ",
        call=JSON_CALL,
        unread=(*IN_LIST, f"{JSON_CALL}][TOOL_CALLS][{JSON_CALL}"),
        after="]",
        mark="",
    ),
    "apertus": Written(
        mentions=("after",),
        before="<|tools_prefix|>[",
        between=", ",
        call='{"weather": {"city": "{}"}}',
        unread=(*IN_LIST, '{"weather": {}}]<|tools_suffix|><|tools_prefix|>[{"population": {}}'),
        after="]<|tools_suffix|>",
        mark="<|tools_prefix|>",
    ),
    "lfm2": Written(
        mentions=("after",),
        before="<|tool_call_start|>[",
        between=", ",
        call='weather(city="{}")',
        unread=(
            '"population"',
            "weather()]<|tool_call_end|><|tool_call_start|>[population()",
        ),
        after="]<|tool_call_end|>",
        mark="<|tool_call_start|>",
    ),
    "olmo3": Written(
        mentions=("after",),
        before="<function_calls>",
        call='weather(city="{}")',
        unread=("population", "weather()</function_calls>\n<function_calls>population()"),
        after="</function_calls>",
        mark="<function_calls>",
    ),
    "llama3_json": Written(
        between="; ",
        call='<|python_tag|>{"name": "weather", "parameters": {"city": "{}"}}',
        unread=("<|python_tag|>population()", '{"name": "population"}'),
        mark="<|python_tag|>",
    ),
}
