"""The policy's LoRA adapter in vLLM: replace it in a running engine, and apply it on CPU.

vLLM itself reads an adapter from the files that a request names. Here the weight transfer brings
the adapter's tensors, and every request names the same installed adapter (`policy_adapter`), for
which vLLM reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest

_ADAPTER_ID = 1


def policy_adapter() -> LoRARequest:
    """Return the LoRARequest with which every request to vLLM uses the installed adapter.

    If no adapter is installed, vLLM tries to read one from the LoRARequest's path, and fails.
    """
    return LoRARequest("policy", _ADAPTER_ID, "/no-adapter-is-installed")


def install_adapter(manager: LoRAModelManager, tensors: Mapping[str, Tensor]) -> None:
    """Install tensors as the LoRA adapter of an engine's worker, between two scheduler steps.

    Args: tensors: by PEFT's names, A of each adapted layer, and B multiplied by alpha / rank.
    Raises: ValueError if there are no tensors, or if vLLM's model lacks an adapted layer.
    """
    if not tensors:
        raise ValueError("inference: got a publication without an adapter, expected an adapter")
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name}
    rank = max(ranks)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        _ADAPTER_ID,
        dict(tensors),
        # The trainer has scaled B, so that alpha / rank is 1 here.
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    # vLLM would ignore a layer that it does not know.
    known = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    if missed := sorted(adapter.loras.keys() - known):
        raise ValueError(
            f"inference: vLLM has no place for the adapters of {len(missed)} of "
            f"{len(adapter.loras)} layers, such as {missed[0]}; leave them out of "
            "trainer.lora.targets, or set trainer.lora.publish_merged: true"
        )
    manager.remove_adapter(_ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(_ADAPTER_ID)


class OneAdapter(PunicaWrapperCPU):
    """The LoRA arithmetic of a vLLM engine on CPU that has one adapter.

    It replaces vLLM's own class, which copies the adapter's matrices for every token and so takes
    gigabytes for a prompt. Tokens without the adapter, as in vLLM's warm-up, keep their output.
    """

    def _apply_shrink(self, y: Tensor, x: Tensor, w_t_all: Tensor, scale: float) -> None:
        """Write scale * A x to y, [T, rank] float32. x: [T, in]. w_t_all: A as [1, 1, rank, in]."""
        is_adapted = (self.token_lora_indices >= 0)[:, None]
        shrunk = x.to(y.dtype) @ w_t_all[0, 0].to(y.dtype).T
        y[:, : shrunk.shape[1]] = torch.where(is_adapted, scale * shrunk, 0.0)

    def _apply_expand(
        self,
        y: Tensor,
        x: Tensor,
        w_t_all: Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        """Add B x to columns of y, or replace them by B x if not add_inputs.

        x: [T, rank]. w_t_all: B as [1, 1, out, rank]. y_offset: the first of y_slice_size columns.
        """
        part: Any = y[:, y_offset : y_offset + y_slice_size]
        expanded = x.to(y.dtype) @ w_t_all[0, 0].to(y.dtype).T
        if add_inputs:
            part += expanded
        else:
            part.copy_(expanded)
