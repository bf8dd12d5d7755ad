"""One vLLM engine, which samples token ids with their log-probabilities and policy versions.

Invariants: Nothing is sampled before a policy version is loaded. Requests in flight survive an
update, and their replies name the version of each token. New requests wait while a version is
loaded. Trajectories share cached prompts only if they began with the same version. The module does
not use Ray.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from actors.batch import Float32s
from actors.environment.policy import (
    GenerateReply,
    GenerateRequest,
    PolicyDeadlineExceeded,
    PolicyUnavailable,
)
from actors.environment.settings import KeptTokens
from actors.expert_records import routed_layers, sampled_experts
from actors.trainer.lora import target_names
from actors.types import FinishReason, VersionSpan
from actors.weights.board import Publication, Seat, StartStages, check_tokens
from actors.weights.buffers import Bytes
from actors.weights.collective import STALL_S, read_progress
from actors.weights.logprob_check import CheckSample, CheckText, EngineScores
from service.inference.lora import policy_adapter
from service.inference.parsing import ReplyParser, load_parser
from service.inference.plugin import OWNER_PID_VARIABLE, check_installed, register
from service.inference.settings import ADAPTER_RANKS, EngineSettings
from service.inference.weight_transfer import StagedBuffer

# Time limit of a check in seconds: enough for a text that fills the context of a model on CPU.
CHECK_DEADLINE_S = 300.0
FOLLOW_EVERY_S = 0.02
# Longer replies are parsed in a thread: at this length vLLM's slower parsers take milliseconds.
MAX_TOKENS_PARSED_INLINE = 512
_KEEP_TURNS: dict[str, Any] = {"mode": "keep", "clear_cache": False}
DIRECTORY_VARIABLES = ("VLLM_RPC_BASE_PATH", "TMPDIR")


class BroadcastFailed(Exception):
    """A weight broadcast failed before the engine received all weight groups; none was loaded."""


class PolicyEngine:
    """The owner of one vLLM engine (`AsyncLLM`); call all methods in one event loop."""

    def __init__(self, settings: EngineSettings, directory: Path) -> None:
        """Store the settings, and start nothing.

        directory: directory of this engine's own sockets and files; `shutdown` removes it.
        """
        self.settings = settings
        self._directory = directory
        self.term: int | None = None
        self.version: int | None = None
        self._llm: AsyncLLM | None = None
        self._vocabulary_size = 0
        self._admission = asyncio.Event()
        self.is_held = False
        """Whether turns are held: turns in flight are frozen, and no others begin."""
        self._update_lock = asyncio.Lock()
        self._routed_layers: tuple[int, ...] = ()
        self._parser: asyncio.Task[ReplyParser] | None = None
        self._broken: str | None = None
        self._request_ids = itertools.count()
        self._adapter_of_requests = None if settings.lora is None else policy_adapter()

    async def start(self) -> StartStages:
        """Start the engine with the weights in the model's directory; return each stage's duration.

        Raises: ValueError if a parser that the settings name cannot be used.
        """
        began = time.time()
        check_installed()
        register()
        os.environ.update(self.settings.environment)
        os.environ[OWNER_PID_VARIABLE] = str(os.getpid())
        # By default vLLM's processes create files in the machine's temporary directory.
        os.environ.update(dict.fromkeys(DIRECTORY_VARIABLES, str(self._directory)))
        if self.settings.inference.names_parser:
            await self._loaded_parser()
        self._routed_layers = _recorded_layers(self.settings)
        self._llm = AsyncLLM.from_engine_args(
            _engine_args(self.settings, records_experts=bool(self._routed_layers))
        )
        self._vocabulary_size = self._llm.model_config.get_vocab_size()
        # Exclude the million objects of imported libraries from garbage collections.
        gc.collect()
        gc.freeze()
        return _stages(began, time.time(), await self._llm.collective_rpc("start_marks"))

    def shutdown(self) -> None:
        """End the engine process; requests in flight fail."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            llm.shutdown()
        self.remove_files()

    def remove_files(self) -> None:
        """Remove the engine's directory; the engine must be dead or end with this process."""
        shutil.rmtree(self._directory, ignore_errors=True)

    async def check_health(self) -> None:
        """Raise PolicyUnavailable if the engine is dead or partly loaded after a failed update."""
        try:
            await self._engine.check_health()
        except EngineDeadError as error:
            raise PolicyUnavailable("inference: the engine process is dead") from error

    @property
    def num_workers(self) -> int:
        return self.settings.inference.tensor_parallel_size

    # Sampling

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample one turn, and return the reply.

        Raises: ValueError if the request can never be served; PolicyDeadlineExceeded if the
            request had to be aborted at its deadline; PolicyUnavailable if the engine is dead.
        """
        self._check(request)
        try:
            async with asyncio.timeout(request.deadline_s):
                # Load the parser before sampling, so that a failure does not cost a turn.
                parser = None if request.tools is None else await self._loaded_parser()
                await self._admission.wait()
                salt = request.cache_salt or f"{self.term}:{self.version}"
                output = await self._sample(
                    request.prompt_token_ids.tolist(),
                    _sampling_params(self.settings, request),
                    salt=request.salted(salt),
                )
        except TimeoutError as error:
            raise PolicyDeadlineExceeded(
                f"inference: no answer within {request.deadline_s:.3g} s; the request was aborted"
            ) from error
        reply = _reply(output, salt=salt, routed=self._routed_layers)
        return reply if parser is None else await _with_parts(reply, request, parser)

    async def _loaded_parser(self) -> ReplyParser:
        if self._parser is None:
            self._parser = asyncio.create_task(asyncio.to_thread(load_parser, self.settings))
        # The cancellation of one request must not cancel the loading for others.
        return await asyncio.shield(self._parser)

    async def check_logprobs(self, text: CheckText | None = None) -> EngineScores | None:
        """Return the log-probabilities of a text, and sampled continuations of the text.

        Args: text: the text to check; None uses the tokens of `weights.board.check_tokens`.
        Returns: the scores; None if there was no answer in time.
        Raises: PolicyUnavailable if the engine is dead.
        """
        text = text or CheckText(token_ids=check_tokens(self._vocabulary_size))
        prompt = text.token_ids.tolist()
        salt = f"check:{self.term}:{self.version}:{next(self._request_ids)}"
        began = time.monotonic()
        try:
            async with self._running(), asyncio.timeout(CHECK_DEADLINE_S):
                output = await self._sample(prompt, _scoring_params(), salt=salt)
                continued = await asyncio.gather(
                    *(
                        self._sample(prompt, _continuing_params(text, temperature), salt=salt)
                        for temperature in text.temperatures
                    )
                )
        except TimeoutError:
            return None
        scores = output.prompt_logprobs
        assert isinstance(scores, FlatLogprobs)
        # The first token has no score, because no token precedes it.
        logprobs = np.asarray(scores.logprobs, dtype=np.float32)
        return EngineScores(
            logprobs=logprobs[text.first_scored - 1 :],
            samples=tuple(
                CheckSample(
                    temperature=temperature,
                    token_ids=np.asarray(each.outputs[0].token_ids, dtype=np.int32),
                    logprobs=_sampled_logprobs(each),
                )
                for temperature, each in zip(text.temperatures, continued, strict=True)
            ),
            seconds=time.monotonic() - began,
        )

    async def _sample(
        self, prompt: list[int], params: SamplingParams, *, salt: str
    ) -> RequestOutput:
        output: RequestOutput | None = None
        request_id = str(next(self._request_ids))
        # Convert the prompt as vLLM's renderer does; vLLM would do it in a thread.
        rendered = tokens_input(prompt, cache_salt=salt)
        stream = self._engine.generate(
            rendered, params, request_id, lora_request=self._adapter_of_requests
        )
        try:
            async for part in stream:
                output = part
        except (EngineDeadError, EngineGenerateError) as error:
            raise PolicyUnavailable("inference: the engine died while sampling") from error
        # Our own deadline raises an error; an aborted output means that the engine shuts down.
        if output is None or output.outputs[0].finish_reason == FinishReason.ABORT:
            raise PolicyUnavailable("inference: the engine aborted the request; it shuts down")
        return output

    def _check(self, request: GenerateRequest) -> None:
        num_prompt_tokens = int(request.prompt_token_ids.shape[0])
        limit = self.settings.max_context_tokens
        if num_prompt_tokens == 0:
            raise ValueError("inference: the prompt is empty; expected at least 1 token")
        if num_prompt_tokens >= limit:
            raise ValueError(
                f"inference: the prompt has {num_prompt_tokens} tokens, expected at most "
                f"{limit - 1} (max_model_len {limit}); end the trajectory as truncated by context"
            )
        if request.stop and not self.settings.reads_text:
            raise ValueError(
                "inference: the engine was started without a tokenizer and got stop strings; set "
                "them in the configuration before the engine starts"
            )
        if request.max_tokens < 1:
            raise ValueError(f"inference: max_tokens is {request.max_tokens}, expected at least 1")
        lowest, highest = request.prompt_token_ids.min(), request.prompt_token_ids.max()
        if lowest < 0 or highest >= self._vocabulary_size:
            raise ValueError(
                f"inference: got token ids from {lowest} to {highest}, expected 0 to "
                f"{self._vocabulary_size - 1}; leave the text of that token out of the prompt, or "
                "use the model's own tokenizer"
            )

    # Weights

    async def apply(
        self, publication: Publication, buffers: Sequence[Bytes], *, on_progress: Callable[[], None]
    ) -> None:
        """Load a published version into the engine between two steps of vLLM's scheduler.

        Args: buffers: the bytes of the publication's groups, in the same order, on this machine.
        on_progress: called after each group is loaded.
        Raises: PolicyUnavailable if loading fails: the engine is then partly loaded and must end.
        """
        staged = await asyncio.to_thread(lambda: [StagedBuffer(buffer) for buffer in buffers])
        payloads = [
            {"path": buffer.path, "checksum": group.checksum, "manifest": asdict(group.manifest)}
            for buffer, group in zip(staged, publication.groups, strict=True)
        ]
        try:
            await self._load(publication, payloads, on_progress)
        finally:
            for buffer in staged:
                buffer.close()

    async def apply_broadcast(
        self,
        publication: Publication,
        seat: Seat,
        *,
        address: str,
        on_progress: Callable[[], None],
    ) -> None:
        """Receive a version in a broadcast, while sampling continues; then load it like `apply`.

        Args: seat: this engine's place in the broadcast. address: this node's address for the
        other members of the broadcast.
        Raises: BroadcastFailed, with the engine unchanged; PolicyUnavailable as in `apply`.
        """
        progress = self._directory / seat.name
        workers = [Path(f"{progress}.{number}") for number in range(self.num_workers)]
        request = WeightTransferInitRequest(
            init_info={
                "seat": asdict(seat),
                "address": address,
                "progress": str(progress),
                "manifests": [asdict(group.manifest) for group in publication.groups],
                "checksums": [group.checksum for group in publication.groups],
            }
        )
        num_groups = len(publication.groups)
        try:
            await self._unless_dead(self._engine.init_weight_transfer_engine(request))
            await _follow(workers, num_groups=num_groups, on_progress=on_progress)
        finally:
            for path in workers:
                path.unlink(missing_ok=True)
        await self._load(publication, [{"index": i} for i in range(num_groups)], on_progress)

    async def _load(
        self,
        publication: Publication,
        payloads: Sequence[dict[str, Any]],
        on_progress: Callable[[], None],
    ) -> None:
        async def replace_weights() -> None:
            if not self.is_held:
                await self._engine.pause_generation(**_KEEP_TURNS)
            await self._engine.start_weight_update()
            for payload in payloads:
                await self._engine.update_weights(WeightTransferUpdateRequest(update_info=payload))
                on_progress()
            await self._engine.finish_weight_update(str(publication.version))
            if self.settings.lora is not None:
                await self._engine.collective_rpc("install_adapter")
            if self.settings.resets_prefix_cache:
                await self._engine.reset_prefix_cache()
            self.term, self.version = publication.term, publication.version
            if not self.is_held:
                await self._engine.resume_generation()

        async with self._update_lock, self._failure_ends_engine("the engine's loading of weights"):
            self._admission.clear()
            await self._unless_dead(replace_weights())
            if not self.is_held:
                self._admission.set()

    async def hold(self, is_held: bool) -> None:
        """Pause all turns if `is_held`, otherwise resume them. A paused engine begins no turns.

        Turns keep their cache and their deadlines. Raises: PolicyUnavailable if the engine is dead.
        """
        async with self._update_lock, self._failure_ends_engine("the engine's pause or resume"):
            if is_held == self.is_held:
                return
            if is_held:
                self._admission.clear()
                await self._unless_dead(self._engine.pause_generation(**_KEEP_TURNS))
            else:
                await self._unless_dead(self._engine.resume_generation())
                self._admission.set()
            self.is_held = is_held

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Run vLLM's scheduler during the `with` block, even if turns are held (`hold`)."""
        async with self._update_lock:
            if not self.is_held:
                yield
                return
            await self._unless_dead(self._engine.resume_generation())
            try:
                yield
            finally:
                # If the engine is dead, the block has raised the error to report.
                with suppress(EngineDeadError):
                    await self._unless_dead(self._engine.pause_generation(**_KEEP_TURNS))

    async def _unless_dead(self, call: Coroutine[Any, Any, None]) -> None:
        """Await a call to the engine process, but raise EngineDeadError if the process dies."""
        # vLLM's client itself waits without a bound for the answer of a process that was killed.
        calling = asyncio.create_task(call)
        try:
            while not (await asyncio.wait({calling}, timeout=FOLLOW_EVERY_S))[0]:
                if self._llm is None or self._llm.errored:
                    raise EngineDeadError()
            calling.result()
        finally:
            calling.cancel()

    @asynccontextmanager
    async def _failure_ends_engine(self, what: str) -> AsyncIterator[None]:
        try:
            yield
        except Exception as error:
            # vLLM's client raises a plain Exception with the worker's text for any error in a
            # worker, and each such error leaves the engine partly loaded.
            self._broken = f"{what} failed, so it was ended: {type(error).__name__}: {error}"
            # Wake the requests that wait for admission: they fail now, the others with the engine.
            self._admission.set()
            with suppress(EngineDeadError):
                await asyncio.to_thread(self.shutdown)
            raise PolicyUnavailable(f"inference: {self._broken}") from error

    @property
    def _engine(self) -> AsyncLLM:
        if self._broken is not None:
            raise PolicyUnavailable(f"inference: {self._broken}")
        if self._llm is None:
            raise PolicyUnavailable("inference: the engine is not running")
        return self._llm


def _recorded_layers(settings: EngineSettings) -> tuple[int, ...]:
    """Return the numbers of the layers whose routed experts are recorded; none on CPU."""
    # Only vLLM's model runner V2 returns routed experts, and it needs Triton.
    if settings.inference.is_on_cpu:
        return ()
    return routed_layers(AutoConfig.from_pretrained(settings.model).get_text_config())


def engine_options(settings: EngineSettings) -> dict[str, Any]:
    """Return the options for vLLM that depend on the settings; `_engine_args` adds the others."""
    inference = settings.inference
    return {
        "model": settings.model,
        # Prompts and replies are token ids: the engine needs a tokenizer only for stop strings and
        # structured outputs. It never needs default sampling parameters.
        "skip_tokenizer_init": not settings.reads_text,
        "generation_config": "vllm",
        "dtype": settings.dtype.value,
        "max_model_len": settings.max_context_tokens,
        "max_num_seqs": inference.max_num_seqs,
        "kv_cache_memory_bytes": inference.kv_cache_bytes,
        "gpu_memory_utilization": inference.gpu_memory_fraction,
        "tensor_parallel_size": inference.tensor_parallel_size,
        "enforce_eager": inference.enforce_eager,
        "block_size": inference.block_size,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "seed": settings.seed,
        **_adapter_options(settings),
        **inference.engine_args,
    }


def _adapter_options(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's options for the policy's LoRA adapter."""
    if settings.lora is None:
        return {}
    config = AutoConfig.from_pretrained(settings.model)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(each for each in ADAPTER_RANKS if each >= settings.lora.rank),
        # With LoRA on the output head, vLLM could not score a prompt while other requests run.
        "lora_target_modules": target_names(config, settings.lora),
    }


def _engine_args(settings: EngineSettings, *, records_experts: bool) -> AsyncEngineArgs:
    backend = settings.inference.weight_backend
    return AsyncEngineArgs(
        **engine_options(settings),
        enable_return_routed_experts=records_experts,
        weight_transfer_config=WeightTransferConfig(backend=backend),
        worker_extension_cls="service.inference.weight_transfer.WorkerExtension",
        # The replica pushes some of vLLM's metrics.
        disable_log_stats=False,
        enable_log_requests=False,
    )


def _stages(
    began: float, ended: float, workers: Sequence[tuple[float, float, float]]
) -> StartStages:
    """Return the duration of each stage of an engine's start; leave out stages that took no time.

    began, ended: seconds since 1970. workers: each worker's `start_marks`; the slowest counts.
    """
    imported, loaded, compile_s = (max(marks) for marks in zip(*workers, strict=True))
    stages = (
        ("engine: process", imported - began),
        ("engine: loading the model", loaded - imported),
        ("engine: compiling", compile_s),
        ("engine: warm-up", ended - loaded - compile_s),
    )
    return tuple((name, seconds) for name, seconds in stages if seconds > 0)


def _sampling_params(settings: EngineSettings, request: GenerateRequest) -> SamplingParams:
    kept = request.kept or KeptTokens()
    structured = kept.structured_outputs
    return SamplingParams(
        temperature=request.temperature,
        top_p=kept.top_p,
        top_k=kept.top_k,
        min_p=kept.min_p,
        structured_outputs=StructuredOutputsParams(**structured.given) if structured else None,
        max_tokens=request.max_tokens,
        # vLLM searches the decoded text for these, and returns all sampled ids up to and including
        # the token that completes the stop string.
        stop=list(request.stop),
        stop_token_ids=list(settings.stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        # Leave out the experts of the prompt's tokens, which a turn does not keep.
        routed_experts_prompt_start=int(request.prompt_token_ids.shape[0]),
        detokenize=bool(request.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # vLLM need not copy the parameters, because they belong only to this request.
        skip_clone=True,
    )


async def _follow(
    paths: Sequence[Path], *, num_groups: int, on_progress: Callable[[], None]
) -> None:
    """Wait until all workers have received all weight groups. Raises: BroadcastFailed.

    paths: the files in which the workers report their progress.
    """
    num_received, heard_at = 0, time.monotonic()
    while True:
        states = [read_progress(path) for path in paths]
        if reasons := [reason for _, reason in states if reason is not None]:
            raise BroadcastFailed(reasons[0])
        slowest = min(number for number, _ in states)
        if slowest == num_groups:
            return
        if (total := sum(number for number, _ in states)) > num_received:
            num_received, heard_at = total, time.monotonic()
            on_progress()
        # Workers abort a stalled broadcast themselves; this is for a worker that is frozen.
        if time.monotonic() - heard_at > 3 * STALL_S:
            what = f"{slowest} of {num_groups} weight groups, and none for {3 * STALL_S:g} s"
            raise BroadcastFailed(f"a worker has {what}; it may be frozen: see the engine's log")
        await asyncio.sleep(FOLLOW_EVERY_S)


async def _with_parts(
    reply: GenerateReply, request: GenerateRequest, parser: ReplyParser
) -> GenerateReply:
    assert request.tools is not None
    arguments = (request.prompt_token_ids, reply.token_ids, request.tools)
    if reply.token_ids.shape[0] <= MAX_TOKENS_PARSED_INLINE:
        return replace(reply, parsed=parser.parse(*arguments))
    return replace(reply, parsed=await asyncio.to_thread(parser.parse, *arguments))


def _scoring_params() -> SamplingParams:
    """Return parameters with which vLLM scores the prompt; the one token sampled is not used."""
    return SamplingParams(
        temperature=1.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _continuing_params(text: CheckText, temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        max_tokens=text.num_sampled,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _sampled_logprobs(output: RequestOutput) -> Float32s:
    logprobs = output.outputs[0].logprobs
    return np.asarray(() if logprobs is None else logprobs.logprobs, dtype=np.float32)


def _reply(output: RequestOutput, *, salt: str, routed: tuple[int, ...]) -> GenerateReply:
    sampled = output.outputs[0]
    token_ids = np.asarray(sampled.token_ids, dtype=np.int32)
    spans = tuple(
        VersionSpan(version=int(span.version), start=span.start, end=span.end)
        for span in sampled.weight_versions or ()
    )
    records = sampled.routed_experts
    return GenerateReply(
        token_ids=token_ids,
        logprobs=_sampled_logprobs(output),
        finish_reason=FinishReason(sampled.finish_reason),
        version_spans=spans,
        cache_salt=salt,
        expert_indices=None if records is None else sampled_experts(records, routed=routed),
    )
