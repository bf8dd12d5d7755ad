"""Check that packing several samples into one row does not change a model's results.

`check_architecture` takes seconds, and runs before anything starts. It makes a copy of the model
with few narrow layers, short windows and random weights. The copy's results for packed rows longer
than its windows must equal those of transformers' own attention on separate rows. `check_packing`
and `check_output_head` check the loaded model. A refusal is a NotImplementedError that says why.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from actors.trainer.attention.forest import PackedLayout, build_layout
from actors.trainer.attention.interface import register_packed_attention
from actors.trainer.rope import fix_rope, longrope_table

# Packed and separate rows of one model add numbers in different orders. The tolerance only decides
# whether a model is refused; training does not depend on it.
_HEAD_TOLERANCE = 1e-4
# Relative to the largest hidden state. Measured in float32: at most 7e-6 over 28 layers of random
# weights; layers that mix tokens outside of attention give 1e-1, and 2e-4 with weights near 0.
_PACKING_TOLERANCE = 1e-4
# If a router is near a tie, rounding may route a token to other experts. A second and a third row
# do not meet the same tie, while a model that mixes samples does so in every row.
_PACKING_ATTEMPTS = 3
# Sizes of the narrow copy. Its windows, and the length at which its RoPE switches, are shorter than
# its rows.
_SHORT_SEGMENTS, _LONG_SEGMENTS = (6, 5, 7), (9, 11, 13)
_COPY_WINDOW, _COPY_SWITCH, _COPY_CONTEXT = 5, 12, 64
_COPY_VOCABULARY, _COPY_WIDTH, _COPY_HEADS, _MAX_COPY_LAYERS = 256, 64, 4, 12
# The weights must not be near 0: a convolution, or a head's cap, would then change almost nothing.
_COPY_WEIGHTS = 0.2
_WINDOWS = ("sliding_window", "attention_chunk_size", "sliding_window_size", "window_size")
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
# Configurations that were checked in this process, with their contexts.
_PASSED: set[tuple[str, int]] = set()


def hidden_states(
    body: nn.Module,
    token_ids: Tensor,
    position_ids: Tensor,
    layout: PackedLayout,
    **extra: Any,
) -> Tensor:
    """Run one packed row through a model's body; return the last hidden states, [T, D]."""
    output = body(
        input_ids=token_ids[None],
        position_ids=position_ids[None],
        use_cache=False,
        packed_layout=layout,
        **extra,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def check_architecture(config: PreTrainedConfig, *, max_context_tokens: int | None = None) -> None:
    """Refuse an architecture whose results in a packed row differ from transformers' own results.

    The function reads no weights: it runs a small copy of the model with random weights. If such a
    copy cannot be made or run, the architecture is not refused here, because the loaded model is
    checked later.

    Args: max_context_tokens: the run's longest context; None for the longest that config allows.
    Raises: NotImplementedError.
    """
    if config.get_text_config() is not config:
        raise NotImplementedError(
            f"trainer: {type(config).__name__} ({config.model_type}) is for a model of text and "
            "images or sound, expected a causal model of only text; choose one, or export the "
            "text part as a separate model"
        )
    if getattr(config, "kv_lora_rank", None):
        raise NotImplementedError(
            f"trainer: {config.model_type} has multi-head latent attention (kv_lora_rank is "
            f"{config.kv_lora_rank}), whose keys and values have heads of two sizes; expected "
            "heads of one size; choose another architecture"
        )
    # Qwen2-MoE's configuration sets an unused window to 0.
    for name in _WINDOWS if getattr(config, "use_sliding_window", True) else ():
        if getattr(config, name, None) == 0:
            raise NotImplementedError(
                f"trainer: {name} is 0 in config.json, a window in which no token sees another; "
                "expected a number of tokens, or null for no window"
            )
    longest = max_context_tokens or longest_context(config)
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        longrope_table(config, None, max_context_tokens=longest)
    # Policy, reference and critic often share an architecture.
    asked = (config.to_json_string(), longest)
    if asked not in _PASSED:
        _check_narrow_copy(config, max_context_tokens=longest)
        _PASSED.add(asked)


def _check_narrow_copy(config: PreTrainedConfig, *, max_context_tokens: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            narrow, context = _narrow(config, max_context_tokens=max_context_tokens)
            plain = AutoModelForCausalLM.from_config(
                narrow, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        except Exception:  # noqa: BLE001  # settings check themselves, in types of their own
            return
        fix_rope(plain, max_context_tokens=context)
        _check_copy(plain, max_context_tokens=context)


@torch.no_grad()
def _check_copy(plain: PreTrainedModel, *, max_context_tokens: int) -> None:
    start, first, _ = _segments(plain, _LONG_SEGMENTS, seed=0)
    try:
        plain(input_ids=torch.cat([start, first])[None], use_cache=False)
    except Exception:  # noqa: BLE001  # too narrow for it, or not for the CPU
        return
    with refusing(type(plain).__name__):
        packed = AutoModelForCausalLM.from_config(
            copy.deepcopy(plain.config),
            dtype=torch.float32,
            attn_implementation=register_packed_attention(),
        ).eval()
        packed.load_state_dict(plain.state_dict())
        fix_rope(packed, max_context_tokens=max_context_tokens)
        check_output_head(packed)
        check_packing(packed.base_model, lengths=_LONG_SEGMENTS, reference=plain.base_model)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turn the errors that a model raises with packed attention into NotImplementedError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _refused(name, error) from error
    except RuntimeError as error:
        if isinstance(error, NotImplementedError | torch.OutOfMemoryError):
            raise
        raise _refused(name, error) from error


def _refused(name: str, error: Exception) -> NotImplementedError:
    first_line = (str(error).strip().splitlines() or [""])[0][:200]
    return NotImplementedError(
        f"trainer: {name} does not run with packed attention ({type(error).__name__}: "
        f"{first_line}), expected an architecture whose layers call transformers' attention "
        "interface, with heads of one size; choose another architecture"
    )


def longest_context(config: PreTrainedConfig) -> int:
    """Return the longest context in tokens that a model's configuration allows.

    If the configuration does not say it, return _COPY_CONTEXT.
    """
    return int(getattr(config, "max_position_embeddings", None) or _COPY_CONTEXT)


def _narrow(config: PreTrainedConfig, *, max_context_tokens: int) -> tuple[PreTrainedConfig, int]:
    """Return a copy of a configuration with few, narrow layers, and the copy's longest context."""
    narrow = copy.deepcopy(config)
    settings: dict[str, Any] = {}

    def shrink(name: str, most: int) -> None:
        if isinstance(value := getattr(config, name, None), int) and value > most:
            settings[name] = most

    shrink("vocab_size", _COPY_VOCABULARY)
    shrink("vocab_size_per_layer_input", _COPY_VOCABULARY)
    for name in _WIDTHS:
        shrink(name, _COPY_WIDTH)
    # A window of at least max_context_tokens is not shortened, because the run never exceeds it.
    for name in _WINDOWS:
        if isinstance(window := getattr(config, name, None), int) and window < max_context_tokens:
            shrink(name, _COPY_WINDOW)
    settings |= _narrow_heads(config) | _few_layers(config)
    settings |= {
        name: 0 if name == "pad_token_id" else None
        for name in _SPECIAL_TOKENS
        if getattr(config, name, None) is not None
    }
    if hasattr(config, "initializer_range"):
        settings["initializer_range"] = _COPY_WEIGHTS
    for name, value in settings.items():
        setattr(narrow, name, value)
    return narrow, _early_switch(narrow, max_context_tokens=max_context_tokens)


def _narrow_heads(config: PreTrainedConfig) -> dict[str, int]:
    """Return settings for few attention heads of unchanged size and query to key-value ratio."""
    heads, kv_heads = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    width = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(width, int) or heads <= _COPY_HEADS:
        return {}
    size = getattr(config, "head_dim", None) or width // heads
    found = {"num_attention_heads": _COPY_HEADS, "hidden_size": _COPY_HEADS * size}
    if isinstance(kv_heads, int):
        found["num_key_value_heads"] = max(1, _COPY_HEADS * kv_heads // heads)
    return found


def _few_layers(config: PreTrainedConfig) -> dict[str, Any]:
    """Return settings for the fewest layers that include each kind of layer."""
    num_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(num_layers, int):
        return {}
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == num_layers
    }
    kept = 2
    while kept < num_layers and any(
        len({repr(each) for each in value[:kept]}) < len({repr(each) for each in value})
        for value in lists.values()
    ):
        kept += 1
    if kept > _MAX_COPY_LAYERS or kept >= num_layers:
        return {}
    return {"num_hidden_layers": kept, **{name: value[:kept] for name, value in lists.items()}}


def _early_switch(narrow: PreTrainedConfig, *, max_context_tokens: int) -> int:
    """Shorten a model copy's longrope limit, so that the check's short rows use the long factors.

    Returns: the longest context of the copy.
    """
    parameters = getattr(narrow, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings")
    if parameters.get("rope_type") != "longrope" or not isinstance(original, int):
        return max_context_tokens
    # The model uses the long factors only in rows longer than this limit.
    if max_context_tokens <= original:
        return max_context_tokens
    # Keep the quotient of the two lengths. It determines the scale of cosines and sines, which
    # `longrope_table` has compared with the engine's.
    longest = narrow.max_position_embeddings * _COPY_SWITCH // original
    kept = {
        name: value
        for name, value in parameters.items()
        if name not in ("factor", "attention_factor")
    }
    narrow.rope_parameters = {**kept, "original_max_position_embeddings": _COPY_SWITCH}
    narrow.max_position_embeddings = max(longest, _COPY_SWITCH + 1)
    if hasattr(narrow, "original_max_position_embeddings"):
        narrow.original_max_position_embeddings = _COPY_SWITCH
    return _COPY_CONTEXT


@torch.no_grad()
def check_output_head(causal_lm: PreTrainedModel) -> None:
    """Refuse a model that scales, caps or shifts its logits after the projection."""
    token_ids = torch.arange(4) % causal_lm.config.get_text_config().vocab_size
    layout = build_layout([4], device="cpu")
    logits = causal_lm(input_ids=token_ids[None], use_cache=False, packed_layout=layout).logits[0]
    head = causal_lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise NotImplementedError(
            f"trainer: the output head of {type(causal_lm).__name__} has type "
            f"{type(head).__name__}, expected a linear projection; choose another architecture"
        )
    projected = head(hidden_states(causal_lm.base_model, token_ids, torch.arange(4), layout))
    if not torch.allclose(logits, projected, atol=_HEAD_TOLERANCE, rtol=_HEAD_TOLERANCE):
        difference = float((logits - projected).abs().max())
        raise NotImplementedError(
            f"trainer: {type(causal_lm).__name__} changes its logits after the output projection "
            f"(by {difference:.3g}), expected a plain projection; choose another architecture"
        )


@torch.no_grad()
def check_packing(
    body: PreTrainedModel,
    *,
    lengths: tuple[int, int, int] = _SHORT_SEGMENTS,
    reference: PreTrainedModel | None = None,
) -> None:
    """Refuse a model in which the samples of a packed row see each other.

    Two random samples with a common start are run in one packed row and in separate rows. Layers
    that mix tokens outside the attention interface (convolutions, state-space models, linear
    attention) do not know where a sample ends. Every rank runs the same check before it shards.

    Args:
        lengths: Tokens in the common start, in the rest of the first sample and in the rest of the
            second sample.
        reference: The same model with transformers' own attention, which runs the separate rows.
            If None, `body` runs the separate rows.
    Raises: NotImplementedError if hidden states differ by more than rounding.
    """
    body.eval()
    difference = 0.0
    for attempt in range(_PACKING_ATTEMPTS):
        start, first, second = _segments(body, lengths, seed=attempt)
        packed = _run(body, [start, first, second], parents=[-1, 0, 0])
        one, other = (
            _run(body, [sample], parents=[-1]) if reference is None else _alone(reference, sample)
            for sample in (torch.cat([start, first]), torch.cat([start, second]))
        )
        alone = torch.cat([one, other[len(start) :]])
        difference = float((packed - alone).abs().max() / alone.abs().max())
        if difference <= _PACKING_TOLERANCE:
            return
    raise NotImplementedError(
        f"trainer: {type(body).__name__} gives tokens of a packed row other hidden states than "
        f"a row of only their sample (by {difference:.2g} of the largest, expected at most "
        f"{_PACKING_TOLERANCE:g}), because its layers mix tokens outside of transformers' "
        "attention interface, or its attention has a window, a chunk or sinks that the interface "
        "does not get; choose an architecture that mixes tokens only in attention"
    )


def _segments(model: PreTrainedModel, lengths: tuple[int, ...], *, seed: int) -> list[Tensor]:
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def _run(body: nn.Module, segments: list[Tensor], *, parents: list[int]) -> Tensor:
    layout = build_layout([len(segment) for segment in segments], parents, device="cpu")
    positions = torch.from_numpy(layout.segments.token_positions())
    return hidden_states(body, torch.cat(segments), positions, layout)


def _alone(body: nn.Module, token_ids: Tensor) -> Tensor:
    """Return the hidden states of a single sample, with transformers' own attention and masks."""
    hidden: Tensor = body(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]
    return hidden
