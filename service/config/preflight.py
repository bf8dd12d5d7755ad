"""Check a configuration against the machine, the models and the trackers before anything starts.

A failed check raises ConfigError, whose message says what is wrong, what was given, what was
expected and what to do. The checks read files, load the tokenizer and begin one task in each
environment. The user's own functions are called in a child process.
"""

from __future__ import annotations

import ast
import difflib
import errno
import inspect
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import singledispatchmethod
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

from actors.environment.protocol import Observation
from actors.environment.tokenizer import load_tokenizer, stop_ids_of, stop_token_ids
from actors.environment.user_names import BadName, find
from actors.limits import GIB
from actors.user_code import describe, type_of
from service.config.file import ConfigError, why_missing
from service.config.model_faults import check_special_tokens, remedy_of_missing
from service.config.model_files import (
    check_architecture_once,
    check_model_files,
    read_object,
    template_warnings,
    vocabulary_size,
)
from service.config.sections import OwnTrackerSettings
from service.config.tasks import check_prompts, first_observations
from service.config.tree import Config
from service.config.trial import Trial, has_own_code, tried
from service.inference.settings import AUTO, NONE

_logger = logging.getLogger(__name__)
# Limit on ranks, engines and actors for each CPU; a process takes about half a GiB before it has a
# model.
MAX_PROCESSES_PER_CPU = 16
# vLLM reads gpt-oss's replies through another interface, which the engines do not call.
UNSUPPORTED_PARSERS = frozenset({"openai", "openai_gptoss"})
_CRITIC = "algorithm.critic.model"


def check_without_model(
    config: Config,
    *,
    is_local: bool = True,
    trial: Trial = Trial(),  # noqa: B008  # frozen
    tell: Callable[[str], None] = _logger.warning,
) -> dict[str, Observation]:
    """Run the checks that need no model; return each environment's first observation by its name.

    is_local: whether the run starts its own Ray on this machine; if so, also check that the machine
    has the memory, CPUs and GPUs that the run needs. trial: selects which of the user's own
    functions are called. tell: called with each warning.
    Raises: ConfigError if a check fails.
    """
    check_machine(config, is_local=is_local)
    check_parsers(config)
    check_model_sources(config)
    shadow = config.audit.shadow
    if shadow is not None:
        trial = replace(trial, others={shadow: "audit.shadow"})
    if has_own_code(config) or shadow is not None:
        return tried(config, trial, tell=tell)
    return first_observations(config)


def check_machine(config: Config, *, is_local: bool) -> None:
    """Run the checks that need only this machine; the command line runs them before slow imports.

    The nodes of a cluster are checked after the cluster is joined (`service.launch.other_nodes`).
    Raises: ConfigError if a check fails.
    """
    check_trackers(config)
    if is_local:
        check_processes(config)
        check_gpus(config)
        check_memory(config)
        # On a cluster the supervisor opens the address, on any node.
        check_metrics_address(config)


def check_with_model(
    config: Config,
    observations: Mapping[str, Observation],
    *,
    model_path: str,
    was_loaded: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    tell_template: Callable[[str], None] = _logger.warning,
) -> None:
    """Run the checks that need the model's files.

    Args: model_path: the model's directory or hub name. For `model.tiny`, a directory to which at
        least the tiny model's tokenizer has been written.
        was_loaded: whether the resumed run has loaded this model before.
        tell: called with each warning about the tasks. By default these warnings are dropped,
        because a run repeats them when it opens its tasks.
        tell_template: called with each warning about the chat template.
    Raises: ConfigError if a check fails.
    """
    check_model(config, model_path, was_loaded=was_loaded)
    check_stop_tokens(model_path)
    check_token_ids(config, Path(model_path), was_loaded=was_loaded, tell=tell_template)
    check_prompts(config, model_path, observations, tell=tell)
    for warning in template_warnings(config, model_path, observations):
        tell_template(warning)


def check_model_sources(config: Config) -> None:
    """Check that each model that the run names is a directory or an available hub name.

    Raises: ConfigError if a model is neither.
    """
    if config.model.path is not None:
        check_model_source(config.model.path, key="model.path")
    for key, path in companions(config).items():
        check_model_source(path, key=key)


def companions(config: Config) -> dict[str, str]:
    """Return the configured models other than the policy, by the setting that names each."""
    named = {
        "algorithm.reference": config.algorithm.reference,
        _CRITIC: config.algorithm.critic.model,
    }
    return {key: path for key, path in named.items() if path is not None}


def check_model_source(path: str, *, key: str) -> None:
    """Check that `path` is a model directory or an available hub name.

    Raises: ConfigError if it is not.
    """
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).exists()
    if not looks_local:
        _check_hub_name(path, key=key)
        return
    directory = Path(path).expanduser()
    if directory.is_file():
        raise ConfigError(
            f"{key}: {path} is a file; expected a directory in Hugging Face format here; for a "
            "GGUF file `rayloom check` names the directory that it is converted to"
        )
    if not directory.is_dir():
        raise ConfigError(
            f"{key}: {path} {why_missing(directory)}; expected a directory in Hugging Face format "
            "or a hub name such as Qwen/Qwen3-0.6B; build a small one with `rayloom model tiny DIR`"
        )
    missing = [
        name for name in ("config.json", "tokenizer.json") if not (directory / name).exists()
    ]
    if not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(
            f"{key}: {path} lacks {', '.join(missing)}; expected a complete model in "
            f"Hugging Face format; {remedy_of_missing(directory, missing)}"
        )


def _check_hub_name(name: str, *, key: str) -> None:
    from transformers import AutoConfig  # two seconds of import that a local path does not need

    try:
        # Without this argument transformers asks in the terminal whether to run the model's code.
        AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{key}: {name!r} is not a directory here and cannot be loaded from the hub "
            f"({first_line}); expected an existing directory or a reachable hub name"
        ) from None


def registered_parsers() -> dict[Literal["tool", "reasoning"], frozenset[str]] | None:
    """Return the names of the parsers in the installed vLLM that an engine can use, by kind.

    The names are read from vLLM's source, because importing vLLM takes eleven seconds. Return None
    if vLLM is not installed or its source has another form; the start of the engines then fails if
    a name is wrong.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    tool = _keys(package / "tool_parsers" / "__init__.py", "_TOOL_PARSERS_TO_REGISTER")
    reasoning = _keys(package / "reasoning" / "__init__.py", "_REASONING_PARSERS_TO_REGISTER")
    if not tool or not reasoning:
        return None
    return {"tool": tool - UNSUPPORTED_PARSERS, "reasoning": reasoning - UNSUPPORTED_PARSERS}


def _keys(file: Path, name: str) -> frozenset[str]:
    """Return the text keys of a dictionary in a module's source, without importing the module.

    name: the variable that has the dictionary. Without such a variable the result is empty.
    """
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
    return frozenset(
        key.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        for key in node.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )


def check_parsers(config: Config) -> None:
    """Check that the configured parsers exist in vLLM. Raises: ConfigError if not."""
    if not config.inference.names_parser or (registered := registered_parsers()) is None:
        return
    for key, name, names in (
        ("inference.tool_parser", config.inference.tool_parser, registered["tool"]),
        (
            "inference.reasoning_parser",
            config.inference.reasoning_parser,
            registered["reasoning"],
        ),
    ):
        known = sorted({AUTO, NONE, *names})
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
            raise ConfigError(
                f"{key} is {name!r}, expected {AUTO}, {NONE} or the name of one of vLLM's parsers; "
                f"{remedy}"
            )


def check_stop_tokens(model_path: str) -> None:
    """Check that the model has a token that ends an answer. Raises: ConfigError if not."""
    try:
        stop_token_ids(model_path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {error}") from error


def check_token_ids(
    config: Config,
    directory: Path,
    *,
    was_loaded: bool = False,
    tell: Callable[[str], None] = _logger.warning,
) -> None:
    """Check that the model has all tokens of its chat template, and a token that ends an answer.

    A tokenizer may have tokens that the model lacks. Gemma 3's tokenizer has one for images, and a
    user may add tokens without resizing the embedding.
    was_loaded, tell: as for `check_special_tokens`, which this function also calls.
    Raises: ConfigError if a check fails.
    """
    if (vocabulary := vocabulary_size(directory)) is None:
        return
    try:
        tokenizer = load_tokenizer(str(directory), chat_template=config.model.chat_template)
        ends = stop_ids_of(str(directory), tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {error}") from error
    if min(ends) >= vocabulary:
        raise ConfigError(
            f"model.path: {directory} has {vocabulary} tokens (vocab_size), and its answers end "
            f"with token {min(ends)}, which it can never sample; expected an end-of-sequence token "
            "below vocab_size; correct eos_token in tokenizer_config.json, or eos_token_id in "
            "generation_config.json"
        )
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    for token, number in sorted(tokenizer.get_vocab().items()):
        if number >= vocabulary and token in template:
            raise ConfigError(
                f"model.path: its chat template writes {token!r}, token {number} of the "
                f"tokenizer, and {directory} has only {vocabulary} tokens (vocab_size); expected "
                "a row of the embedding for each token of the template; resize the model's "
                "embedding (resize_token_embeddings of transformers), or set model.chat_template"
            )
    check_special_tokens(tokenizer, was_loaded=was_loaded, tell=tell)


def check_model(config: Config, model_path: str, *, was_loaded: bool) -> None:
    """Check that a local model's files are sound and that it can hold the configured context.

    Raises: ConfigError if not.
    """
    file = Path(model_path) / "config.json"
    if file.is_file():
        _check_policy(config, file, was_loaded=was_loaded)
    for key, path in companions(config).items():
        directory = Path(path).expanduser()
        check_model_files(directory, key=key)
        _check_companion(key, path, policy=file.parent)
        if not was_loaded and (directory / "config.json").is_file():
            check_architecture_once(
                directory,
                key=key,
                max_context_tokens=config.model.max_context_tokens,
                dtype=config.model.dtype,
                inference=None,
                has_head=key != _CRITIC,
            )


def _check_policy(config: Config, file: Path, *, was_loaded: bool) -> None:
    check_model_files(file.parent)
    if not was_loaded:
        check_architecture_once(
            file.parent,
            key="model.path",
            max_context_tokens=config.model.max_context_tokens,
            dtype=config.model.dtype,
            inference=config.inference,
            lora=config.trainer.lora,
        )
    longest = read_object(file).get("max_position_embeddings")
    if isinstance(longest, int) and config.model.max_context_tokens > longest:
        raise ConfigError(
            f"model.max_context_tokens is {config.model.max_context_tokens}, expected at most the "
            f"model's own {longest} positions; lower it or choose another model"
        )


def _check_companion(key: str, path: str, *, policy: Path) -> None:
    """Check that a reference or critic accepts all token ids of the policy's tokenizer."""
    vocabulary = vocabulary_size(Path(path).expanduser())
    if vocabulary is None or not (policy / "tokenizer.json").is_file():
        return
    # The policy never samples a token beyond its own vocabulary, and its prompts have none.
    try:
        num_ids = 1 + max(load_tokenizer(str(policy)).get_vocab().values())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {policy}: {error}") from error
    num_ids = min(num_ids, vocabulary_size(policy) or num_ids)
    if vocabulary < num_ids:
        raise ConfigError(
            f"{key}: {path} has a vocabulary of {vocabulary} ids, expected at least the {num_ids} "
            "of the policy's tokenizer, whose tokens it reads; choose a model of that tokenizer"
        )


def check_trackers(config: Config) -> None:
    """Check that the configured trackers can be imported. Raises: ConfigError if not."""
    trackers = config.trackers
    for setting, package, is_used in (
        ("tensorboard", "tensorboardX", trackers.tensorboard is not None),
        ("wandb", "wandb", trackers.wandb is not None),
        ("trackio", "trackio", trackers.trackio is not None),
    ):
        if not is_used:
            continue
        try:
            # find_spec would also find the folder `wandb` that wandb creates where it runs.
            distribution(package)
        except PackageNotFoundError:
            raise ConfigError(
                f"trackers.{setting} is set, but the package {package} is not installed here; "
                f"expected it in Rayloom's environment: pip install {package}"
            ) from None
    if trackers.own is not None:
        check_own_tracker(trackers.own)


def check_memory(config: Config) -> None:
    """Check that engines' caches and the queue fit into this machine's memory (CPU runs only).

    Raises: ConfigError if they do not.
    """
    if config.inference.gpus_per_replica > 0:
        return
    total_gib = psutil.virtual_memory().total / GIB
    wanted_gib = (
        config.inference.num_replicas * config.inference.kv_cache_gib + config.queue.max_mib / 1024
    )
    if wanted_gib > 0.8 * total_gib:
        raise ConfigError(
            f"the engines' caches ({config.inference.num_replicas} x "
            f"inference.kv_cache_gib {config.inference.kv_cache_gib:g}) and queue.max_mib "
            f"({config.queue.max_mib}) need {wanted_gib:.1f} GiB, expected at most 80% of this "
            f"machine's {total_gib:.1f} GiB; lower them"
        )


def check_processes(config: Config) -> None:
    """Check that a local run does not start too many ranks, engines or actors for the CPUs.

    Raises: ConfigError if one of these numbers exceeds the CPUs times MAX_PROCESSES_PER_CPU.
    """
    most = MAX_PROCESSES_PER_CPU * (os.cpu_count() or 1)
    for key, count in (
        ("trainer.num_ranks", config.trainer.num_ranks),
        ("rollouts.num_actors", config.num_environment_actors),
        ("inference.num_replicas", config.inference.num_replicas),
    ):
        if count > most:
            raise ConfigError(
                f"{key} is {count}, one process each; expected at most {most} on this machine's "
                f"{os.cpu_count()} CPUs; lower it, or join a cluster with --address"
            )


def check_gpus(config: Config) -> None:
    """Check that a local run has the configured GPUs; a cluster's GPUs are checked later.

    Raises: ConfigError if GPUs are missing.
    """
    wanted = gpus_wanted(config)
    if wanted == 0:
        return
    import torch

    found = torch.cuda.device_count()
    if wanted > found:
        raise ConfigError(
            f"the run asks for {wanted:g} GPUs ({config.inference.num_replicas} engines x "
            f"{config.inference.gpus_per_replica:g} and {config.trainer.num_ranks} ranks x "
            f"{config.trainer.gpus_per_rank:g}), found {found}; lower these settings, use a CPU "
            "configuration, or join a cluster with --address"
        )


def gpus_wanted(config: Config) -> float:
    return (
        config.inference.num_replicas * config.inference.gpus_per_replica
        + config.trainer.num_ranks * config.trainer.gpus_per_rank
    )


def check_metrics_address(config: Config) -> None:
    """Check that the metrics can be served on the configured host and port.

    The host must be an address of this machine, and a port other than 0 must be free. Raises:
    ConfigError if not.
    """
    host, port = config.metrics.host, config.metrics.port
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"metrics.host: {host!r} is not an address that can be found ({reason}); expected "
            "one of this machine's, such as 127.0.0.1, or 0.0.0.0 for all of them"
        ) from error
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            raise ConfigError(
                f"metrics.{'port' if is_taken else 'host'}: {host}:{port} cannot be opened "
                f"({error.strerror}); expected an address of this machine and a free port; set "
                "another port, or 0 for any free one"
            ) from error


KEY = "trackers.own.use"
# The arguments that every tracker's constructor gets.
_GIVEN = ("run_id", "name", "config", "directory")
# The arguments of each method, without `self`.
_CALLS: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
    "write": ((None,), {}),
    "flush": ((), {}),
    "close": ((), {"is_ended": True}),
}


def check_own_tracker(settings: OwnTrackerSettings) -> None:
    """Check that the user's class can be imported, and that it accepts the calls of a tracker.

    Raises: ConfigError if it does not.
    """
    try:
        found = find(settings.use, what=KEY)
    except BadName as error:
        raise ConfigError(str(error)) from error
    if not isinstance(found, type):
        raise ConfigError(
            f"{KEY}: {settings.use} is {type_of(found)}, expected a class with the methods write, "
            "flush and close; name the class"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ConfigError(
            f"{KEY}: {settings.use} is abstract, expected a class that defines "
            f"{missing}; define the methods, or name a subclass"
        )
    given = dict.fromkeys(_GIVEN)
    if both := sorted(given.keys() & settings.options.keys()):
        raise ConfigError(
            f"trackers.own.options: got {', '.join(both)}, which Rayloom passes itself; expected "
            "other names; rename the option"
        )
    _check_call(found, "the constructor", (), {**given, **settings.options}, use=settings.use)
    for name, (arguments, named) in _CALLS.items():
        method = _method(found, name, use=settings.use)
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise ConfigError(
                f"{KEY}: {settings.use}.{name} is async, expected a plain method, which a thread "
                "calls; remove async"
            )
        if inspect.isgeneratorfunction(method):
            raise ConfigError(
                f"{KEY}: {settings.use}.{name} is a generator, whose body would never run, "
                "expected a plain method; remove yield"
            )
        _check_call(method, name, arguments, named, use=settings.use)


def _method(kind: type, name: str, *, use: str) -> Callable[..., object]:
    """Return a method of a user's class, bound so that its signature does not show `self`.

    use: name of the class, for messages. Raises: ConfigError if there is no such method.
    """
    try:
        method = inspect.getattr_static(kind, name, None)
        if isinstance(method, singledispatchmethod):
            # Even if bound to an instance, the dispatcher itself has `self` in its signature.
            method = method.func
        if hasattr(type(method), "__get__"):
            # Bind it to any object: the signature is the same as for an instance of the class.
            method = method.__get__(object(), kind)
    except Exception as error:
        # A metaclass and a descriptor of the user's may raise anything.
        raise ConfigError(
            f"{KEY}: the method {name} of {use} cannot be read ({describe(error)}); expected a "
            "class whose methods are defined in its body; define it there"
        ) from error
    if not callable(method):
        raise ConfigError(
            f"{KEY}: {use} has no method {name}, expected write(point), flush() and "
            "close(*, is_ended); add it"
        )
    return method


def _check_call(
    called: Any,
    what: str,
    arguments: tuple[object, ...],
    named: Mapping[str, object],
    *,
    use: str,
) -> None:
    try:
        signature = inspect.signature(called)
    except Exception:  # noqa: BLE001
        # Code in C has no signature, and a metaclass of the user's may raise anything.
        return
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        shown = ", ".join([*("point" for _ in arguments), *(f"{name}=…" for name in named)])
        raise ConfigError(
            f"{KEY}: {what} of {use} takes {signature}, expected one that can be called with "
            f"({shown}): {error}; change its arguments"
        ) from None
