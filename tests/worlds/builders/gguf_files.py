"""GGUF files of a tiny Llama, as llama.cpp writes them: weights, a tokenizer and a template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), "ab"]
HEADS = 4
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    )


def write_gguf(
    file: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    tokenizer: str = "gpt2",
    without: str = "",
    extra: Mapping[str, int] | None = None,
) -> Path:
    """Write a model as a GGUF file.

    without: tensors whose names contain this text are left out. extra: further integer fields.
    """
    config = model.config
    writer = GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(TOKENS.index("<|im_start|>"))
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    writer.add_chat_template(TEMPLATE)
    for name, value in (extra or {}).items():
        writer.add_uint32(name, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" or (without and without in name):
            continue
        writer.add_tensor(_name(name), _rows(name, tensor).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


def _rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Reorder the rows of a query or key projection.

    llama.cpp's rotary embedding rotates pairs of neighbouring rows; transformers pairs a row of the
    first half with one of the second.
    """
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    rows, columns = tensor.shape
    halves: Any = tensor.reshape(HEADS, 2, rows // HEADS // 2, columns)
    return torch.as_tensor(halves.swapaxes(1, 2).reshape(rows, columns))
