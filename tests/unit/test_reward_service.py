"""A reward function over HTTP: served from a file, called as a reward by its URL, and everything that can go wrong."""

import asyncio
import base64
import json
import math
import os
import signal
import textwrap

import aiohttp
import pytest
from aiohttp import web
from scored_rows import score_table

from rlfuse import cli
from rlfuse.errors import RewardError
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.items import Score, item_of_row
from rlfuse.samples import RewardFailure
from rlfuse.tools.evaluation import service

CODE = """
import os, time

KEPT = []

def grade(solution_str, ground_truth, data_source):
    if solution_str == "process":
        return os.getpid()
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "hog":
        return len(bytearray(10 * 2**30))
    if solution_str == "leak":
        KEPT.append(b"x" * 30 * 2**20)
    if solution_str == "raise":
        raise KeyError("what the user wrote")
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "seen": data_source}
"""


MODEL = """
class Longer:
    def __init__(self, than):
        self.than = than
    def start(self):
        self.ready = True
    def score(self, samples):
        return [float(self.ready and len(sample.response) > self.than) for sample in samples]
"""


JSON = {"Content-Type": "application/json"}
PAYLOAD = {"query": ["2+2=4"], "prompts": ["2+2="], "labels": ["4"]}
BASIC = "Basic " + base64.b64encode(b":secret-token").decode()


def rows(*responses):
    return [{"prompt": "2+2=", "response": response, "ground_truth": "4"} for response in responses]


def outcomes(url, *responses, timeout_s=20.0):
    """In a thread: the function waits for its own event loop, and the service answers on this one."""
    items = [item_of_row(row, number) for number, row in enumerate(rows(*responses))]
    return asyncio.to_thread(load_function(url).score, items, timeout_s)


class Running:
    """A service or an application on a free port of this machine."""

    def __init__(self, app):
        self.app = app

    async def __aenter__(self):
        self.runner = self.app.runner() if isinstance(self.app, service.Service) else web.AppRunner(self.app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}/get_reward"

    async def __aexit__(self, *_):
        await self.runner.cleanup()
        if isinstance(self.app, service.Service):
            await self.app.close()


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    path = tmp_path_factory.mktemp("service") / "mine.py"
    path.write_text(textwrap.dedent(CODE))
    return f"{path}:grade"


@pytest.mark.slow
async def test_a_model_is_started_by_whoever_scores_with_it(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    path, kwargs = f"{tmp_path}/mine.py:Longer", {"than": 2}
    async with Running(service.Service(path, kwargs=kwargs)) as url:
        assert [score.value for score in await outcomes(url, "abc", "a")] == [1.0, 0.0]
    assert [row["reward"] for row in score_table({"path": path, "kwargs": kwargs}, rows("abc", "a"))] == [1.0, 0.0]
    with pytest.raises(RewardError, match="--kwargs 3: has to be a JSON object"):
        service.main([path, "--kwargs", "3"])


@pytest.mark.slow
async def test_a_function_gives_the_same_over_http_as_in_a_notebook_and_its_mistakes_cost_their_request(graded):
    async with Running(service.Service(graded, timeout_s=4.0, memory_mb=500)) as url:
        assert await outcomes(url, "4", "5") == [
            Score(1.0, {"length": 1.0, "scores": 1.0}),
            Score(0.0, {"length": 1.0, "scores": 0.0}),
        ]
        here, there = await asyncio.to_thread(score_table, [graded, url], rows("4"), [1.0, 10.0]), 11.0
        assert here[0]["reward"] == there and here[0]["grade"] == here[0]["get_reward"] == 1.0
        for response, words in {
            "raise": "sample 1: KeyError: 'what the user wrote'",
            "hang": "grade took longer than 4 s",
            "exit": "the process of grade ended (exit code 3)",
            "hog": "MemoryError",
        }.items():
            failures = await outcomes(url, "4", response)
            assert all(isinstance(failure, RewardFailure) for failure in failures), response
            assert "status 500" in failures[0].message and words in failures[0].message
        assert 'raise KeyError("what the user wrote")' in (await outcomes(url, "raise"))[0].traceback
        assert (await outcomes(url, "4"))[0].value == 1.0


@pytest.mark.slow
async def test_a_process_that_was_killed_while_it_had_no_request_is_replaced(graded):
    async with Running(service.Service(graded)) as url:
        (before,) = await outcomes(url, "process")
        os.kill(int(before.value), signal.SIGKILL)
        both = await asyncio.gather(outcomes(url, "process"), outcomes(url, "process"))
        assert both[0] == both[1] and both[0][0].value != before.value


@pytest.mark.slow
async def test_processes_whose_memory_is_used_up_are_replaced_and_the_request_scored_again(graded):
    async with Running(service.Service(graded, workers=2, memory_mb=100)) as url:
        for _ in range(3):
            answers = await asyncio.gather(*(outcomes(url, "leak", "4") for _ in range(4)))
            assert [[score.value for score in scores] for scores in answers] == [[0.0, 1.0]] * 4
        (failed,) = await outcomes(url, "hog")
        assert "MemoryError" in failed.message


@pytest.mark.slow
async def test_a_request_that_is_no_payload_is_told_what_one_is(graded):
    async with Running(service.Service(graded)) as url, aiohttp.ClientSession() as session:
        for payload, words in [
            ("{", "Expecting"),
            ('{"query": ' + "[" * 100_000, "brackets are nested too deep"),
            ('{"query": ' + "1" * 5000 + "}", "an integer has more than 4,300 digits"),
            (b"\xff\xfe\xfd", "codec can't decode"),
            ("[]", "no list `query`"),
            ('{"query": ["ab"]}', "`prompts` as long as `query` (1)"),
            ('{"query": ["ab"], "prompts": ["a"], "labels": []}', "`labels` is no list as long"),
            ('{"query": ["ab"], "prompts": ["b"]}', "query[0] does not begin with prompts[0]"),
        ]:
            async with session.post(url, data=payload, headers=JSON) as answer:
                assert answer.status == 400 and words in (await answer.json())["error"]
        payload = {"query": ["2+2=4"], "prompts": ["2+2="], "labels": ["4"], "data_source": ["sums"]}
        async with session.post(url.replace("get_reward", "any/path"), json=payload) as answer:
            assert await answer.json() == {"rewards": [1.0], "scores": [1.0], "extra_logs": {"length": [1.0]}}
        async with session.get(url) as answer:
            assert (await answer.json())["function"] == "grade"
        service_full = service.MOST_WAITING
        service.MOST_WAITING = 0
        async with session.post(url, json=payload) as answer:
            service.MOST_WAITING = service_full
            assert answer.status == 503 and "busy" in (await answer.json())["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "token, method, headers, status",
    [
        (None, "POST", JSON, 200),
        (None, "POST", JSON | {"Expect": "100-continue"}, 200),
        (None, "POST", JSON | {"Host": "localhost:99"}, 200),
        (None, "POST", JSON | {"Host": "[::1]:99"}, 200),
        (None, "POST", JSON | {"Host": "evil.example"}, 403),
        (None, "GET", {"Host": "evil.example"}, 403),
        (None, "POST", JSON | {"Host": "127.0.0.1.evil.example:8000"}, 403),
        (None, "POST", JSON | {"Host": "localhost@evil.example"}, 403),
        (None, "POST", JSON | {"Host": "["}, 403),
        (None, "POST", JSON | {"Host": ""}, 403),
        (None, "POST", JSON | {"Origin": "https://evil.example"}, 403),
        (None, "POST", JSON | {"Origin": "http://localhost:1"}, 403),
        (None, "POST", JSON | {"Origin": "null"}, 403),
        (None, "POST", {"Content-Type": "text/plain"}, 415),
        (None, "POST", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (None, "POST", {"Content-Type": "multipart/form-data; boundary=application/json"}, 415),
        (None, "PUT", JSON, 405),
        ("secret-token", "POST", JSON, 401),
        ("secret-token", "GET", {}, 401),
        ("secret-token", "POST", JSON | {"Authorization": "Bearer secret-toke"}, 401),
        ("secret-token", "POST", JSON | {"Authorization": "secret-token"}, 401),
        ("secret-token", "POST", JSON | {"Authorization": "Basic é"}, 401),
        ("secret-token", "POST", JSON | {"Authorization": "Bearer secret-token", "Host": "node-3:8000"}, 200),
        ("secret-token", "POST", JSON | {"Authorization": BASIC}, 200),
    ],
)
async def test_requests_that_a_web_page_can_send_and_those_without_the_token_are_refused(
    graded, monkeypatch, token, method, headers, status
):
    scored = []

    async def score(items, timeout_s):
        scored.extend(items)
        return [Score(1.0)] * len(items)

    served = service.Service(graded, token=token)
    monkeypatch.setattr(served._processes, "outcomes", score)
    async with (
        Running(served) as url,
        aiohttp.request(method, url, data=json.dumps(PAYLOAD), headers=headers) as answer,
    ):
        assert answer.status == status and bool(scored) == (status == 200)


@pytest.mark.slow
async def test_the_token_is_sent_as_the_password_of_the_url_and_is_in_no_message(graded):
    async with Running(service.Service(graded, token="secret-token")) as url:
        with_token = url.replace("http://", "http://:secret-token@")
        assert (await outcomes(with_token, "4"))[0].value == 1.0
        (refused,) = await outcomes(url, "4")
        assert "status 401: no valid token; send" in refused.message
        (failed,) = await outcomes(with_token, "raise")
        assert "status 500" in failed.message and "secret-token" not in failed.message + failed.traceback


@pytest.mark.slow
async def test_stalled_uploads_and_idle_connections_of_a_peer_do_not_block_the_service(graded, monkeypatch):
    monkeypatch.setattr(service, "READ_S", 2.0)
    monkeypatch.setattr(service, "IDLE_S", 2.0)
    monkeypatch.setattr(service, "MOST_CONNECTIONS", 300)
    served = service.Service(graded)

    async def score(items, timeout_s):
        return [Score(1.0)] * len(items)

    monkeypatch.setattr(served._processes, "outcomes", score)
    async with Running(served) as url:
        port = int(url.split(":")[2].split("/")[0])
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
        stalled = [await asyncio.open_connection("127.0.0.1", port) for _ in range(290)]
        for number, (_, writer) in enumerate(stalled):
            writer.write(head + b"\r\n{" if number % 29 else head)
        assert (await outcomes(url, "4"))[0].value == 1.0, "while the others are stalled"
        more = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        refused = await asyncio.wait_for(more[-1][0].readline(), 60)
        assert b" 503 " in refused, "connections of one peer are bounded"
        answers = [await asyncio.wait_for(reader.readline(), 60) for reader, _ in stalled]
        assert {answer[9:12] for answer in answers} == {b"408", b""}, "each gets an answer, or its connection is closed"
        assert not served._uploads
        for _, writer in stalled + more:
            writer.close()


@pytest.mark.slow
async def test_a_service_receives_json_whatever_the_truth_is():
    received = []

    async def answer(request):
        received.append(json.loads(await request.text(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON")))
        return web.json_response({"rewards": [1.0]})

    app = web.Application()
    app.router.add_post("/get_reward", answer)
    async with Running(app) as url:
        item = item_of_row({"prompt": "a", "response": "b", "ground_truth": {"x": [float("nan"), -math.inf]}}, 0)
        [scored] = await asyncio.to_thread(load_function(url).score, [item], 20.0)
    assert scored.value == 1.0 and received[0]["labels"] == [{"x": ["NaN", "-Infinity"]}]


@pytest.mark.slow
async def test_an_answer_that_is_none_is_a_failure_never_a_number():
    answers = {
        '{"rewards": [1.0, null]}': [None, "a reward has to be a number"],
        '{"rewards": [NaN, Infinity]}': ["returned nan", "returned inf"],
        '{"rewards": [1.0]}': ["returned 1 rewards for 2 samples"] * 2,
        '{"rewards": "good"}': ["it has to be a list of numbers"] * 2,
        '{"scores": [1.0, 2.0]}': ["it has to be a dict with `rewards`"] * 2,
        "<html>": ["answered something else than JSON: <html>"] * 2,
    }
    queue = []

    async def answer(request):
        assert json.loads(await request.text()) == {
            "query": ["2+2=4", "2+2=5"],
            "prompts": ["2+2="] * 2,
            "labels": ["4"] * 2,
        }
        if not queue:
            await asyncio.sleep(1)
        return web.Response(text=queue.pop(), content_type="application/json")

    app = web.Application()
    app.add_routes([web.post("/get_reward", answer)])
    async with Running(app) as url:
        for text, words in answers.items():
            queue.append(text)
            found = await outcomes(url, "4", "5")
            for outcome, part in zip(found, words, strict=True):
                if part is None:
                    assert outcome == Score(1.0)
                else:
                    assert isinstance(outcome, RewardFailure) and part in outcome.message, text
        late = await outcomes(url, "4", "5", timeout_s=0.2)
        assert [one.message for one in late] == [
            "get_reward took longer than 0.2 s (reward.timeout_s) and was stopped"
        ] * 2
        missing = await outcomes(url.replace("get_reward", "absent"), "4")
        assert "answered with status 404" in missing[0].message
    gone = await outcomes(url, "4")
    assert "could not be asked: ClientConnectorError" in gone[0].message


def test_the_command_refuses_what_it_cannot_serve(graded, tmp_path, capsys):
    assert cli.main(["reward", "serve", f"{tmp_path}/absent.py:f"]) == 2
    assert "there is no file" in capsys.readouterr().err
    for host in ("0.0.0.0", "", "::", "192.0.2.1", "no-such-host.invalid"):
        assert cli.main(["reward", "serve", graded, "--host", host]) == 2
        assert "requires a token. Set RLFUSE_REWARD_TOKEN" in capsys.readouterr().err
    assert cli.main(["reward", "serve", graded, "--timeout", "0"]) == 2
    assert "--timeout 0.0: must be above 0" in capsys.readouterr().err
