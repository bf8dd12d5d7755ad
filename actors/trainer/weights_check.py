"""Check that a model's weight files hold each parameter of its configuration, in the right shape.

transformers fills missing parameters with random numbers, and ignores unexpected tensors. So a
model with too few layers in config.json would train without any error. `check_weights` reads only
the files' headers, before anything starts; `check_loaded` and `check_finite` check the loaded
model. Invariant: a refusal is a NotImplementedError that says why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils import logging

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# vLLM reads these files only in the format of Mistral's own library, and transformers never.
_CONSOLIDATED = "consolidated"
_INTEGERS = re.compile(r"(?<=\.)\d+(?=\.)")
_MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
_REMEDY = "correct config.json, or copy or download the model again"
# A head that differs from its embedding differs in almost every row.
_COMPARED_ROWS = 1024
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_weights(
    directory: Path, config: PreTrainedConfig, *, is_served: bool = True, has_head: bool = True
) -> None:
    """Compare the headers of a model's files with the parameters of its configuration.

    Args:
        is_served: Whether vLLM loads the model too. If config.json ties the head to the embedding,
            vLLM reads the embedding, and transformers reads the stored head. A served model is
            therefore refused if the two differ.
        has_head: False for a critic, of which only the body is read.
    Raises: NotImplementedError if the files do not fit the configuration, or if transformers and
        vLLM would read different files.
    """
    files = _files(directory)
    stored: dict[str, Any] = {}
    for file in files:
        stored |= load_state_dict(str(file), map_location="meta")
    model, loading = _loaded_empty(config, stored, has_head=has_head)
    check_loaded(model, loading)
    _check_types(model, stored)
    for head, embedding in model.all_tied_weights_keys.items() if is_served else ():
        if head in stored and embedding in stored and _differ(files, head, embedding):
            raise NotImplementedError(
                f"its files have other numbers for {head} than for {embedding}, and config.json "
                "has tie_word_embeddings: true, so that the engines would use the embedding; "
                "expected equal numbers; set tie_word_embeddings to false"
            )


def _loaded_empty(
    config: PreTrainedConfig, stored: dict[str, Any], *, has_head: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Let transformers match stored tensors with a configuration, by their names and shapes.

    Returns: a model without numbers, on the device meta; and transformers' report.
    """
    kind = AutoModelForCausalLM if has_head else AutoModel
    with _quietly():
        try:
            with torch.device("meta"):
                model = kind.from_config(config)
            found: tuple[PreTrainedModel, dict[str, Any]] = type(model).from_pretrained(
                None,
                config=config,
                state_dict=stored,
                dtype=torch.float32,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:
            # Each architecture's classes raise types of their own.
            reason = " ".join(str(error).split())[:200]
            raise NotImplementedError(
                f"transformers cannot make a model of its config.json ({type(error).__name__}: "
                f"{reason}); expected the settings of a causal model of text; {_REMEDY}"
            ) from error
    return found


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress transformers' progress bar and its report of the loading; our own errors suffice."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def check_loaded(model: PreTrainedModel, loading: Mapping[str, Any]) -> None:
    """Refuse a model if its files do not fit its configuration.

    Args: loading: transformers' report of the loading.
    Raises: NotImplementedError.
    """
    if mismatched := sorted(loading["mismatched_keys"], key=lambda each: each[0]):
        parameter, stored, expected = mismatched[0]
        raise NotImplementedError(
            f"{parameter} has the shape {list(stored)} in its files, expected "
            f"{list(expected)} by config.json ({_count(mismatched, 'differs', 'differ')}); "
            f"{_REMEDY}"
        )
    if missing := sorted(loading["missing_keys"]):
        raise NotImplementedError(
            f"its files lack {len(missing)} of its parameters, such as "
            f"{missing[0]}, which would be random; expected a complete checkpoint of its "
            "configuration (tie_word_embeddings: true if the output head is the embedding)"
        )
    if unused := sorted(_unused(model, loading["unexpected_keys"])):
        raise NotImplementedError(
            f"its files have {unused[0]}, for which config.json has no parameter "
            f"({_count(unused, 'such tensor', 'such tensors')}), so that the tensor would be "
            f"ignored; expected the configuration of these weights; {_REMEDY}"
        )


def check_finite(model: PreTrainedModel) -> None:
    """Refuse a model with a parameter that has NaN or an infinite number.

    Raises: NotImplementedError.
    """
    for name, parameter in model.named_parameters():
        # NaN is passed on to both results; unlike torch.isfinite, aminmax needs no copy.
        if parameter.numel() and not all(each.isfinite() for each in parameter.aminmax()):
            raise NotImplementedError(
                f"{name} has NaN or infinite numbers, expected finite ones; copy or download the "
                "model again, or choose an earlier checkpoint"
            )


def _check_types(model: PreTrainedModel, stored: Mapping[str, torch.Tensor]) -> None:
    for parameter, _ in model.named_parameters():
        if parameter in stored and (dtype := stored[parameter].dtype) not in _FLOATS:
            raise NotImplementedError(
                f"{parameter} has numbers of type "
                f"{str(dtype).removeprefix('torch.')}, expected float32, bfloat16 or float16; "
                "choose the model from which it was quantised"
            )


def _files(directory: Path) -> list[Path]:
    """Return the weight files; refuse the model if transformers and vLLM read different files."""
    found = sorted(
        file for file in directory.glob("*.safetensors") if not file.name.startswith(_CONSOLIDATED)
    )
    index, whole = directory / _INDEX, directory / _ONE_FILE
    named = set(found)
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = {directory / name for name in weight_map.values()}
    elif whole not in found:
        raise NotImplementedError(
            f"it has neither {_ONE_FILE} nor {_INDEX}, found "
            f"{', '.join(file.name for file in found[:3]) or 'no weights'}; expected one of them, "
            "because transformers reads no other file; copy or download the model again"
        )
    if whole in found and named != {whole}:
        other = sorted(file.name for file in named - {whole})[0]
        raise NotImplementedError(
            f"it has {_ONE_FILE}, which the trainer reads, and {other}, which "
            "the engines read; expected the weights once; move one of them to another directory"
        )
    return sorted(named)


def _unused(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """Return the unexpected tensors that reveal a wrong config.json, for example too few layers.

    unexpected: names of the tensors for which the configuration has no parameter.
    """
    parameters = {name for name, _ in model.named_parameters()}
    kinds = {_INTEGERS.sub("*", name) for name in parameters}
    config = model.config.get_text_config()
    num_layers = getattr(config, "num_hidden_layers", None)
    extra = max(getattr(config, name, None) or 0 for name in _MTP_LAYERS)
    beyond = {str((num_layers or 0) + layer) for layer in range(extra)}
    # A tensor reveals a wrong config.json if the model has the tensor's kind of layer or module.
    # Harmless are modules that a causal model lacks, such as the layers that predict several
    # tokens at once (MTP), and buffers of earlier versions of transformers.
    return [
        name
        for name in unexpected
        if (found := _INTEGERS.search(name)) is None or found[0] not in beyond
        if _INTEGERS.sub("*", name) in kinds
        or (found is not None and num_layers == 0)
        or (name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in parameters)
    ]


def _differ(files: Iterable[Path], first: str, second: str) -> bool:
    """Return whether the first rows of two stored matrices differ."""
    rows: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in {first, second} & set(opened.keys()):
                rows[name] = opened.get_slice(name)[:_COMPARED_ROWS]
    return not torch.equal(rows[first], rows[second])


def _count(found: list[Any], one: str, several: str) -> str:
    return f"{len(found)} {one if len(found) == 1 else several}"
