"""The reward `judge` asks a real HTTP server: what it is asked, scores, costs, retries, and failures."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from grpo_spec.errors import ConfigError
from grpo_workload.rewards import scoring
from grpo_workload.rewards.judge import Judge
from grpo_workload.rewards.scoring import Reward, RewardError, build_rewards, close_rewards, score, take_logged
from support.trainer.reward_inputs import make_completion, make_config, make_prompt, make_source

TEMPLATE = "Question: {prompt}\nRight: {answer}\nGiven: {completion}\nAnswer with {{score}}."


class Api:
    """An OpenAI-compatible API whose score is a completion's length; `plan` has what it answers first."""

    def __init__(self, *plan, seconds=0.0, headers=None):
        self.plan, self.seconds, self.headers = list(plan), seconds, headers or {}
        self.asked, self.keys, self.open, self.most = [], [], 0, 0

    async def answer(self, request):
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(self.seconds)
        self.open -= 1
        if self.plan and (status := self.plan.pop(0)) != 200:
            if status == "html":
                return web.Response(text="<html>", content_type="text/html")
            return web.Response(status=status, text="not now", headers=self.headers)
        given = body["messages"][0]["content"].split("Given: ")[1].split("\n")[0]
        text = f"The score is {len(given)} of 10: {float(len(given))}"
        usage = {"prompt_tokens": 10, "completion_tokens": 3}
        return web.json_response({"choices": [{"message": {"content": text}}], "usage": usage})


@asynccontextmanager
async def served(api):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", api.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    finally:
        await runner.cleanup()


def config_of(url, **settings):
    return make_config(judge={"url": url, "model": "big", "promptTemplate": TEMPLATE} | settings)


async def judge(url, texts, *, wait=0.01, environ=None, **settings):
    """Return the values of completions with these texts, and what was logged; retries come soon."""
    config = config_of(url, **settings)
    function = Judge("mine", config.judge, make_source({"answer": "?"}), environ or {}, wait=wait)
    rewards = [Reward(name="mine", weight=1.0, scorer=function, timeout_seconds=60)]
    prompt = make_prompt([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2 + 2?"}], answer="4")
    try:
        table = await score(rewards, [prompt] * len(texts), [make_completion(text) for text in texts])
        return table.values[0], take_logged(rewards)["mine"]
    finally:
        close_rewards(rewards)


async def test_the_judge_is_asked_about_each_completion_and_its_costs_are_counted():
    api = Api()
    async with served(api) as url:
        given = {"environ": {"KEY": "sesame"}, "apiKeyEnv": "KEY", "params": {"max_tokens": 64}}
        values, logged = await judge(f"{url}/", ["four", "4"], **given)
    assert values == [4.0, 1.0]
    body = next(body for body in api.asked if "four" in str(body))
    assert (body["model"], body["max_tokens"], "temperature" in body) == ("big", 64, False)
    asked = "Question: system: Be kind.\n\nuser: 2 + 2?\nRight: 4\nGiven: four\nAnswer with {score}."
    assert body["messages"] == [{"role": "user", "content": asked}]
    assert set(api.keys) == {"Bearer sesame"}
    counts = {"requests": [2.0], "prompt_tokens": [20.0], "completion_tokens": [6.0], "unreadable": [0.0]}
    assert logged.metrics == counts
    assert logged.extra == {"answer": ["The score is 4 of 10: 4.0", "The score is 1 of 10: 1.0"]}


async def test_no_more_requests_than_concurrency_are_open():
    api = Api(seconds=0.02)
    async with served(api) as url:
        values, _ = await judge(url, ["a"] * 12, concurrency=3)
    assert (values, api.most) == ([1.0] * 12, 3)


async def test_an_answer_without_a_score_is_left_out_and_counted():
    async with served(Api()) as url:
        values, logged = await judge(url, ["a", "b"], scorePattern=r"score is (7)")
        assert (values, logged.metrics["unreadable"]) == ([None, None], [2.0])
        assert (await judge(url, ["a"], scorePattern=r"score is (\d+)"))[0] == [1.0]


async def test_failures_that_may_pass_are_tried_again():
    api = Api(500, 429, 200)
    async with served(api) as url:
        values, logged = await judge(url, ["a"], maxRetries=2)
    assert (values, logged.metrics["requests"], len(api.asked)) == ([1.0], [3.0], 3)


async def test_retries_wait_as_long_as_the_api_asks():
    began = time.monotonic()
    async with served(Api(429, headers={"Retry-After": "1"})) as url:
        assert (await judge(url, ["a"]))[0] == [1.0]
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize(
    ("api", "settings", "kind", "message"),
    [
        (Api(503, 503), {"maxRetries": 1}, RewardError, r"rewards\[mine\]\.judge: http.* answered 503: not now"),
        (Api(400), {}, RewardError, r"answered 400: not now"),
        (Api("html"), {}, RewardError, r"answered without choices: <html>"),
        (Api(401), {}, ConfigError, r"answered 401: not now; check url, model and apiKeyEnv"),
        (Api(seconds=3), {"requestSeconds": 1, "maxRetries": 0}, RewardError, r"did not answer within 1 s; raise"),
    ],
)
async def test_a_judge_that_fails_is_named_with_what_it_answered(api, settings, kind, message):
    async with served(api) as url:
        with pytest.raises(kind, match=message):
            await judge(url, ["a"], **settings)
    assert len(api.asked) == 1 + settings.get("maxRetries", 0)


async def test_an_api_that_is_not_there_is_named():
    with pytest.raises(RewardError, match=r"no connection to http://127.0.0.1:9/v1/chat/completions"):
        await judge("http://127.0.0.1:9/v1", ["a"], maxRetries=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"apiKeyEnv": "NO_SUCH_KEY"}, r"rewards\[mine\]\.judge\.apiKeyEnv: NO_SUCH_KEY is not set"),
        ({"promptTemplate": "{completion} {gold}"}, r"promptTemplate: there is no \{gold\}; it may name answer, comp"),
        ({"promptTemplate": '{completion} {"score": 1}'}, r"there is no .*; write \{\{ and \}\} for braces"),
        ({"promptTemplate": "{completion} {"}, r"promptTemplate: .*; write \{\{ and \}\} for braces"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_rewards([config_of("http://judge/v1", **settings)], make_source({"answer": "?"}))


def test_a_template_without_the_completion_is_refused():
    with pytest.raises(ValueError, match=r"promptTemplate must contain \{completion\}"):
        config_of("http://judge/v1", promptTemplate="{prompt}")


async def test_a_group_is_judged_as_soon_as_it_is_complete_and_each_completion_once():
    """Equal completions are asked about as often as there are; those of a later step stay for it."""
    api = Api()
    async with served(api) as url:
        function = Judge("mine", config_of(url).judge, make_source({"answer": "?"}), {})
        rewards = [Reward(name="mine", weight=1.0, scorer=function, timeout_seconds=60)]
        now, later = make_prompt("2 + 2?", answer="4"), make_prompt("2 + 3?", answer="5")
        group = [make_completion("4"), make_completion("4")]
        scoring.begin_scoring(rewards, now, group)
        scoring.begin_scoring(rewards, later, [make_completion("five")])
        async with asyncio.timeout(60):
            while len(api.asked) < 3:  # noqa: ASYNC110  # nobody has asked for scores yet
                await asyncio.sleep(0.01)

        first = await score(rewards, [now, now], group)
        cost = take_logged(rewards)["mine"].metrics["requests"]
        second = await score(rewards, [later, later], [make_completion("five"), make_completion("more")])
        close_rewards(rewards)
    assert (first.values[0], cost) == ([1.0, 1.0], [2.0])
    assert (second.values[0], len(api.asked)) == ([4.0, 4.0], 4), "only the one that was not begun is asked about now"


async def test_requests_end_with_the_rank():
    api = Api(seconds=60)
    async with served(api) as url:
        function = Judge("mine", config_of(url).judge, make_source({"answer": "?"}), {})
        function.begin(make_prompt("2 + 2?", answer="4"), [make_completion("4")])
        start = time.monotonic()
        function.close()
    assert time.monotonic() - start < 10
