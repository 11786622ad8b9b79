"""What to tell a user when a store says no, or nothing: one sentence with endpoint, bucket and what to mend. Pure.

Nothing of a store's answer is shown but its error code, which must look like one.
"""

from __future__ import annotations

import re

from gradsharding.errors import StoreRefused, StoreUnreachable

_ADVICE = {
    "InvalidAccessKeyId": "it does not know the access key; check the access key that is given for this store",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key; check the secret key",
    "ExpiredToken": "the session token has expired; get new temporary keys",
    "InvalidToken": "the session token is not valid; get new temporary keys",
    "NoSuchBucket": "there is no such bucket; create it, or mend the bucket's name",
    "AccessDenied": "these keys do not have the right to; grant it to them",
    "RequestTimeTooSkewed": "the clocks differ too much; set this machine's clock",
    "InvalidObjectState": "the object is archived; restore it first",
    "InvalidRange": "the object ends before the bytes that were asked for",
    "NotImplemented": "it does not offer that; use a store that does",
    "MalformedAnswer": "the answer is not S3's; check that the endpoint is an S3 endpoint",
}
_WRONG_REGION = frozenset({"AuthorizationHeaderMalformed", "AuthorizationQueryParametersError", "PermanentRedirect"})


def refusal(origin: str, bucket: str, action: str, status: int, code: str, region: str = "") -> StoreRefused:
    """The error for a clear no. ``code`` is the store's, checked; ``region`` the one it named, unchecked."""
    if code in _WRONG_REGION or status in (301, 307, 308):
        named = f" ({region})" if re.fullmatch(r"[a-z0-9-]{1,64}", region) else ""
        why = f"the bucket is in another region{named}; set the store's region to it"
    else:
        why = _ADVICE.get(code, "check the endpoint, the bucket's name and the rights of the keys")
    shown = code or f"HTTP {status}"
    return StoreRefused(
        f"The store {origin} refused to {action} in bucket {bucket!r} ({shown}): {why}.", code or f"HTTP{status}"
    )


def no_answer(origin: str, bucket: str, action: str, cause: str) -> StoreUnreachable:
    """The error for an answer that did not come or was none."""
    return StoreUnreachable(
        f"The store {origin} gave no clear answer when asked to {action} in bucket {bucket!r} ({cause}): "
        "check the endpoint and that the store runs, then try again."
    )
