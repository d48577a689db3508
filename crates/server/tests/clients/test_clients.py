"""The official clients against a running server, and every documented request against its document.

    python -m pytest -q test_clients.py     with KIPP_URL=http://127.0.0.1:PORT of `kipp serve`

The model may be kipp-tiny, whose answers mean nothing: what is tested is their shape.
"""

import json
import os

import anthropic
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

URL = os.environ["KIPP_URL"]
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
CLAUDE = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
MODEL = CLIENT.models.list().data[0].id
ASK = [{"role": "user", "content": "What is the capital of France?"}]
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}},
                   "required": ["city"], "additionalProperties": False}}}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
          "required": ["n"], "additionalProperties": False}


def test_models():
    assert CLIENT.models.retrieve(MODEL).id == MODEL


def test_completion():
    answer = CLIENT.completions.create(model=MODEL, prompt="Once", max_tokens=8, logprobs=2, n=2, seed=1)
    assert len(answer.choices) == 2 and answer.usage.completion_tokens <= 16
    assert answer._request_id.startswith("req_")
    assert len(answer.choices[0].logprobs.tokens) == len(answer.choices[0].logprobs.token_logprobs)


def test_completion_stream_equals_whole():
    body = dict(model=MODEL, prompt="Once", max_tokens=24, temperature=0)
    whole = CLIENT.completions.create(**body).choices[0].text
    parts = CLIENT.completions.create(**body, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole


def test_chat_stream_equals_whole():
    body = dict(model=MODEL, messages=ASK, max_tokens=24, temperature=0, extra_body=QUIET)
    whole = CLIENT.chat.completions.create(**body)
    chunks = list(CLIENT.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_logprobs():
    answer = CLIENT.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=4, logprobs=True, top_logprobs=3, extra_body=QUIET)
    for entry in answer.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0


def test_structured_output():
    answer = CLIENT.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=60, extra_body=QUIET,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    assert 0 <= json.loads(answer.choices[0].message.content)["n"] <= 9


@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool(stream):
    body = dict(model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=100, extra_body=QUIET)
    if stream:
        arguments, name = "", ""
        for chunk in CLIENT.chat.completions.create(**body, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    else:
        call = CLIENT.chat.completions.create(**body).choices[0].message.tool_calls[0]
        name, arguments = call.function.name, call.function.arguments
    assert name == "weather" and isinstance(json.loads(arguments)["city"], str)


def test_responses():
    answer = CLIENT.responses.create(model=MODEL, input="Hi", max_output_tokens=16, reasoning={"effort": "none"})
    assert answer.output[0].type == "message" and isinstance(answer.output_text, str)
    with CLIENT.responses.stream(model=MODEL, input="Hi", max_output_tokens=16, reasoning={"effort": "none"}) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


def test_errors():
    with pytest.raises(openai.NotFoundError):
        CLIENT.chat.completions.create(model="nobody", messages=ASK)
    with pytest.raises(openai.BadRequestError) as error:
        CLIENT.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(anthropic.BadRequestError):
        CLAUDE.messages.create(model=MODEL, max_tokens=0, messages=ASK)


def test_anthropic():
    body = dict(model=MODEL, max_tokens=24, messages=ASK, extra_body={"temperature": 0})
    whole = CLAUDE.messages.create(**body)
    with CLAUDE.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == "".join(b.text for b in whole.content if b.type == "text")
    assert CLAUDE.messages.count_tokens(model=MODEL, messages=ASK).input_tokens == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens or 0)


def test_anthropic_tool():
    tools = [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
    answer = CLAUDE.messages.create(
        model=MODEL, max_tokens=100, messages=ASK, tools=tools, tool_choice={"type": "any"})
    assert answer.stop_reason == "tool_use"
    assert [b.name for b in answer.content if b.type == "tool_use"] == ["weather"]


DOCUMENT = schemathesis.openapi.from_url(f"{URL}/openapi.json")
# A schema cannot say that a prompt fits, that a name is among the tools, or that null is the same as nothing.
BEYOND_SCHEMAS = [negative_data_rejection, positive_data_acceptance]


@DOCUMENT.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_document(case):
    if isinstance(case.body, dict) and case.path.startswith("/v1") and "count" not in case.path:
        # Answers without an end would take their time.
        key = "max_output_tokens" if "responses" in case.path else "max_tokens"
        if isinstance(case.body.get(key), int | None):
            case.body[key] = min(case.body.get(key) or 4, 4)
        case.body.pop("max_completion_tokens", None)
    case.call_and_validate(excluded_checks=BEYOND_SCHEMAS)
