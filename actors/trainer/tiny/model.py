"""Build a Qwen3 of one million parameters in seconds, as a policy that needs no model hub.

Invariant: the directory appears complete or not at all, and equal settings on one machine give
equal bytes. At the start the policy knows only the form of an answer, which `warmup.py` teaches.
Called by the command line, the demo, the tests and the benchmarks.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actors.trainer.tiny.built import (
    MARKER,
    WARMUP_STEPS,
    put_in_place,
    read_marker,
)
from actors.trainer.tiny.tokenizer import CHAT_TEMPLATE, MAX_POSITIONS, build_tokenizer, corpus
from actors.trainer.tiny.warmup import COUNTS, LEARNING_RATE, MALFORMED_SHARE, warm_up

_BUILD_VERSION = 2
"""Incremented when the warm-up's texts change, so that an older directory is built again."""


_SHAPE = {
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_positions": MAX_POSITIONS,
}
"""The network's sizes."""
_EMBEDDING_STD = 0.3
"""Standard deviation of the initial embeddings; more than ten times the usual value, because with
smaller embeddings the policy took twice as many steps to begin to use the hints.
"""


def build_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    tie_word_embeddings: bool = True,
    warmup_steps: int = WARMUP_STEPS,
) -> bool:
    """Write a tiny model to a Hugging Face directory, which transformers and vLLM can load.

    A tiny model with other settings that is in the directory is replaced.

    Args:
        seed: The seed of the initial weights and of the conversations for the warm-up.
        warmup_steps: The number of training steps; 0 keeps the random weights.
    Returns: True if the directory already had a model with these settings, and was left unchanged.
    Raises: FileExistsError if the directory holds anything but a tiny model.
    """
    if warmup_steps < 0:
        raise ValueError(f"tiny model: got warmup_steps={warmup_steps}; expected 0 or more")
    settings = {
        "build_version": _BUILD_VERSION,
        "seed": seed,
        "tie_word_embeddings": tie_word_embeddings,
        "shape": {**_SHAPE, "embedding_std": _EMBEDDING_STD},
        "warmup": {
            "steps": warmup_steps,
            "learning_rate": LEARNING_RATE,
            **COUNTS,
            "malformed_share": MALFORMED_SHARE,
        },
        "texts": hashlib.sha256("\n".join([CHAT_TEMPLATE, *corpus()]).encode()).hexdigest(),
    }
    found = read_marker(directory)
    if found is not None and found["settings"] == settings:
        return True
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{directory.name}.", dir=directory.parent
    ) as scratch_name:
        scratch = Path(scratch_name)
        made = scratch / "new"
        # A separate random state, so that building does not change the caller's random numbers.
        with torch.random.fork_rng(devices=[]), _one_thread():
            torch.manual_seed(seed)
            report = _write_model(
                made,
                warmup_steps,
                seed=seed,
                tie_word_embeddings=tie_word_embeddings,
            )
        marker = {"settings": settings, "report": report}
        (made / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        put_in_place(made, directory, scratch=scratch)
    return False


def tiny_config(
    tokenizer: PreTrainedTokenizerFast, *, tie_word_embeddings: bool = True
) -> Qwen3Config:
    """Return the settings of the model's architecture."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=_SHAPE["hidden_size"],
        intermediate_size=_SHAPE["intermediate_size"],
        num_hidden_layers=_SHAPE["num_layers"],
        num_attention_heads=_SHAPE["num_heads"],
        num_key_value_heads=_SHAPE["num_kv_heads"],
        head_dim=_SHAPE["head_dim"],
        max_position_embeddings=_SHAPE["max_positions"],
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _write_model(
    directory: Path,
    warmup_steps: int,
    *,
    seed: int,
    tie_word_embeddings: bool,
) -> dict[str, Any]:
    """Create, warm up and save the model; return its size and its losses, as a report."""
    tokenizer = build_tokenizer()
    config = tiny_config(tokenizer, tie_word_embeddings=tie_word_embeddings)
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=_EMBEDDING_STD)
    losses = warm_up(model, tokenizer, steps=warmup_steps, seed=seed)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    for weights in directory.glob("*.safetensors"):
        # The file is readable only by its owner, but an engine may run as another user.
        weights.chmod(0o644)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocab_size": len(tokenizer),
        "warmup_steps": warmup_steps,
        # Nats per token; None without a warm-up.
        "first_loss": _mean(losses[:5]),
        "last_loss": _mean(losses[-5:]),
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread, because more threads do not speed up small matrices."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _mean(values: tuple[float, ...]) -> float | None:
    return sum(values) / len(values) if values else None
