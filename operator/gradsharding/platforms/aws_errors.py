"""AWS's errors → the common ones, with a sentence each. Pure; of boto3 it needs the exceptions only.

Names of errors: https://docs.aws.amazon.com/lambda/latest/api/API_Invoke.html#API_Invoke_Errors and
https://docs.aws.amazon.com/lambda/latest/api/CommonErrors.html.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from botocore import exceptions as aws

from gradsharding.errors import RoundFailed
from gradsharding.platforms import FunctionFailed, InvocationError, Throttled, TimedOut, Unreachable

if TYPE_CHECKING:
    from collections.abc import Mapping

EXPIRED = frozenset({"ExpiredTokenException", "ExpiredToken", "RequestExpired", "TokenRefreshRequired"})
REFUSED = frozenset(
    {
        "IncompleteSignature",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
DENIED = frozenset({"AccessDeniedException", "AccessDenied", "NotAuthorized", "OptInRequired"})
UNKNOWN = frozenset({"ResourceNotFoundException", "FunctionNotFound"})
TOO_LARGE = frozenset({"RequestTooLargeException", "SerializedRequestEntityTooLargeException"})
NO_ROOM = frozenset(
    {
        "TooManyRequestsException",
        "ThrottlingException",
        "Throttling",
        "CodeSizeExceededException",
        "EC2ThrottledException",
        "ENILimitReachedException",
        "SubnetIPAddressLimitReachedException",
    }
)
CHANGING = frozenset(
    {"ResourceConflictException", "ResourceNotReadyException", "ENINotReadyException", "SnapStartNotReadyException"}
)
"""The function is being created, updated or woken: soon it will not be."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What no waiting mends. ``reason`` is a documented constant in CamelCase."""

    reason: str
    message: str


def refusal(error: Exception, function: str, region: str | None, right: str) -> Refusal | None:
    """Why AWS will refuse again, or None. ``right`` is the IAM action that was asked for, ``lambda:InvokeFunction`` say."""
    where = f"in region {region}" if region else "in the configured region"
    match error:
        case aws.NoCredentialsError() | aws.PartialCredentialsError() | aws.ProfileNotFound():
            return Refusal(
                "CredentialsMissing",
                "no AWS credentials were found for Lambda: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "AWS_PROFILE, or give the operator's service account a role",
            )
        case aws.NoRegionError():
            return Refusal(
                "RegionMissing", "no AWS region is known: set spec.function.lambda.region, --region or AWS_REGION"
            )
        case aws.UnauthorizedSSOTokenError() | aws.SSOTokenLoadError() | aws.TokenRetrievalError():
            return Refusal("CredentialsExpired", "the AWS single sign-on session has expired: run aws sso login")
        case aws.ClientError():
            pass
        case _:
            return None
    code = _code(error)
    if code in EXPIRED:
        return Refusal(
            "CredentialsExpired", f"the AWS credentials have expired ({code}): get new ones and run the same again"
        )
    if code in REFUSED:
        return Refusal(
            "CredentialsRefused",
            f"AWS does not accept the credentials ({code}): check the key, its secret and this machine's clock",
        )
    if code in DENIED:
        return Refusal(
            "AccessDenied",
            f"the AWS credentials may not do {right} on {function} {where}: add it to their policy, "
            "as in docs/lambda/policies/operator.json",
        )
    if code in UNKNOWN:
        return Refusal(
            "FunctionNotFound",
            f"there is no Lambda function {function} {where}: check the name and the region, or make it with "
            f"gradsharding lambda deploy --function {function}",
        )
    return None


def round_failed(error: Exception, function: str, region: str | None, right: str) -> RoundFailed | None:
    """The same for a round."""
    found = refusal(error, function, region, right)
    return RoundFailed(found.reason, found.message) if found else None


def no_answer(error: Exception) -> InvocationError | RoundFailed:
    """What it means for the call when AWS, or the way to it, gave an error that is no ``refusal``."""
    match error:
        case aws.ClientError():
            return _client_error(error)
        case aws.ReadTimeoutError():
            return TimedOut("no answer within the timeout")
        case aws.ParamValidationError() | aws.UnknownServiceError():
            return FunctionFailed(f"bug: boto3 refuses the call ({type(error).__name__})")
        case _:  # broken or refused connections, answers cut short, instance metadata out of reach
            return Unreachable(f"Lambda cannot be reached ({type(error).__name__})")


def _client_error(error: aws.ClientError) -> InvocationError | RoundFailed:
    meta: Mapping[str, object] = error.response.get("ResponseMetadata") or {}
    status, request = int(str(meta.get("HTTPStatusCode") or 0)), str(meta.get("RequestId") or "")
    code = _code(error)
    if code in TOO_LARGE or status == 413:
        return RoundFailed("TaskTooLarge", "Lambda refuses the task as too large: raise spec.function.shards")
    if code in NO_ROOM or status == 429:
        reason = error.response.get("Reason")
        throttled = Throttled(f"{code}{f' ({reason})' if reason else ''}", retry_after(meta.get("HTTPHeaders")))
        throttled.request_id = request
        return throttled
    if code in CHANGING:
        return Unreachable(f"the function is not ready ({code})", request)
    if status >= 500 or status == 0:
        return Unreachable(f"Lambda answers {status} {code}", request)
    return FunctionFailed(f"Lambda refuses the call: {status} {code}", request)


def retry_after(headers: object) -> float:
    """Seconds of a Retry-After header; 0 when there is none that is a number. At most 10 minutes are believed."""
    try:
        seconds = float(headers.get("retry-after", 0))  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return 0.0
    return min(seconds, 600.0) if math.isfinite(seconds) and seconds > 0 else 0.0


def _code(error: aws.ClientError) -> str:
    """A word, whatever answered."""
    code = str(error.response.get("Error", {}).get("Code") or "Unknown")
    return code if code.isalnum() and len(code) <= 100 else "Unknown"
