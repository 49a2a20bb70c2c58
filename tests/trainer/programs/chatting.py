"""A program that talks with the model in three turns, then in one with a shorter history: `chatting:play`."""

import openai


def play(row, *, base_url, api_key, model):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    def ask(messages):
        create = client.chat.completions.create
        return create(model=model, messages=messages, max_completion_tokens=8, temperature=1.0).choices[0].message

    messages, said = [*row["prompt"]], ""
    for say in ("And?", "Why?", None):
        answer = ask(messages)
        said += answer.content
        messages += [answer, {"role": "user", "content": say}]
    said += ask([{"role": "user", "content": f"Three times: {len(said)}."}]).content
    return len(said) / 100
