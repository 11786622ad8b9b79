"""A namespace of the test cluster, made for tests and removed by them."""

import http.client
import json
import subprocess
import uuid

from cluster import kubectl
from e2e.waiting import wait_for

ROUNDS = "apis/gradsharding.dev/v1alpha1"
SERVICES = "apis/serving.knative.dev/v1"


class Api:
    """Reads of the API server through ``kubectl proxy``: a kubectl for each would take more time than what is measured."""

    def __init__(self):
        self._process = subprocess.Popen(["kubectl", "proxy", "--port=0"], stdout=subprocess.PIPE, text=True)
        self._port = int(self._process.stdout.readline().rsplit(":", 1)[1])

    def text(self, path):
        """The answer's body; None on 403 and 404."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("GET", f"/{path}")
            response = connection.getresponse()
            body = response.read().decode()
        finally:
            connection.close()
        if response.status in (403, 404):
            return None
        assert response.status == 200, f"GET {path}: {response.status} {body[:500]}"
        return body

    def get(self, path):
        body = self.text(path)
        return None if body is None else json.loads(body)

    def close(self):
        self._process.terminate()
        self._process.communicate(timeout=10)


class Namespace:
    """Rounds, functions and pods in it."""

    def __init__(self, api, keys, purpose):
        self.api, self.name = api, f"gradsharding-e2e-{purpose}-{uuid.uuid4().hex[:6]}"
        kubectl("create", "namespace", self.name)
        self.set_secret("store-credentials", keys)

    def kubectl(self, *arguments, **keywords):
        return kubectl("-n", self.name, *arguments, **keywords)

    def set_secret(self, name, keys):
        data = {"accessKey": keys[0], "secretKey": keys[1]}
        self.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data})

    def apply(self, document):
        self.kubectl("apply", "-f", "-", document=document)

    def patch(self, name, spec):
        self.kubectl("patch", "agground", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def round(self, name):
        return self.api.get(f"{ROUNDS}/namespaces/{self.name}/aggregationrounds/{name}")

    def condition(self, name, kind="Succeeded"):
        """A condition as (status, reason, message); empty strings when it is not there."""
        conditions = ((self.round(name) or {}).get("status") or {}).get("conditions", [])
        return next(((c["status"], c["reason"], c["message"]) for c in conditions if c["type"] == kind), ("", "", ""))

    def until(self, name, reason, seconds=90):
        """Wait until Succeeded has this reason; its (status, reason, message)."""

        def look():
            condition = self.condition(name)
            assert condition[0] in ("", "Unknown") or condition[1] == reason, f"the round ended otherwise: {condition}"
            return condition if condition[1] == reason else None

        return wait_for(f"round {name}: {reason}", look, seconds)

    def end_of(self, name, seconds=120, meanwhile=lambda: None):
        """Wait for the end of a round; the whole round."""

        def look():
            meanwhile()
            return self.condition(name)[0] in ("True", "False")

        try:
            wait_for(f"the end of round {name}", look, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.condition(name)}") from None
        return self.round(name)

    def success_of(self, name, seconds=120, meanwhile=lambda: None):
        round_ = self.end_of(name, seconds, meanwhile)
        assert self.condition(name)[0] == "True", self.condition(name)
        return round_

    def events(self, reason):
        found = self.api.get(f"api/v1/namespaces/{self.name}/events")["items"]
        return [event["message"] for event in found if event["reason"] == reason]

    def services(self):
        return self.api.get(f"{SERVICES}/namespaces/{self.name}/services")["items"]

    def function_pods(self):
        """Pods of functions that are not being deleted."""
        selector = "labelSelector=app.kubernetes.io/component%3Dreducer"
        pods = self.api.get(f"api/v1/namespaces/{self.name}/pods?{selector}")["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def delete(self, name):
        """Delete a round, and wait until it is gone."""
        self.kubectl("delete", "agground", name, "--wait=false")
        wait_for(f"round {name} is gone", lambda: self.round(name) is None)

    def remove(self):
        """All of it. Rounds that no operator looks after any more are let go; pods do not drain."""
        for round_ in self.api.get(f"{ROUNDS}/namespaces/{self.name}/aggregationrounds")["items"]:
            if round_["metadata"].get("finalizers"):
                release = json.dumps({"metadata": {"finalizers": None}})
                self.kubectl(
                    "patch", "agground", round_["metadata"]["name"], "--type=merge", "-p", release, check=False
                )
        kubectl("delete", "namespace", self.name, "--wait=false")
        self.kubectl("delete", "pods", "--all", "--grace-period=0", "--force", "--wait=false", check=False)
