"""`rayloom check`: what the chat template of the configured model does with a chat."""

from __future__ import annotations

from actors.environment.rendering import ChatRenderer
from actors.environment.template_traits import describe_traits, template_traits
from actors.environment.tokenizer import (
    ChatTokenizer,
    ids_before_text,
    is_raw,
    load_tokenizer,
    with_template,
)
from actors.trainer.tiny.tokenizer import build_tokenizer
from service.config.tree import Config


def describe_template(config: Config) -> str:
    """A table in comments, so that what is printed stays YAML."""
    name = config.model.path or "the tiny model"
    try:
        template = config.model.chat_template
        if config.model.path is None:
            tokenizer = with_template(build_tokenizer(), template)
        else:
            tokenizer = load_tokenizer(config.model.path, chat_template=template)
        if is_raw(tokenizer):
            lines = [_described_raw(tokenizer)]
        else:
            renderer = ChatRenderer(tokenizer, template_options=config.rollouts.template_options)
            lines = describe_traits(template_traits(renderer)).splitlines()
    except (OSError, ValueError) as error:
        lines = [f"not read: {str(error).strip().splitlines()[0]}"]
    return "\n".join(f"# {line}" for line in ("", f"The chat template of {name}", *lines))


def _described_raw(tokenizer: ChatTokenizer) -> str:
    before = tokenizer.decode(ids_before_text(tokenizer), skip_special_tokens=False)
    return (
        f"none: a prompt is the text of its messages as it is, after {before or 'nothing'}; "
        "system messages, tools and calls are refused"
    )
