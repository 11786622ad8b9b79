"""Creating, updating and removing the AWS Lambda function. What is not asked for stays as it is; asking twice changes nothing."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from gradsharding.deploy.package import HANDLER, Package, Target
from gradsharding.errors import DeployFailed
from gradsharding.platforms.aws_errors import no_answer, refusal
from gradsharding.platforms.aws_lambda import connect
from gradsharding.platforms.lambda_function import ORIGINS_VARIABLE, Readiness, origins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Configuration = dict[str, Any]

MEMORY_MB = 256
TIMEOUT_SECONDS = 900
"""Of a function that is created without a word about it."""

ROLE_SECONDS = 30.0
"""A role that was made just now cannot be assumed for some seconds; AWS has no way to ask."""
READY_SECONDS = 300.0
POLL_SECONDS = 1.0
UPLOAD_SECONDS = 120.0
"""From the last byte of a package to Lambda's answer."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a function. None: as it is, or the default when it is created."""

    name: str
    memory_mb: int | None = None
    timeout_seconds: int | None = None
    role: str | None = None
    allow_origins: tuple[str, ...] = ()
    """Empty: as they are."""
    reserved_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One setting, before and after; ``before`` is empty when the function was created."""

    setting: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Deployed:
    """What ``deploy`` did. ``created`` or ``changes``, or neither when all was as asked."""

    arn: str
    created: bool
    changes: tuple[Change, ...]


def settings(wish: Wish, target: Target, current: Configuration | None) -> Configuration:
    """What the function shall be, in the words of CreateFunction, without its code and concurrency. Pure.

    Raises DeployFailed: ``RoleMissing`` or ``OriginsMissing``, when it has to be created.
    """
    now = current or {}
    role = wish.role or now.get("Role")
    variables = dict(now.get("Environment", {}).get("Variables", {}))
    if role is None:
        raise DeployFailed(
            "RoleMissing", f"there is no function {wish.name} yet: give the role that it shall have, --role ARN"
        )
    if wish.allow_origins:
        variables[ORIGINS_VARIABLE] = " ".join(origins(wish.allow_origins))
    elif current is None:
        raise DeployFailed(
            "OriginsMissing",
            f"there is no function {wish.name} yet: say which store it may talk to, "
            "--allow-origin https://BUCKET.s3.REGION.amazonaws.com for instance",
        )
    return {
        "Runtime": target.runtime,
        "Handler": HANDLER,
        "Role": role,
        "MemorySize": wish.memory_mb or now.get("MemorySize", MEMORY_MB),
        "Timeout": wish.timeout_seconds or now.get("Timeout", TIMEOUT_SECONDS),
        "Environment": {"Variables": variables},
    }


def differences(current: Configuration, wanted: Configuration, package: Package) -> tuple[Change, ...]:
    """What an update has to change, for people. Pure."""
    before = _shown(current, current.get("CodeSha256", ""), (current.get("Architectures") or ["x86_64"])[0])
    after = _shown(wanted, package.code_sha256, package.target.arch)
    return tuple(Change(name, before[name], after[name]) for name in after if before[name] != after[name])


def _shown(configuration: Mapping[str, Any], code: str, arch: str) -> dict[str, str]:
    variables = configuration.get("Environment", {}).get("Variables", {})
    return {
        "code": code,
        "arch": arch,
        "runtime": str(configuration.get("Runtime", "")),
        "handler": str(configuration.get("Handler", "")),
        "role": str(configuration.get("Role", "")),
        "memory MB": str(configuration.get("MemorySize", "")),
        "timeout s": str(configuration.get("Timeout", "")),
        "allowed origins": " ".join(origins(variables.get(ORIGINS_VARIABLE, "").split())),
    }


class Functions:
    """The functions of one account and region, through a boto3 client for Lambda."""

    def __init__(self, client: Any, sleep: Callable[[float], None] = time.sleep) -> None:
        self._client = client
        self._sleep = sleep
        self._region = str(client.meta.region_name)

    @staticmethod
    def connect(region: str | None, profile: str | None = None) -> Functions:
        """Asks nobody yet. Raises DeployFailed without a region, or when there is no such profile."""
        try:
            return Functions(connect(region, profile, read_timeout=UPLOAD_SECONDS))
        except BotoCoreError as error:
            found = refusal(error, "", region, "")
            if found is None:
                raise
            raise DeployFailed(found.reason, found.message) from None

    def find(self, name: str) -> Configuration | None:
        """The function's configuration; None when there is none. Raises DeployFailed, also when it is no reducer of ours."""
        with self._errors(name, "lambda:GetFunctionConfiguration"):
            try:
                found: Configuration = self._client.get_function_configuration(FunctionName=name)
            except ClientError as error:
                if error.response["Error"]["Code"] == "ResourceNotFoundException":
                    return None
                raise
        handler = found.get("Handler", HANDLER)  # an image has none
        if handler != HANDLER:
            raise DeployFailed(
                "NotAReducer", f"the function {name} is somebody else's, its handler is {handler}: choose another name"
            )
        if found.get("PackageType") == "Image":
            raise DeployFailed(
                "NotAReducer", f"the function {name} is made of a container image, which this command does not touch"
            )
        return found

    def deploy(self, wish: Wish, package: Package) -> Deployed:
        """Create or update the function, and wait until it is active. Raises DeployFailed."""
        current = self.find(wish.name)
        wanted = settings(wish, package.target, current)
        if current is None:
            changes: tuple[Change, ...] = ()
            self._create(wish, package, wanted)
        else:
            self._wait(wish.name)  # an update that is under way would refuse ours
            changes = self._update(wish.name, package, wanted, current)
        done = self._wait(wish.name)
        changes += self._reserve(wish)
        return Deployed(str(done["FunctionArn"]), current is None, changes)

    def remove(self, name: str) -> bool:
        """Delete the function; False when there is none. Its log group stays. Raises DeployFailed."""
        if self.find(name) is None:
            return False
        with self._errors(name, "lambda:DeleteFunction"):
            self._client.delete_function(FunctionName=name)
        return True

    def _create(self, wish: Wish, package: Package, wanted: Configuration) -> None:
        deadline = time.monotonic() + ROLE_SECONDS
        while True:
            try:
                self._client.create_function(
                    FunctionName=wish.name,
                    Code={"ZipFile": package.path.read_bytes()},
                    Architectures=[package.target.arch],
                    PackageType="Zip",
                    Description="GradsSharding reducer",
                    **wanted,
                )
            except ClientError as error:
                if not _role_is_new(error) or time.monotonic() > deadline:
                    raise self._failed(error, wish.name, "lambda:CreateFunction and iam:PassRole") from None
            except (BotoCoreError, HTTPClientError) as error:
                raise self._failed(error, wish.name, "lambda:CreateFunction and iam:PassRole") from None
            else:
                return
            self._sleep(POLL_SECONDS)

    def _update(self, name: str, package: Package, wanted: Configuration, current: Configuration) -> tuple[Change, ...]:
        """Settings first: code may need the new runtime, but never the other way round."""
        changes = differences(current, wanted, package)
        code = any(change.setting in ("code", "arch") for change in changes)
        if len(changes) > sum(change.setting in ("code", "arch") for change in changes):
            with self._errors(name, "lambda:UpdateFunctionConfiguration and iam:PassRole"):
                self._client.update_function_configuration(FunctionName=name, **wanted)
            self._wait(name)
        if code:
            with self._errors(name, "lambda:UpdateFunctionCode"):
                self._client.update_function_code(
                    FunctionName=name, ZipFile=package.path.read_bytes(), Architectures=[package.target.arch]
                )
        return changes

    def _reserve(self, wish: Wish) -> tuple[Change, ...]:
        if wish.reserved_concurrency is None:
            return ()
        with self._errors(wish.name, "lambda:GetFunctionConcurrency"):
            found = self._client.get_function_concurrency(FunctionName=wish.name).get("ReservedConcurrentExecutions")
        if found == wish.reserved_concurrency:
            return ()
        with self._errors(wish.name, "lambda:PutFunctionConcurrency"):
            self._client.put_function_concurrency(
                FunctionName=wish.name, ReservedConcurrentExecutions=wish.reserved_concurrency
            )
        before = "" if found is None else str(found)
        return (Change("reserved concurrency", before, str(wish.reserved_concurrency)),)

    def _wait(self, name: str) -> Configuration:
        """Until the function is active and its last update is through."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            with self._errors(name, "lambda:GetFunctionConfiguration"):
                configuration: Configuration = self._client.get_function_configuration(FunctionName=name)
            ready = Readiness.of(configuration)
            if ready.ready:
                return configuration
            if ready.broken or time.monotonic() > deadline:
                raise DeployFailed("FunctionNotReady", f"the Lambda function {name} {ready.why}")
            self._sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def _errors(self, name: str, right: str) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError, HTTPClientError) as error:
            raise self._failed(error, name, right) from None

    def _failed(self, error: Exception, name: str, right: str) -> DeployFailed:
        found = refusal(error, name, self._region, right)
        if found is not None:
            return DeployFailed(found.reason, found.message)
        if isinstance(error, ClientError) and error.response["Error"]["Code"] in _WRONG:
            message = str(error.response["Error"].get("Message", ""))[:500]
            reason = "RoleUnusable" if "role" in message.lower() else "SettingRefused"
            return DeployFailed(reason, f"Lambda refuses the function {name}: {message}")
        return DeployFailed("LambdaUnreachable", f"the function {name} cannot be deployed: {no_answer(error)}")


_WRONG = frozenset({"InvalidParameterValueException", "ValidationException"})


def _role_is_new(error: ClientError) -> bool:
    told = error.response["Error"]
    return told["Code"] == "InvalidParameterValueException" and "cannot be assumed" in str(told.get("Message", ""))
