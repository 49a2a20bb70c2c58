"""Programs as users write them, with the real openai package: `environments[].program` of tests."""

import asyncio
import json
import os
import time

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


def any_of_them(row, **endpoint):
    """Run the program below that the row names."""
    return globals()[row["plays"]](row, **endpoint)


def client_of(base_url, api_key, **more):
    """Return a client that does not hide a failure behind another try."""
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=30, **more)


def talk(row, *, base_url, api_key, model):
    """Say each of the row's `says` in one conversation; returns the number of letters that the model has said."""
    with client_of(base_url, api_key) as client:
        messages, said = [{"role": "user", "content": row["says"][0]}], ""
        for say in [*row["says"][1:], None]:
            answer = client.chat.completions.create(model=model, messages=messages).choices[0].message
            said += answer.content
            messages += [answer, {"role": "user", "content": say}]
    return len(said)


async def stream(row, *, base_url, api_key, model):
    """Do the same with an asynchronous client that streams, and writes its own messages; returns nothing."""
    async with openai.AsyncOpenAI(max_retries=0) as client:  # from OPENAI_BASE_URL and OPENAI_API_KEY
        messages = []
        for say in row["says"]:
            messages.append({"role": "user", "content": [{"type": "text", "text": say}]})
            options = {"include_usage": True}
            events = await client.chat.completions.create(
                model=model, messages=messages, stream=True, stream_options=options
            )
            parts = [event async for event in events]
            assert parts[-1].usage.total_tokens > 0
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            messages.append({"role": "assistant", "content": text.strip()})


def multiplying(row, *, base_url, api_key, model):
    """Answer calls of `multiply` until there is none; returns 1 if the model then says the product."""
    client = client_of(base_url, api_key)
    messages = [{"role": "system", "content": "Multiply."}, {"role": "user", "content": "6 x 7?"}]
    while True:
        asks = {"messages": messages, "tools": TOOLS} | row.get("asks", {})
        choice = client.chat.completions.create(model=model, **asks).choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        if choice.finish_reason != "tool_calls":
            return float("42" in choice.message.content)
        for call in choice.message.tool_calls:
            numbers = json.loads(call.function.arguments)
            result = {"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] * numbers["b"])}
            messages.append(result)


def responding(row, *, base_url, api_key, model):
    """Say each of the row's `says` with the Responses API, which keeps the history; returns what the model has said."""
    client, previous, said = client_of(base_url, api_key), None, ""
    for say in row["says"]:
        response = client.responses.create(
            model=model, instructions="Be brief.", input=say, previous_response_id=previous, max_output_tokens=20
        )
        assert response.status == "completed"
        previous, said = response.id, said + response.output_text
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    return len(said)


def responding_with_tools(row, *, base_url, api_key, model):
    """Multiply as `multiplying` does, with streamed responses whose items are sent back."""
    client = client_of(base_url, api_key)
    tools = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    items = [{"role": "system", "content": "Multiply."}, {"role": "user", "content": "6 x 7?"}]
    while True:
        with client.responses.stream(model=model, input=items, tools=tools) as stream:
            deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            response = stream.get_final_response()
        assert deltas == response.output_text
        items += [one.model_dump(exclude_none=True) for one in response.output]
        calls = [one for one in response.output if one.type == "function_call"]
        if not calls:
            return float("42" in response.output_text)
        for call in calls:
            numbers = json.loads(call.arguments)
            result = str(numbers["a"] * numbers["b"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def mixing(row, *, base_url, api_key, model):
    """Begin with chat completions, and go on with a response."""
    client = client_of(base_url, api_key)
    messages = [{"role": "user", "content": "Hi."}]
    answer = client.chat.completions.create(model=model, messages=messages).choices[0].message
    items = [*messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "And?"}]
    return float(client.responses.create(model=model, input=items).output_text == "Yes.")


def responding_once(row, *, base_url, api_key, model):
    """Make one response with the row's parameters; returns 1 if it is whole, or raises what the client raises."""
    response = client_of(base_url, api_key).responses.create(**{"model": model, "input": "Hello."} | row["asks"])
    return float(response.status == "completed")


def asking(row, *, base_url, api_key, model):
    """Make one request with the row's parameters; returns 1, or raises what the client raises."""
    messages = row.get("messages") or [{"role": "user", "content": "Hello."}]
    client_of(base_url, api_key).chat.completions.create(**{"model": model, "messages": messages} | row["asks"])
    return 1


def impatient(row, *, base_url, api_key, model):
    """Send a request again and again until its answer is there."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=9, timeout=1)
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello."}])
    return 1


def editing(row, *, base_url, api_key, model):
    """Go on with another history than there was."""
    client = client_of(base_url, api_key)
    messages = [{"role": "user", "content": "Hello."}]
    answer = client.chat.completions.create(model=model, messages=messages).choices[0].message
    if row["edit"] == "back":
        client.chat.completions.create(model=model, messages=[*messages, answer, {"role": "user", "content": "And?"}])
    edited = {
        "answer": [*messages, {"role": "assistant", "content": f"{answer.content}!"}, messages[0]],
        "question": [{"role": "user", "content": "Hi."}, answer, messages[0]],
        "fewer": [{"role": "system", "content": "New."}, messages[0]],
        "again": messages,
        "inserted": [*messages, answer, messages[0], {"role": "assistant", "content": "No."}, messages[0]],
        "tools": [*messages, answer, messages[0]],
        "back": [*messages, answer, messages[0]],
    }[row["edit"]]
    client.chat.completions.create(model=model, messages=edited, **({"tools": TOOLS} if row["edit"] == "tools" else {}))
    return 1


def compacting(row, *, base_url, api_key, model):
    """Talk until there is no room, and then go on with a summary, once."""
    client, messages = client_of(base_url, api_key), []
    while True:
        messages.append({"role": "user", "content": "And?"})
        try:
            messages.append(client.chat.completions.create(model=model, messages=messages).choices[0].message)
        except openai.BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            summary = [{"role": "user", "content": "It said hello."}]
            client.chat.completions.create(model=model, messages=summary)
            return 1


async def parallel(row, *, base_url, api_key, model):
    """Begin two conversations at once."""
    async with openai.AsyncOpenAI(max_retries=0) as client:
        asks = [
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": say}]) for say in "ab"
        ]
        await asyncio.gather(*asks)


def chatter(row, *, base_url, api_key, model):
    """Talk until the gateway has no room; the row says whether to catch that."""
    client, messages = client_of(base_url, api_key), []
    while True:
        messages.append({"role": "user", "content": "And?"})
        try:
            answer = client.chat.completions.create(model=model, messages=messages).choices[0]
        except openai.BadRequestError as error:
            if error.code == "context_length_exceeded" and row["catches"]:
                return 0.25
            raise
        messages.append(answer.message)


def waiting(row, *, base_url, api_key, model):
    """Ask once, and then wait for something that never comes."""
    client = client_of(base_url, api_key)
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello."}])
    time.sleep(600)


def slow(row, *, base_url, api_key, model):
    """Wait a second before each request, until it is refused."""
    client, messages = client_of(base_url, api_key), []
    for number in range(10):
        time.sleep(0.6)
        messages.append({"role": "user", "content": "And?"})
        try:
            messages.append(client.chat.completions.create(model=model, messages=messages).choices[0].message)
        except openai.BadRequestError as error:
            return number if error.code == "episode_timeout" else -1
    return 10


def own_account(row, *, base_url, api_key, model):
    """Ask the model, and look for the user's own account with OpenAI; returns 1 if it is there as the user has it."""
    asking(row | {"asks": {}}, base_url=base_url, api_key=api_key, model=model)
    return float(os.environ["OPENAI_API_KEY"] == "mine" and "OPENAI_BASE_URL" not in os.environ)


def other_keys(row, *, base_url, api_key, model):
    """Ask for the models, with wrong keys and with its own; then once as another client does."""
    for key in ("", "sk-other", api_key[:-1]):
        try:
            client_of(base_url, key or "x").models.list()
        except openai.AuthenticationError:
            continue
        raise AssertionError
    client = client_of(base_url, api_key)
    assert [one.id for one in client.models.list()] == [model]
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello."}])
    try:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hello."}])
    except openai.NotFoundError:
        return os.getpid()
    raise AssertionError


def silent(row, *, base_url, api_key, model):
    """Ask nothing."""
    return 1.0


def wrong_arguments(row):
    """Take no endpoint."""
