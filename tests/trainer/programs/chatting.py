"""A program that talks with the model in three turns, with the openai package: `chatting:play`."""

import openai


def play(row, *, base_url, api_key, model):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [*row["prompt"]]
    for say in ("And?", "Why?", None):
        create = client.chat.completions.create
        answer = create(model=model, messages=messages, max_completion_tokens=8, temperature=1.0).choices[0].message
        messages += [answer, {"role": "user", "content": say}]
    return sum(len(message.content) for message in messages[len(row["prompt"]) : -1 : 2]) / 100
