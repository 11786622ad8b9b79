"""The platform against a small HTTP server, through real boto3."""

import asyncio
import base64
import gzip
import json
import random
import socket
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rounds_kit import manifest

from gradsharding.cli import main
from gradsharding.errors import RoundFailed
from gradsharding.platforms import (
    FunctionFailed,
    FunctionSpec,
    OutOfMemory,
    Throttled,
    TimedOut,
    Unreachable,
    aws_lambda,
)
from gradsharding.platforms.aws_lambda import PLAIN_BYTES, SENT_BYTES, LambdaPlatform, pack, unqualified
from gradsharding_reducer.task import (
    Extent,
    Header,
    Method,
    Outcome,
    Part,
    ReduceResult,
    ReduceTask,
    Run,
    Source,
    SourceObject,
    Tuning,
)

ORIGIN = "http://store:9000"
FUNCTION = FunctionSpec(256, 5, 8, 8, (ORIGIN,))
RESULT = ReduceResult("round", 1, 0, "0" * 64, Outcome.DONE).to_json()
TASK = ReduceTask(
    round="round", revision=1, shard=3, plan="0" * 64, method=Method("FedAvg"),
    sources=(Source("update", 1, (SourceObject("http://store:9000/u", "e"),), (Extent(0, 4, 0, 0),)),),
    runs=(Run("F32", 0, 4),), parts=(Part(0, 1, 0, 4, "http://store:9000/p"),),
    header=Header("http://store:9000/h", 0, "0" * 64), record_url="http://store:9000/r", budget_seconds=1.0,
    tuning=Tuning(4096, 1),
)  # fmt: skip
CONFIGURATION = {
    "MemorySize": 512,
    "Timeout": 900,
    "State": "Active",
    "LastUpdateStatus": "Successful",
    "Environment": {"Variables": {"GRADSHARDING_ALLOWED_ORIGINS": ORIGIN}},
}


class FakeLambda:
    """Answers invocations with ``answer``: (status, body, headers), or a function of the handler."""

    def __init__(self):
        self.configuration = (200, json.dumps(CONFIGURATION).encode(), {})
        self.answer = (200, RESULT, {})
        self.bodies, self.paths, self.headers = [], [], []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                fake.paths.append(self.path)
                self.send(*fake.configuration)

            def do_POST(self):
                fake.paths.append(self.path)
                fake.headers.append(self.headers)
                fake.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                if callable(fake.answer):
                    fake.answer(self)
                else:
                    self.send(*fake.answer)

            def send(self, status, body, headers):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request, client_address):
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def fake(monkeypatch):
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("REGION", "eu-west-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # the store's
    fake = FakeLambda()
    monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", fake.url)
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


@asynccontextmanager
async def prepared(name="gradsharding-f", function=FUNCTION, **options):
    platform = LambdaPlatform(name, **options)
    try:
        await platform.prepare(function)
        yield platform
    finally:
        await platform.release()


def invoke(task=TASK, **options):
    async def once():
        async with prepared(**options) as platform:
            return await platform.invoke(task, 1)

    return asyncio.run(once())


def test_a_call_goes_to_the_function_in_the_regions_lambda_and_asks_for_the_log(fake):
    tail = base64.b64encode(b"REPORT RequestId: 1\tBilled Duration: 77 ms\tMemory Size: 512 MB\t\n").decode()
    fake.answer = (200, RESULT, {"X-Amz-Log-Result": tail, "x-amzn-RequestId": "request-1"})
    runtime = invoke().runtime
    assert (runtime.platform, runtime.request_id, runtime.memory_cap) == ("lambda", "request-1", "Lambda, 512 MB")
    assert runtime.billed_ms == 77
    assert fake.paths == [f"/2015-03-31/functions/gradsharding-f/{what}" for what in ("configuration", "invocations")]
    assert ReduceTask.from_json(fake.bodies[0]) == TASK
    assert fake.headers[0]["X-Amz-Invocation-Type"] == "RequestResponse"
    assert fake.headers[0]["X-Amz-Log-Type"] == "Tail"
    assert "/eu-west-1/lambda/" in fake.headers[0]["Authorization"]


def test_calls_run_at_once(fake):
    together = threading.Barrier(8, timeout=30)

    def meet(handler):
        together.wait()
        handler.send(200, RESULT, {})

    fake.answer = meet

    async def all_of_them():
        async with prepared() as platform:
            return await asyncio.gather(*(platform.invoke(TASK, 1) for _ in range(8)))

    assert len(asyncio.run(all_of_them())) == 8


def error(code, status=400, headers=None, message="scripted"):
    return (
        status,
        json.dumps({"Type": "User", "Message": message}).encode(),
        {"x-amzn-ErrorType": code} | (headers or {}),
    )


def function_error(kind, message):
    return 200, json.dumps({"errorType": kind, "errorMessage": message}).encode(), {"X-Amz-Function-Error": "Unhandled"}


def hang_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def answer_half(handler):
    handler.send_response(200)
    handler.send_header("content-length", str(len(RESULT)))
    handler.end_headers()
    handler.wfile.write(RESULT[:20])
    handler.wfile.flush()
    hang_up(handler)


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        (error("TooManyRequestsException", 429, {"Retry-After": "3"}), Throttled),
        (error("ResourceConflictException", 409), Unreachable),
        (error("ServiceException", 500), Unreachable),
        ((503, b"<html>", {}), Unreachable),
        (function_error("Runtime.ExitError", "Error: Runtime exited with error: signal: killed"), OutOfMemory),
        (function_error("Sandbox.Timedout", "Error: Task timed out after 3.00 seconds"), TimedOut),
        (function_error("ValueError", "no"), FunctionFailed),
        ((200, b"no result", {}), FunctionFailed),
        (hang_up, Unreachable),
        (answer_half, Unreachable),
    ],
)
def test_a_call_without_a_result_is_made_once_and_understood(fake, answer, meaning):
    fake.answer = answer
    with pytest.raises(meaning) as caught:
        invoke()
    assert type(caught.value) is meaning
    assert len(fake.bodies) == 1
    if meaning is Throttled:
        assert caught.value.retry_after == 3.0


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("ExpiredTokenException", 403, "CredentialsExpired"),
        ("AccessDeniedException", 403, "AccessDenied"),
        ("ResourceNotFoundException", 404, "FunctionNotFound"),
        ("RequestTooLargeException", 413, "TaskTooLarge"),
    ],
)
def test_what_no_repeat_mends_fails_the_round(fake, code, status, reason):
    fake.answer = error(code, status, message="arn:aws:iam::123:user/x")
    with pytest.raises(RoundFailed) as caught:
        invoke()
    assert caught.value.reason == reason
    assert "arn:" not in caught.value.message


def test_no_answer_in_time_is_a_timeout(fake, monkeypatch):
    monkeypatch.setattr(LambdaPlatform, "startup_seconds", 0.3)
    over = threading.Event()
    fake.answer = lambda handler: over.wait(30)
    with pytest.raises(TimedOut):
        invoke(function=replace(FUNCTION, timeout_seconds=0))
    over.set()
    assert len(fake.bodies) == 1


def test_cancelling_abandons_the_call_at_once(fake):
    arrived, over = threading.Event(), threading.Event()

    def hold(handler):
        arrived.set()
        over.wait(50)

    fake.answer = hold

    async def cancelled():
        async with prepared() as platform:
            call = asyncio.create_task(platform.invoke(TASK, 1))
            await asyncio.to_thread(arrived.wait, 30)
            started = time.monotonic()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert time.monotonic() - started < 5
            fake.answer = (200, RESULT, {})
            return await platform.invoke(TASK, 2)

    assert asyncio.run(cancelled()).outcome is Outcome.DONE
    over.set()


@pytest.mark.parametrize(
    ("name", "allowed", "may"),
    [
        ("gradsharding-reducer", None, True),
        ("gradsharding-reducer:live", None, True),
        ("payroll", None, False),
        ("arn:aws:lambda:eu-west-1:123456789012:function:gradsharding-x", None, False),
        ("payroll", ["gradsharding-*", "payroll"], True),
        ("reducer:live", ["reducer"], True),
        ("arn:aws:lambda:eu-west-1:1:function:x:2", ["arn:aws:lambda:eu-west-1:1:function:x"], True),
    ],
)
def test_only_allowed_functions_are_called(fake, name, allowed, may):
    options = {"allowed": allowed} if allowed else {}
    if may:
        assert invoke(name=name, **options).outcome is Outcome.DONE
        return
    with pytest.raises(RoundFailed, match="not among those") as caught:
        invoke(name=name, **options)
    assert caught.value.reason == "FunctionNotAllowed"
    assert fake.paths == []


def test_unqualified():
    assert unqualified("f:1") == unqualified("f") == "f"
    assert unqualified("arn:aws:lambda:r:1:function:f:live") == "arn:aws:lambda:r:1:function:f"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"MemorySize": 128}, RoundFailed, "has 128 MB"),
        ({"State": "Failed", "StateReason": "no role"}, RoundFailed, r"gradsharding-f is in state Failed \(no role\)"),
        ({"LastUpdateStatus": "InProgress"}, Unreachable, "still being created or updated"),
    ],
)
def test_a_function_that_is_not_ready_or_does_not_fit_is_never_called(fake, change, error, says):
    fake.configuration = (200, json.dumps(CONFIGURATION | change).encode(), {})
    with pytest.raises(error, match=says):
        invoke()
    assert fake.bodies == []


def test_while_the_function_is_updated_the_platform_is_in_trouble(fake):
    fake.configuration = (200, json.dumps(CONFIGURATION | {"State": "Pending"}).encode(), {})

    async def twice():
        platform = LambdaPlatform("gradsharding-f")
        with pytest.raises(Unreachable):
            await platform.prepare(FUNCTION)
        assert "still being created" in platform.trouble[1]
        fake.configuration = (200, json.dumps(CONFIGURATION).encode(), {})
        await platform.prepare(FUNCTION)
        assert platform.trouble is None
        await platform.release()

    asyncio.run(twice())


def test_without_credentials_the_round_fails_with_a_sentence(fake, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(RoundFailed) as caught:
        invoke()
    assert caught.value.reason == "CredentialsMissing"


def task_of(size, noise):
    """A task whose JSON has about ``size`` bytes; ``noise`` does not compress."""
    text = random.Random(0).randbytes(size // 2).hex() if noise else "x" * size
    return replace(TASK, record_url=f"http://store:9000/r?{text}")


def test_a_small_task_travels_as_it_is_and_a_larger_one_gzipped():
    assert pack(TASK) == TASK.to_json()
    large = task_of(PLAIN_BYTES, noise=False)
    event = json.loads(pack(large))
    assert set(event) == {"gzip"}
    assert gzip.decompress(base64.b64decode(event["gzip"])) == large.to_json()
    assert pack(large) == pack(large)


def test_a_task_over_the_limit_names_what_fills_it():
    assert len(pack(task_of(6 << 20, noise=True))) <= SENT_BYTES
    with pytest.raises(RoundFailed, match=r"shard 3 .* 1 updates with 1 extents, 1 parts") as caught:
        pack(task_of(9 << 20, noise=True))
    assert caught.value.reason == "TaskTooLarge"


def test_the_command_needs_a_round_that_names_a_function(tmp_path, capsys, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    round_file = tmp_path / "round.yaml"
    round_file.write_text(json.dumps(manifest()))
    assert main(["run", str(round_file), "--platform", "lambda"]) == 2
    assert "needs spec.function.platform: Lambda and spec.function.lambda.functionName" in capsys.readouterr().err


def test_without_boto3_the_round_says_what_to_install(monkeypatch):
    monkeypatch.setattr(aws_lambda, "find_spec", lambda name: None)
    with pytest.raises(RoundFailed, match=r"pip install 'gradsharding\[lambda\]'") as caught:
        invoke()
    assert caught.value.reason == "PlatformUnavailable"
