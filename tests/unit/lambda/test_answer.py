"""What answers of Lambda mean, without a network."""

import base64
import json

import pytest
from botocore import exceptions as aws

from gradsharding.errors import RoundFailed
from gradsharding.platforms import FunctionFailed, FunctionSpec, OutOfMemory, Throttled, TimedOut, Unreachable
from gradsharding.platforms.aws_errors import no_answer, refusal, retry_after
from gradsharding.platforms.lambda_answer import Answer, Report, read_report, read_tail, understand, without_urls
from gradsharding.platforms.lambda_function import Readiness, check, origins
from gradsharding_reducer.task import Outcome, ReduceResult

RESULT = ReduceResult("round", 1, 0, "0" * 64, Outcome.DONE)
REPORT = (
    "REPORT RequestId: 8f5\tDuration: 1234.56 ms\tBilled Duration: 1500 ms\tMemory Size: 256 MB\t"
    "Max Memory Used: {used} MB\tInit Duration: 265.01 ms\t\n"
)
SECRET = "https://b.s3.amazonaws.com/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=5ec3e7"


def answer(kind="", message="", tail="", error="Unhandled", payload=None):
    document = {"errorMessage": message} | ({"errorType": kind} if kind else {})
    return Answer(json.dumps(document).encode() if payload is None else payload, error, tail, "8f5")


def test_a_result_knows_where_it_ran_and_what_it_bills():
    tail = "START RequestId: 8f5 Version: $LATEST\nEND RequestId: 8f5\n" + REPORT.format(used=71)
    result = understand(answer(tail=tail, error=None, payload=RESULT.to_json()), 256)
    assert result.outcome is Outcome.DONE
    assert result.runtime.platform == "lambda"
    assert result.runtime.request_id == "8f5"
    assert result.runtime.memory_cap == "Lambda, 256 MB"
    assert result.runtime.billed_ms == 1500


@pytest.mark.parametrize("payload", [b"", b"null", b"{", b"[1]", b'{"version":1}', b"\xff"])
def test_an_answer_that_is_no_result_is_a_failed_function(payload):
    with pytest.raises(FunctionFailed, match="is no result"):
        understand(answer(error=None, payload=payload), 256)


@pytest.mark.parametrize(
    ("kind", "message", "used", "meaning"),
    [
        ("Runtime.OutOfMemory", "RequestId: 8f5 Error: Runtime exited with error: signal: killed", 256, OutOfMemory),
        ("Runtime.ExitError", "RequestId: 8f5 Error: Runtime exited with error: signal: killed", 255, OutOfMemory),
        ("Runtime.ExitError", "RequestId: 8f5 Error: Runtime exited without providing a reason", 256, OutOfMemory),
        ("Runtime.ExitError", "RequestId: 8f5 Error: Runtime exited without providing a reason", 80, FunctionFailed),
        ("Runtime.ExitError", "RequestId: 8f5 Error: Runtime exited with error: exit status 1", 256, FunctionFailed),
        ("MemoryError", "", 80, OutOfMemory),
        ("Sandbox.Timedout", "RequestId: 8f5 Error: Task timed out after 3.00 seconds", 80, TimedOut),
        ("", "2026-11-30T10:00:00.000Z 8f5 Task timed out after 3.00 seconds", 80, TimedOut),
        ("Runtime.ImportModuleError", "Unable to import module 'x'", 80, FunctionFailed),
        ("ReducerFailure", "the task's source URL is not a URL", 80, FunctionFailed),
    ],
)
def test_function_errors(kind, message, used, meaning):
    with pytest.raises(meaning) as caught:
        understand(answer(kind, message, REPORT.format(used=used)), 256)
    assert type(caught.value) is meaning
    assert message in caught.value.detail
    assert caught.value.request_id == "8f5"
    assert caught.value.billed_ms == 1500


@pytest.mark.parametrize("payload", [b"", b"null", b"[]", b"\xff\x00", b'"x"', b"[" * 100_000])
def test_any_error_payload_is_a_failed_function(payload):
    with pytest.raises(FunctionFailed) as caught:
        understand(answer(payload=payload), 256)
    assert len(caught.value.detail) <= 1300


def test_the_detail_of_a_failure_holds_the_log_but_no_url():
    tail = f"START RequestId: 8f5 Version: 3\n[ERROR] cannot read {SECRET}\nTraceback\nEND RequestId: 8f5\n{REPORT}"
    with pytest.raises(FunctionFailed) as caught:
        understand(answer("OSError", f"failed at {SECRET}", tail), 256)
    assert caught.value.detail == (
        "OSError: failed at [URL removed] (log: [ERROR] cannot read [URL removed] | Traceback)"
    )


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"({SECRET})",
        f"'{SECRET}'",
        SECRET.upper(),
        "prefix&X-Amz-Security-Token=5ec3e7",
        "x=1&x-amz-signature=5ec3e7",
    ],
)
def test_nothing_of_a_signed_url_stays(text):
    assert "5ec3e7" not in without_urls(f"a {text} b").lower()


def test_half_a_url_at_the_beginning_of_a_cut_log_is_dropped():
    log = b"2b3c4d5ec3e7 is the rest of a signature\n" + b"second line\n" * 400
    cut = log[:4096]
    assert read_tail(base64.b64encode(cut).decode()).startswith("second line")
    assert read_tail(base64.b64encode(b"short\n").decode()) == "short\n"
    assert read_tail(None) == read_tail("%") == ""


def test_a_report_in_json_is_read_as_well():
    line = '{"type":"platform.report","record":{"metrics":{"durationMs":1.5,"billedDurationMs":2,"memorySizeMB":256,"maxMemoryUsedMB":71}}}'
    assert read_report(line) == Report(2, 256, 71)
    assert read_report(REPORT.format(used=71)) == Report(1500, 256, 71)
    assert read_report("") == Report()


def client_error(code, status, headers=None, **extra):
    meta = {"HTTPStatusCode": status, "RequestId": "8f5", "HTTPHeaders": headers or {}}
    return aws.ClientError({"Error": {"Code": code, "Message": SECRET}, "ResponseMetadata": meta, **extra}, "Invoke")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (client_error("ExpiredTokenException", 403), "CredentialsExpired"),
        (client_error("UnrecognizedClientException", 403), "CredentialsRefused"),
        (client_error("InvalidSignatureException", 403), "CredentialsRefused"),
        (client_error("AccessDeniedException", 403), "AccessDenied"),
        (client_error("ResourceNotFoundException", 404), "FunctionNotFound"),
        (aws.NoCredentialsError(), "CredentialsMissing"),
        (aws.ProfileNotFound(profile="p"), "CredentialsMissing"),
        (aws.NoRegionError(), "RegionMissing"),
        (aws.UnauthorizedSSOTokenError(), "CredentialsExpired"),
    ],
)
def test_what_no_waiting_mends_fails_the_round_with_a_sentence(error, reason):
    found = refusal(error, "gradsharding-x", "eu-west-1", "lambda:InvokeFunction")
    assert found.reason == reason
    assert ": " in found.message
    assert "5ec3e7" not in found.message


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (client_error("TooManyRequestsException", 429, Reason="ConcurrentInvocationLimitExceeded"), Throttled),
        (client_error("Anything", 429), Throttled),
        (client_error("EC2ThrottledException", 502), Throttled),
        (client_error("CodeSizeExceededException", 400), Throttled),
        (client_error("ResourceConflictException", 409), Unreachable),
        (client_error("ServiceException", 500), Unreachable),
        (client_error("502", 502), Unreachable),
        (client_error("InvalidRequestContentException", 400), FunctionFailed),
        (client_error("RequestTooLargeException", 413), RoundFailed),
        (aws.ReadTimeoutError(endpoint_url=SECRET), TimedOut),
        (aws.ConnectTimeoutError(endpoint_url=SECRET), Unreachable),
        (aws.ConnectionClosedError(endpoint_url=SECRET), Unreachable),
        (aws.EndpointConnectionError(endpoint_url=SECRET), Unreachable),
        (aws.ParamValidationError(report="x"), FunctionFailed),
    ],
)
def test_what_else_may_come_instead_of_an_answer(error, meaning):
    assert refusal(error, "f", None, "r") is None
    found = no_answer(error)
    assert type(found) is meaning
    assert "5ec3e7" not in str(found)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("0", 0.0),
        ("-3", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
        ("Wed, 1 Dec", 0.0),
        ("1e9", 600.0),
    ],
)
def test_retry_after(value, seconds):
    assert retry_after({"retry-after": value}) == seconds
    assert retry_after(None) == retry_after({}) == 0.0


FUNCTION = FunctionSpec(256, 300, 4, 4, ("https://s3.eu-west-1.amazonaws.com:443",))
FIT = {
    "MemorySize": 256,
    "Timeout": 900,
    "Environment": {"Variables": {"GRADSHARDING_ALLOWED_ORIGINS": "https://s3.eu-west-1.amazonaws.com http://other:1"}},
}


@pytest.mark.parametrize(
    ("change", "reason", "says"),
    [
        (
            {"MemorySize": 128},
            "FunctionTooSmall",
            "has 128 MB of memory, .*memoryMiB is 256: .* deploy --function f --memory 256$",
        ),
        (
            {"Timeout": 60},
            "FunctionTooSmall",
            "of 60 s, .*timeoutSeconds is 300: .* deploy --function f --timeout 300$",
        ),
        (
            {"Environment": {"Variables": {"GRADSHARDING_ALLOWED_ORIGINS": "http://other:1"}}},
            "OriginNotAllowed",
            "deploy --function f --allow-origin http://other:1 --allow-origin https://s3.eu-west-1.amazonaws.com:443$",
        ),
        ({"Environment": {}}, "OriginNotAllowed", "may not talk to https://s3.eu-west-1.amazonaws.com:443"),
    ],
)
def test_a_function_that_does_not_fit_is_named_with_the_mending_command(change, reason, says):
    with pytest.raises(RoundFailed, match=says) as caught:
        check(FIT | change, FUNCTION, "f")
    assert caught.value.reason == reason


def test_a_function_that_fits():
    check(FIT, FUNCTION, "f")
    check(FIT | {"MemorySize": 1024}, FUNCTION, "f")
    check(FIT | {"Environment": {"Error": {"ErrorCode": "KMSAccessDenied"}}}, FUNCTION, "f")


@pytest.mark.parametrize(
    ("state", "update", "ready", "broken"),
    [
        ("Active", "Successful", True, False),
        ("Inactive", "Successful", True, False),
        ("Pending", "Successful", False, False),
        ("Active", "InProgress", False, False),
        ("Active", "Failed", False, True),
        ("Failed", "Successful", False, True),
    ],
)
def test_readiness(state, update, ready, broken):
    found = Readiness.of({"State": state, "LastUpdateStatus": update})
    assert (found.ready, found.broken) == (ready, broken)
    assert bool(found.why) is not ready


def test_origins_have_their_ports():
    assert origins(["http://a", "https://[::1]", "https://B.example:8443/", "ftp://a", "a", "http://a:99999"]) == [
        "http://a:80",
        "https://[::1]:443",
        "https://b.example:8443",
    ]
