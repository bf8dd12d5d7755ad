"""`rayloom check`: run the checks before a start, and describe the model's chat template."""

from __future__ import annotations

import tempfile

from actors.environment.rendering import ChatRenderer
from actors.environment.template_traits import describe_traits, template_traits
from actors.environment.tokenizer import (
    ChatTokenizer,
    ids_before_text,
    is_raw,
    load_tokenizer,
    with_template,
)
from actors.trainer.tiny.tokenizer import MAX_POSITIONS, build_tokenizer
from service.cli.outlet import warn
from service.config.algorithm_checks import schedule_warnings
from service.config.file import ConfigError
from service.config.model_files import check_adapters
from service.config.preflight import check_with_model, check_without_model
from service.config.tree import Config
from service.config.trial import Trial
from service.launch.remote_run import check_address


def check_before_start(config: Config, *, is_local: bool, trial: Trial) -> None:
    """Run the checks that `rayloom train` begins with, and print warnings to standard error.

    is_local, trial: see `check_without_model`. Raises: ConfigError if a check fails.
    """
    check_address(config)
    for warning in schedule_warnings(config):
        warn(warning)
    observations = check_without_model(config, is_local=is_local, trial=trial, tell=warn)
    if config.model.path is not None:
        path = config.model.path
        check_with_model(config, observations, model_path=path, tell=warn, tell_template=warn)
        return
    if config.model.max_context_tokens > MAX_POSITIONS:
        raise ConfigError(
            f"model.max_context_tokens is {config.model.max_context_tokens}, expected at most the "
            f"tiny model's {MAX_POSITIONS} positions; lower it or choose another model"
        )
    # These checks read only the tiny model's tokenizer, which is quick to build.
    with tempfile.TemporaryDirectory(prefix="rayloom-check-") as directory:
        build_tokenizer().save_pretrained(directory, save_jinja_files=False)
        check_with_model(config, observations, model_path=directory, tell=warn, tell_template=warn)
    if config.trainer.lora is not None:
        # Import this here, because it imports torch.
        from actors.trainer.tiny.model import tiny_config

        tiny = tiny_config(build_tokenizer())
        check_adapters("model.tiny: the tiny model", tiny, config.trainer.lora)


def describe_batch(config: Config) -> str:
    """Return a phrase that describes the rollouts of a run.

    Example: 100 steps, each of 16 groups of 16 rollouts (256 rollouts)
    """
    groups, size = config.algorithm.groups_per_step, config.algorithm.group_size
    return (
        f"{config.run.steps} steps, each of {groups} groups of {size} rollouts "
        f"({groups * size:,} rollouts)"
    )


def describe_template(config: Config) -> str:
    """Return a description of the model's chat template, in lines that are YAML comments."""
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
        f"none: a prompt is the unchanged text of its messages, after {before or 'nothing'}; "
        "system messages, tools and calls are refused"
    )
