"""What the Kubernetes API refuses about a function → something a user can act on. Pure; takes the official client's ApiException."""

from __future__ import annotations

import json
import re
from typing import Any

from gradsharding.errors import RoundFailed
from gradsharding.platforms import Unreachable


def is_about_the_object(error: Any) -> bool:
    """A 404 of a missing object, not of a missing API."""
    try:
        return bool(json.loads(error.body).get("details", {}).get("name"))
    except (ValueError, TypeError, AttributeError):
        return False


def refused(error: Any) -> Exception:
    """The API's refusal as something a user can act on."""
    text = error.body or ""
    try:
        message = str(json.loads(text).get("message", ""))[:600]
    except (ValueError, AttributeError):
        message = text[:200]
    if error.status == 404:
        return RoundFailed(
            "RuntimeUnavailable",
            "Knative Serving is not installed in this cluster: `kubectl get crd services.serving.knative.dev` would show it",
        )
    if error.status == 403 and "webhook" not in message:
        return RoundFailed("Forbidden", f"the operator may not manage Knative Services here: {message}")
    if "imeoutSeconds" in message or "timeout" in message.lower():
        return RoundFailed(
            "TimeoutNotAllowed",
            f"Knative refuses spec.function.timeoutSeconds: {message}; lower it, or raise max-revision-timeout-seconds "
            "in the ConfigMap config-defaults of namespace knative-serving",
        )
    flag = _feature_flag(message)
    if flag:
        return RoundFailed(
            "FeatureDisabled",
            f"Knative forbids a setting of function pods: set {flag} to enabled in the ConfigMap config-features of namespace "
            f"knative-serving, or drop the setting ({message})",
        )
    if error.status in (400, 422):
        return RoundFailed("FunctionRejected", f"Knative rejects the function: {message}")
    return Unreachable(f"the Kubernetes API answered {error.status}: {message}")


def _feature_flag(message: str) -> str:
    flags = {
        "nodeSelector": "kubernetes.podspec-nodeselector",
        "tolerations": "kubernetes.podspec-tolerations",
        "securityContext": "kubernetes.podspec-securitycontext",
        "affinity": "kubernetes.podspec-affinity",
    }
    found = re.search(r"must not set the field\(s\): (.*)", message)
    return next((flag for name, flag in flags.items() if found and name in found.group(1)), "")
