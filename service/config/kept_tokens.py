"""Check the settings that determine which tokens an evaluation may sample.

The checks of a configuration use this module, and so does the API for requested evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.environment.settings import KeptTokens, StructuredOutputs


def kept_tokens_problems(key: str, kept: KeptTokens, *, temperature: float) -> Iterator[str]:
    """Yield a sentence for each invalid setting.

    key: name of the section with the settings, for messages; empty if there is no section.
    """
    prefix = f"{key}." if key else ""
    for name, value, is_off in (
        ("top_p", kept.top_p, kept.top_p == 1),
        ("top_k", kept.top_k, kept.top_k == 0),
        ("min_p", kept.min_p, kept.min_p == 0),
    ):
        if temperature == 0 and not is_off:
            yield (
                f"{prefix}{name} is {value:g} with temperature 0, which always takes the likeliest "
                "token; expected a temperature above 0; set it, or leave the other out"
            )
    if kept.structured_outputs is not None:
        yield from _structured_problems(f"{prefix}structured_outputs", kept.structured_outputs)


def _structured_problems(key: str, structured: StructuredOutputs) -> Iterator[str]:
    # Import these here, because most configurations have no structured outputs.
    import regex
    from jsonschema import Draft202012Validator, SchemaError

    if len(structured.given) != 1:
        yield (
            f"{key} has {', '.join(structured.given) or 'nothing'}; expected one of json, regex, "
            "choice and grammar; set one of them"
        )
    try:
        regex.compile(structured.regex or "")
    except regex.error as error:
        yield f"{key}.regex {structured.regex!r} is not a regular expression ({error}); correct it"
    try:
        Draft202012Validator.check_schema(structured.json or {})
    except SchemaError as error:
        yield f"{key}.json is not a JSON schema ({error.message}); correct it"
