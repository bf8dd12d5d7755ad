"""Tests of the routes that agents call: stop strings, references, counts, models, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import numpy as np
import openai
import pytest
from pydantic import ValidationError
from worlds.builders.episode_builders import reply
from worlds.models.chatml import TEMPLATE, chatml_tokenizer
from worlds.parts.gateway_world import DEADLINE_S, NAME, SPEC, Gateway, Policy
from worlds.parts.session_app import SessionRun

from actors.environment.rendering import ChatRenderer
from actors.environment.tokenizer import RAW, with_template
from actors.types import FinishReason, Outcome
from service.config.sections import SessionSettings
from service.gateway.bodies import NewSession, SessionsBody

SESSION = NewSession.of(NAME, client_key="", address="http://localhost")
ROOT = f"/sessions/{NAME}"
USER = {"role": "user", "content": "q"}
LOOK_UP = {
    "type": "function",
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "look_up", "arguments": {"q": "7"}}</tool_call>'
# A template that shows calls and reads the option enable_thinking.
NO_THOUGHTS = "{%- if enable_thinking is defined and not enable_thinking %}no thoughts\n{% endif %}"
THINKING = TEMPLATE.removesuffix("{% endif %}") + NO_THOUGHTS + "{% endif %}"


def script(*texts: str, cut: Iterable[int] = ()) -> Policy:
    """Return a policy that gives these replies.

    cut: numbers of the replies that end at the token limit.
    """
    cuts = set(cut)

    def answer(number: int) -> Any:
        if number in cuts:
            return reply(texts[number], finish_reason=FinishReason.LENGTH)
        return reply(f"{texts[number]}<|im_end|>")

    return Policy(answers=answer)


@asynccontextmanager
async def asking(
    directory: Path,
    *texts: str,
    template: str = TEMPLATE,
    cut: Iterable[int] = (),
    stop: tuple[str, ...] = (),
    **settings: Any,
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """Open a session whose policy gives these replies, and a client with the key of its agent."""
    tokenizer = with_template(chatml_tokenizer(), template)
    gateway = Gateway(
        directory,
        policy=script(*texts, cut=cut),
        settings=SessionSettings(hold_s=DEADLINE_S, **settings),
        max_context_tokens=2000,
        chat_renderer=ChatRenderer(tokenizer),
        stop=stop,
    )
    await gateway.opened(spec=replace(SPEC, max_tokens_per_turn=200))
    transport = httpx.ASGITransport(app=SessionRun(gateway).app())
    headers = {"authorization": f"Bearer {SESSION.agent_key}"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=headers
    ) as client:
        yield gateway, client
    gateway.sessions.close()
    gateway.store.close()


async def finished(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.post(
        f"/api/v1/sessions/{NAME}/finish",
        json={"reward": 1.0},
        headers={"authorization": f"Bearer {SESSION.reward_key}"},
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def sampled(gateway: Gateway, trajectory: Any) -> list[list[str]]:
    """Return the sampled texts of the turns of each sample."""
    decode = gateway.chat_renderer._tokenizer.decode
    return [
        [
            decode(each.token_ids[turn.tokens].tolist(), skip_special_tokens=False)
            for turn in each.turns
        ]
        for each in trajectory.samples
    ]


async def test_shown_text_ends_before_a_stop_string_and_all_sampled_ids_are_trained(
    tmp_path: Path,
) -> None:
    said = "Thought: 1\nObservation: made up"
    async with asking(tmp_path, said, "two END b", "three") as (gateway, client):
        body: dict[str, Any] = {"model": "m", "messages": [USER]}
        body["stop"] = ["Calling tools:", "Observation:"]
        first = (await client.post(f"{ROOT}/v1/chat/completions", json=body)).json()["choices"][0]
        assert first["message"]["content"] == "Thought: 1\n"
        assert first["finish_reason"] == "stop"
        # A request in another dialect continues the shown text; its answer names the stop string.
        sent = [USER, first["message"], {"role": "user", "content": "0"}]
        body = {"model": "m", "max_tokens": 50, "messages": sent, "stop_sequences": ["b", "END"]}
        second = (await client.post(f"{ROOT}/v1/messages", json=body)).json()
        assert second["content"] == [{"type": "text", "text": "two "}]
        assert (second["stop_reason"], second["stop_sequence"]) == ("stop_sequence", "END")
        sent += [{"role": "assistant", "content": second["content"]}, USER]
        body = {"model": "m", "messages": sent, "stop_sequences": ["never"]}
        third = (await client.post(f"{ROOT}/v1/messages", json=body)).json()
        assert (third["stop_reason"], third["stop_sequence"]) == ("end_turn", None)
        await finished(client)
        trajectory = await gateway.trajectory()
    texts = [f"{said}<|im_end|>", "two END b<|im_end|>", "three<|im_end|>"]
    assert sampled(gateway, trajectory) == [texts]


async def test_a_session_of_a_base_model_has_raw_prompts_and_the_runs_stop_strings(
    tmp_path: Path,
) -> None:
    async with asking(tmp_path, " 7\nQ:", " 5", template=RAW, stop=("\nQ:",)) as (gateway, client):
        asked = {"role": "user", "content": "Q: 3+4?\nA:"}
        body: dict[str, Any] = {"model": "m", "messages": [asked]}
        first = (await client.post(f"{ROOT}/v1/chat/completions", json=body)).json()["choices"][0]
        assert (first["message"]["content"], first["finish_reason"]) == (" 7", "stop")
        assert gateway.policy.requests[0].stop == ("\nQ:",)
        more = {"role": "user", "content": " 2+3?\nA:"}
        body["messages"] = [asked, first["message"], more]
        second = (await client.post(f"{ROOT}/v1/chat/completions", json=body)).json()["choices"][0]
        assert second["message"]["content"] == " 5"
        system = {"role": "system", "content": "Be kind."}
        refused = await client.post(
            f"{ROOT}/v1/chat/completions", json={"model": "m", "messages": [system, asked]}
        )
        assert refused.status_code == 400
        assert "a raw prompt has no roles" in refused.json()["error"]["message"]
        await finished(client)
        [sample] = (await gateway.trajectory()).samples
    text = chatml_tokenizer().decode(sample.token_ids.tolist())
    # All sampled tokens are kept, also the end of sequence that the fake policy adds.
    assert text == "Q: 3+4?\nA: 7\nQ:<|im_end|> 2+3?\nA: 5<|im_end|>"


async def test_the_last_event_names_the_stop_sequence_also_after_a_restart(
    tmp_path: Path,
) -> None:
    async with asking(tmp_path, "one END two") as (gateway, client):
        body = {
            "model": "m", "messages": [USER], "max_tokens": 50, "stop_sequences": ["END"],
            "stream": True,
        }  # fmt: skip
        headers = {"idempotency-key": "k"}
        first = await client.post(f"{ROOT}/v1/messages", json=body, headers=headers)
        assert '"stop_reason":"stop_sequence","stop_sequence":"END"' in first.text
        after = await gateway.restart(NAME)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=SessionRun(after).app()),
            base_url="http://localhost", headers=client.headers,
        ) as again:  # fmt: skip
            body["stream"] = False
            second = (await again.post(f"{ROOT}/v1/messages", json=body, headers=headers)).json()
        assert (second["stop_sequence"], len(after.policy.requests)) == ("END", 1)
        after.sessions.close()
        after.store.close()


async def test_a_reply_with_a_stop_string_is_not_cut_off_by_its_length(tmp_path: Path) -> None:
    async with asking(tmp_path, "one END tw", cut=[0]) as (gateway, client):
        body = {"model": "m", "messages": [USER], "stop": "END", "max_tokens": 10}
        answer = (await client.post(f"{ROOT}/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert (await finished(client))["outcome"] == Outcome.COMPLETED
        assert sampled(gateway, await gateway.trajectory()) == [["one END tw"]]


async def test_calls_are_shown_only_if_no_stop_string_precedes_them(
    tmp_path: Path,
) -> None:
    async with asking(tmp_path, f"so Calling tools:\n{CALL}", CALL) as (_, client):
        tool = {"type": "function", "function": {k: v for k, v in LOOK_UP.items() if k != "type"}}
        body = {"model": "m", "messages": [USER], "tools": [tool], "stop": ["Calling tools:", '7"']}
        first = (await client.post(f"{ROOT}/v1/chat/completions", json=body)).json()["choices"][0]
        assert first["message"] == {"role": "assistant", "content": "so "}
        body["stop"] = ["Calling tools:"]
        second = (await client.post(f"{ROOT}/v1/chat/completions", json=body)).json()["choices"][0]
        assert second["finish_reason"] == "tool_calls"


async def test_ignored_parameters_are_counted_in_the_view_also_after_a_restart(
    tmp_path: Path,
) -> None:
    texts = ("zero", "one", "two")
    async with asking(tmp_path, *texts, unsupported="ignore") as (gateway, client):
        for asked in (
            {"tool_choice": "required"},
            {"tool_choice": "required", "logit_bias": {"5": 1}},
        ):
            body = {"model": "m", "messages": [USER], **asked}
            answer = await client.post(f"{ROOT}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
        refused = await client.post(
            f"{ROOT}/v1/chat/completions", json={"model": "m", "messages": [USER], "n": 2}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        view = (await client.get(f"/api/v1/sessions/{NAME}")).json()
        assert view["ignored"] == {"tool_choice": 2, "logit_bias": 1}
        after = await gateway.restart(NAME)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=SessionRun(after).app()),
            base_url="http://localhost", headers=client.headers,
        ) as again:  # fmt: skip
            assert (await finished(again))["ignored"] == view["ignored"]
            await after.trajectory()
            assert (await again.get(f"/api/v1/sessions/{NAME}")).json()["ignored"] == view[
                "ignored"
            ]
        after.sessions.close()
        after.store.close()


async def test_unsupported_parameters_are_refused_by_default(tmp_path: Path) -> None:
    async with asking(tmp_path) as (_, client):
        body = {"model": "m", "messages": [USER], "tool_choice": "required"}
        answer = await client.post(f"{ROOT}/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


async def test_a_reference_to_an_item_of_the_session_means_that_item(tmp_path: Path) -> None:
    async with asking(tmp_path, "same", "same ", "third") as (gateway, client):
        path = f"{ROOT}/v1/responses"
        body = {"model": "m", "input": [USER]}
        answers = [(await client.post(path, json=body)).json() for _ in range(2)]
        # Both replies have the same canonical form, so only the reference says which is meant.
        item = {"type": "item_reference", "id": answers[0]["output"][0]["id"]}
        body = {"model": "m", "input": [USER, item, USER]}
        assert (await client.post(path, json=body)).status_code == 200
        assert (await finished(client))["ambiguous"] == 0
        trajectory = await gateway.trajectory()
    assert sampled(gateway, trajectory) == [
        ["same<|im_end|>", "third<|im_end|>"],
        ["same <|im_end|>"],
    ]


async def test_references_and_whole_items_make_the_same_request(tmp_path: Path) -> None:
    async with asking(tmp_path, f"{CALL}", "a", "b", "c") as (gateway, client):
        path = f"{ROOT}/v1/responses"
        body: dict[str, Any] = {
            "model": "m",
            "input": [USER],
            "tools": [LOOK_UP],
            "instructions": "be",
        }
        items = (await client.post(path, json=body)).json()["output"]
        assert items[-1]["type"] == "function_call"
        output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "x"}
        references = [{"type": "item_reference", "id": item["id"]} for item in items]
        untyped = [{"id": item["id"]} for item in items]
        for said in (references, untyped, items):
            answer = await client.post(path, json={**body, "input": [USER, *said, output]})
            assert answer.status_code == 200, answer.text
        prompts = [request.prompt_token_ids for request in gateway.policy.requests]
        assert all(np.array_equal(prompts[1], prompt) for prompt in prompts[2:])


@pytest.mark.parametrize(
    "name", ["msg_task-0.1", "msg_other-0.0", "rs_task-0.0", "fc_task-0.0.0", "msg_task-0.x"]
)
async def test_a_reference_to_an_unknown_item_is_refused(tmp_path: Path, name: str) -> None:
    async with asking(tmp_path, "said") as (_, client):
        path = f"{ROOT}/v1/responses"
        await client.post(path, json={"model": "m", "input": [USER]})
        body = {"model": "m", "input": [USER, {"type": "item_reference", "id": name}, USER]}
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[1].id")
        assert "send the item itself" in answer.json()["error"]["message"]


async def test_options_of_the_template_are_a_part_of_the_conversation(tmp_path: Path) -> None:
    texts = ("a", "b", "c")
    async with asking(tmp_path, *texts, template=THINKING) as (gateway, client):
        path = f"{ROOT}/v1/chat/completions"
        options = {"chat_template_kwargs": {"enable_thinking": False}}
        body: dict[str, Any] = {"model": "m", "messages": [USER], **options}
        first = (await client.post(path, json=body)).json()["choices"][0]["message"]
        sent = [USER, first, USER]
        await client.post(path, json={**body, "messages": sent})
        # A request without the options is another conversation.
        await client.post(path, json={"model": "m", "messages": sent})
        tokenizer: Any = gateway.chat_renderer._tokenizer
        prompts = [
            tokenizer.decode(request.prompt_token_ids.tolist())
            for request in gateway.policy.requests
        ]
        assert [text.count("no thoughts") for text in prompts] == [1, 2, 0]
        after = await gateway.restart(NAME)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=SessionRun(after).app()),
            base_url="http://localhost", headers=client.headers,
        ) as again:  # fmt: skip
            await finished(again)
            trajectory = await after.trajectory()
        assert [len(sample.turns) for sample in trajectory.samples] == [2, 1]
        after.sessions.close()
        after.store.close()


async def test_a_count_is_the_length_of_the_prompt_and_stores_nothing(tmp_path: Path) -> None:
    async with asking(tmp_path, "said", "more") as (gateway, client):
        sent: dict[str, Any] = {"model": "m", "messages": [USER]}
        said = (await client.post(f"{ROOT}/v1/messages", json=sent)).json()
        sent["messages"] += [{"role": "assistant", "content": said["content"]}, USER]
        count = (await client.post(f"{ROOT}/v1/messages/count_tokens", json=sent)).json()
        again = {"input": [USER], "previous_response_id": f"resp_{NAME}.0"}
        counted = (await client.post("/v1/responses/input_tokens", json=again)).json()
        assert counted == {"object": "response.input_tokens", **count}
        assert len(gateway.policy.requests) == 1
        answer = (await client.post(f"{ROOT}/v1/messages", json=sent)).json()
        assert count == {"input_tokens": answer["usage"]["input_tokens"]}
        assert (await finished(client))["turns"] == 2
        await gateway.trajectory()


async def test_requests_to_count_are_refused_for_the_same_reasons_as_turns(tmp_path: Path) -> None:
    async with asking(tmp_path) as (_, client):
        path = f"{ROOT}/v1/messages/count_tokens"
        image = {"role": "user", "content": [{"type": "image", "source": {}}]}
        refused = await client.post(path, json={"messages": [image]})
        assert (refused.status_code, refused.json()["type"]) == (400, "error")
        key = {"authorization": f"Bearer {SESSION.reward_key}"}
        other = await client.post(path, json={"messages": [USER]}, headers=key)
        assert (other.status_code, other.json()["error"]["type"]) == (403, "permission_error")
        huge = {"messages": [{"role": "user", "content": "word " * 100_000}]}
        long = await client.post(path, json=huge)
        assert "prompt is too long" in long.json()["error"]["message"]
        # Counting changes nothing: the session can still be finished.
        assert (await finished(client))["outcome"] == Outcome.EMPTY


async def test_a_model_is_found_only_by_its_name(tmp_path: Path) -> None:
    async with asking(tmp_path) as (_, client):
        for prefix in (ROOT, ""):
            assert (await client.get(f"{prefix}/v1/models/policy")).json()["id"] == "policy"
            for name in ("gpt-4o", "openai/gpt", "policy/"):
                answer = await client.get(f"{prefix}/v1/models/{name}")
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            anthropics = {"anthropic-version": "2023-06-01"}
            answer = await client.get(f"{prefix}/v1/models/claude", headers=anthropics)
            assert (answer.status_code, answer.json()["type"]) == (404, "error")


async def test_an_unknown_path_is_answered_with_an_error_of_its_dialect(tmp_path: Path) -> None:
    async with asking(tmp_path) as (_, client):
        for prefix in (ROOT, ""):
            for path in ("/v1/embeddings", "/v1/chat/complete", "/v1/responses/resp_1", "/v1/"):
                answer = await client.post(f"{prefix}{path}", json={})
                assert answer.status_code == 404
                assert answer.json()["error"]["type"] == "not_found_error"
                assert "type" not in answer.json()
            answer = await client.get(f"{prefix}/v1/messages/batches")
            assert (answer.status_code, answer.json()["type"]) == (404, "error")
            assert "/v1/messages" in answer.json()["error"]["message"]
        assert (await client.get("/sessions")).json()["code"] == "not-found"


async def test_the_clients_of_the_providers_can_use_the_routes(tmp_path: Path) -> None:
    asked: Any = [{"role": "user", "content": "q"}]
    async with asking(tmp_path, "one END", "said", "more") as (gateway, _):
        transport = httpx2.ASGITransport(app=SessionRun(gateway).app())
        async with httpx2.AsyncClient(transport=transport) as http:
            options: Any = {"api_key": SESSION.agent_key, "http_client": http, "max_retries": 0}
            claude = anthropic.AsyncAnthropic(base_url=SESSION.env["ANTHROPIC_BASE_URL"], **options)
            gpt = openai.AsyncOpenAI(base_url=SESSION.base_url, **options)
            counted = await claude.messages.count_tokens(model="m", messages=asked)
            said = await claude.messages.create(
                model="m", max_tokens=20, messages=asked, stop_sequences=["END"]
            )
            assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", "END")
            assert counted.input_tokens == said.usage.input_tokens
            assert (await claude.models.retrieve("policy")).id == "policy"
            with pytest.raises(anthropic.NotFoundError, match="expected 'policy'"):
                await claude.models.retrieve("claude")
            assert (await gpt.models.retrieve("policy")).id == "policy"
            with pytest.raises(openai.NotFoundError, match="expected 'policy'"):
                await gpt.models.retrieve("gpt")
            with pytest.raises(openai.NotFoundError, match="there is no route"):
                await gpt.embeddings.create(model="m", input="a")
            first = await gpt.responses.create(model="m", input=asked)
            named = [*asked, {"type": "item_reference", "id": first.output[0].id}, *asked]
            count = await gpt.responses.input_tokens.count(model="m", input=named)
            second = await gpt.responses.create(model="m", input=named)
            assert second.usage is not None and count.input_tokens == second.usage.input_tokens


@pytest.mark.parametrize("unsupported", ["refuse", "ignore"])
async def test_a_thread_of_anthropics_tool_runner_is_one_conversation(
    tmp_path: Path, unsupported: str
) -> None:
    """Check later requests that have only new messages, without the system text and the tools."""

    @anthropic.beta_async_tool
    async def look_up(q: str) -> str:
        """Look a number up."""
        return f"found {q}"

    async with asking(tmp_path, CALL, "said", unsupported=unsupported) as (gateway, _):
        transport = httpx2.ASGITransport(app=SessionRun(gateway).app())
        async with httpx2.AsyncClient(transport=transport) as http:
            claude = anthropic.AsyncAnthropic(
                base_url=SESSION.env["ANTHROPIC_BASE_URL"],
                api_key=SESSION.agent_key,
                http_client=http,
                max_retries=0,
            )
            runner = claude.beta.messages.tool_runner(
                model="m",
                max_tokens=200,
                system="be brief",
                tools=[look_up],
                messages=[{"role": "user", "content": "q"}],
            )
            said = await runner.until_done()
            assert [each.type for each in said.content] == ["text"]
            unknown: Any = {"type": "continue", "previous_message_id": "msg_task-0.7"}
            with pytest.raises(anthropic.BadRequestError, match="no answer of this session"):
                await claude.beta.messages.create(
                    model="m", max_tokens=9, messages=[USER], thread=unknown
                )
        tokenizer: Any = gateway.chat_renderer._tokenizer
        first, second = (
            tokenizer.decode(each.prompt_token_ids.tolist()) for each in gateway.policy.requests
        )
        assert second.startswith(first) and "found 7" in second


@pytest.mark.parametrize(
    ("given", "is_taken"), [(4, True), (4.0, True), (4.5, False), ("4", False)]
)
def test_a_whole_number_may_be_written_as_a_float(given: object, is_taken: bool) -> None:
    body = {"id": "a", "num_sessions": given}
    if is_taken:
        assert SessionsBody.model_validate(body).num_sessions == 4
        return
    with pytest.raises(ValidationError):
        SessionsBody.model_validate(body)


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_a_body_with_a_duplicate_key_is_refused_with_an_error_of_the_dialect(
    tmp_path: Path, path: str
) -> None:
    body = '{"model": "m", "messages": [{"role": "user", "content": "a", "content": "b"}]}'
    async with asking(tmp_path) as (gateway, client):
        answer = await client.post(
            f"{ROOT}/v1/{path}", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert "got the key 'content' twice" in answer.json()["error"]["message"]
        finish = await client.post(
            f"/api/v1/sessions/{NAME}/finish",
            content='{"reward": 1, "reward": 0}',
            headers={
                "authorization": f"Bearer {SESSION.reward_key}",
                "content-type": "application/json",
            },
        )
        assert finish.status_code == 400 and "got the key 'reward' twice" in finish.text
        assert not gateway.policy.requests
        # Anthropic's clients add a query parameter to the URL.
        asked = {"model": "m", "max_tokens": 5, "messages": [USER]}
        count = await client.post(f"{ROOT}/v1/messages/count_tokens?beta=true", json=asked)
        assert count.status_code == 200


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (r"\ud800", r"\ud800 at byte 57"),
        (r"\uD83D\ude00 \uDE00!", r"\uDE00 at byte 70"),
        (r"\\\ud83d\u0041", r"\ud83d at byte 59"),
        (r"\uD83D\ude00 \\ud800", None),
    ],
)
async def test_half_of_a_surrogate_pair_is_refused_with_its_position(
    tmp_path: Path, text: str, half: str | None
) -> None:
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "{text}"}}]}}'
    async with asking(tmp_path, "4") as (_, client):
        answer = await client.post(
            f"{ROOT}/v1/chat/completions",
            content=body,
            headers={"content-type": "application/json"},
        )
    if half is None:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == (
            f"the body: got half of a surrogate pair, {half}, expected text that UTF-8 can encode; "
            "send both halves, or replace it"
        )
