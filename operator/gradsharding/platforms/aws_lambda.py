"""The AWS Lambda platform: Invoke (RequestResponse) of one deployed function, as often at once as the round wants."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import os
import threading
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from gradsharding.errors import RoundFailed
from gradsharding.platforms import Unreachable, not_starting
from gradsharding.platforms.lambda_answer import Answer, read_tail, understand
from gradsharding.platforms.lambda_function import Readiness, check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gradsharding.platforms import FunctionSpec, Trouble
    from gradsharding_reducer.task import ReduceResult, ReduceTask

T = TypeVar("T")

ALLOWED = ("gradsharding-*",)
"""Which functions rounds may name, unless the operator's configuration says otherwise."""

PLAIN_BYTES = 256 << 10
"""A larger task travels gzipped."""
SENT_BYTES = 5 << 20
"""The most that is sent. Lambda takes 6 MB: https://docs.aws.amazon.com/lambda/latest/dg/gettingstarted-limits.html"""

CONNECT_SECONDS = 10.0


class LambdaPlatform:
    """Calls a function that somebody deployed (``gradsharding lambda deploy``). Use it from one event loop.

    ``function_name`` is a name or an ARN, with a version or alias if need be; it must match one of the ``allowed``
    globs, which see it without that qualifier. Credentials come from boto3's default chain: environment, profile,
    service account role. ``endpoint`` None: AWS_ENDPOINT_URL_LAMBDA, else AWS; never AWS_ENDPOINT_URL, which is the
    store's. Needs boto3, ``pip install 'gradsharding[lambda]'``.
    """

    name = "lambda"
    startup_seconds = 30.0

    def __init__(
        self,
        function_name: str,
        region: str | None = None,
        *,
        allowed: Sequence[str] = ALLOWED,
        profile: str | None = None,
        endpoint: str | None = None,
    ) -> None:
        self._function = function_name
        self._region = region
        self._allowed = tuple(allowed)
        self._profile = profile
        self._endpoint = endpoint
        self._client: Any = None
        self._memory_mb = 0
        self.trouble: Trouble | None = None

    async def prepare(self, function: FunctionSpec) -> None:
        """Look whether the function is ready, and hold it against the round: memory, timeout, allowed origins.

        ``function.ca_pem`` cannot be given to a function that is deployed already: one whose store has a private
        certificate carries it in its package. Raises RoundFailed: ``FunctionNotAllowed``, ``FunctionNotFound``,
        ``FunctionNotReady``, ``FunctionTooSmall``, ``OriginNotAllowed``, ``AccessDenied``, ``CredentialsMissing``,
        ``CredentialsExpired``, ``CredentialsRefused``, ``RegionMissing`` or ``PlatformUnavailable`` (no boto3).
        Raises an InvocationError when Lambda could not be asked, or the function is being created or updated: try again.
        """
        if not any(fnmatchcase(unqualified(self._function), glob) for glob in self._allowed):
            raise RoundFailed(
                "FunctionNotAllowed",
                f"the function {self._function} is not among those that rounds may call ({', '.join(self._allowed)}): "
                "name another in spec.function.lambda.functionName, or have the operator's allow list extended",
            )
        if self._client is None:
            self._client = await self._in_thread(lambda: self._connect(function))
        configuration = await self._in_thread(self._configuration)
        ready = Readiness.of(configuration)
        why = "" if ready.ready else f"the Lambda function {self._function} {ready.why}"
        self.trouble = not_starting(why)
        if ready.broken:
            raise RoundFailed("FunctionNotReady", why)
        if not ready.ready:
            raise Unreachable(why)
        check(configuration, function, self._function)
        self._memory_mb = int(configuration["MemorySize"])

    async def invoke(self, task: ReduceTask, attempt: int) -> ReduceResult:  # noqa: ARG002 (the protocol's)
        """Run one task. Cancelling abandons the call: the function goes on until it is done or out of time."""
        return await self._in_thread(lambda: self._invoke(task))

    async def release(self) -> None:
        """Close idle connections; the function stays."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self, function: FunctionSpec) -> Any:
        if find_spec("boto3") is None:
            raise RoundFailed("PlatformUnavailable", "boto3 is not installed: pip install 'gradsharding[lambda]'")
        with self._errors("lambda:GetFunctionConfiguration"):
            client = connect(
                self._region,
                self._profile,
                self._endpoint,
                # Beyond the function's end, so that no call is given up that could still answer.
                read_timeout=function.timeout_seconds + self.startup_seconds,
                retries={"total_max_attempts": 1},  # a repeat is the round's to decide: it looks at the records first
                max_pool_connections=function.max_concurrency,
                tcp_keepalive=True,  # a call may be silent for 15 minutes, and NAT forgets connections sooner
            )
        self._region = client.meta.region_name
        return client

    def _configuration(self) -> Mapping[str, Any]:
        with self._errors("lambda:GetFunctionConfiguration"):
            found: Mapping[str, Any] = self._client.get_function_configuration(FunctionName=self._function)
            return found

    def _invoke(self, task: ReduceTask) -> ReduceResult:
        client, payload = self._client, pack(task)
        assert client is not None, "prepare comes first"
        with self._errors("lambda:InvokeFunction"):
            response = client.invoke(
                FunctionName=self._function, InvocationType="RequestResponse", LogType="Tail", Payload=payload
            )
            answer = Answer(
                payload=response["Payload"].read(),
                function_error=response.get("FunctionError"),
                tail=read_tail(response.get("LogResult")),
                request_id=str(response["ResponseMetadata"].get("RequestId", "")),
            )
        return understand(answer, self._memory_mb)

    @contextlib.contextmanager
    def _errors(self, right: str) -> Any:
        """Around a request: AWS's errors become the common ones."""
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

        from gradsharding.platforms.aws_errors import no_answer, round_failed

        try:
            yield
        except (BotoCoreError, ClientError, HTTPClientError, OSError) as error:
            raise round_failed(error, self._function, self._region, right) or no_answer(error) from None

    @staticmethod
    async def _in_thread(work: Callable[[], T]) -> T:
        """Run it in a daemon thread. One that is abandoned keeps neither a slot nor the end of the process waiting, as an
        executor's would: up to 15 minutes."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            if done.done():  # abandoned
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, failure = None, None
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - passed on to who waits
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(finish, result, failure)

        threading.Thread(target=run, name="lambda", daemon=True).start()
        return await done


def connect(region: str | None, profile: str | None = None, endpoint: str | None = None, **options: Any) -> Any:
    """A boto3 client for Lambda; ``options`` are botocore's. Raises botocore's exceptions.

    AWS_ENDPOINT_URL is the store's, here as everywhere in this program, so that Lambda has AWS_ENDPOINT_URL_LAMBDA alone.
    """
    import boto3
    from botocore.config import Config

    options |= {"connect_timeout": CONNECT_SECONDS, "ignore_configured_endpoint_urls": True}
    session = boto3.Session(profile_name=profile, region_name=region or os.environ.get("AWS_REGION"))
    return session.client(
        "lambda",
        config=Config(**options),
        endpoint_url=endpoint or os.environ.get("AWS_ENDPOINT_URL_LAMBDA"),
    )


def pack(task: ReduceTask) -> bytes:
    """A task as the function's event. Raises RoundFailed (TaskTooLarge)."""
    document = task.to_json()
    if len(document) <= PLAIN_BYTES:
        return document
    sent = b'{"gzip":"' + base64.b64encode(gzip.compress(document, 6, mtime=0)) + b'"}'
    if len(sent) > SENT_BYTES:
        extents = sum(len(source.extents) for source in task.sources)
        raise RoundFailed(
            "TaskTooLarge",
            f"the task of shard {task.shard} takes {len(sent) / 2**20:.1f} MiB packed, Lambda takes {SENT_BYTES >> 20}: "
            f"{len(task.sources)} updates with {extents} extents, {len(task.parts)} parts; raise spec.function.shards, "
            "or let clients write their tensors in one order",
        )
    return sent


def unqualified(function: str) -> str:
    """A name or ARN without its version or alias: ``name:alias``, ``arn:aws:lambda:region:account:function:name:alias``."""
    fields = function.split(":")
    return ":".join(fields[:7]) if fields[0] == "arn" else fields[0]
