"""vLLM's own start in a plain process, to its first token: one side of `benchmarks.start`.

Standard input has the options of `LLM` as JSON.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Start an engine and sample one token; the calling process takes the time."""
    from vllm import LLM, SamplingParams

    engine = LLM(**json.load(sys.stdin))
    asked = {"prompt_token_ids": [1, 2, 3]}
    parameters = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    (answer,) = engine.generate([asked], parameters, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 1
    print("the first token", flush=True)


if __name__ == "__main__":
    main()
