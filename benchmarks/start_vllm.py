"""vLLM's own start in a plain process, to its first token: one side of `benchmarks.start`.

Standard input has the options of `LLM` as JSON, in one line; its end ends the process.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Start an engine and sample one token; the calling process measures the time."""
    from vllm import LLM, SamplingParams

    engine = LLM(**json.loads(sys.stdin.readline()))
    asked = {"prompt_token_ids": [1, 2, 3]}
    parameters = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    (answer,) = engine.generate([asked], parameters, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 1
    print("the first token", flush=True)
    # Wait until the calling process has read the processor times.
    sys.stdin.read()


if __name__ == "__main__":
    main()
