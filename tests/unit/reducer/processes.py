"""Starts the reducer's entrances as processes of their own."""

import contextlib
import http.client
import json
import os
import subprocess
import sys


def environment(server=None, **more):
    names = {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV"}
    env = {name: value for name, value in os.environ.items() if name in names}
    if server is not None:
        env["GRADSHARDING_ALLOWED_ORIGINS"] = server.origin
    return env | more


def run_main(document, env, arguments=(), **kwargs):
    command = [sys.executable, "-m", "gradsharding_reducer", *arguments]
    return subprocess.run(command, input=document, capture_output=True, env=env, timeout=50, **kwargs)


@contextlib.contextmanager
def serving(server, **more):
    """(process, port) of ``python -m gradsharding_reducer.serve``, which is gone afterwards."""
    command = [sys.executable, "-m", "gradsharding_reducer.serve"]
    process = subprocess.Popen(command, env=environment(server, **{"PORT": "0", **more}), stderr=subprocess.PIPE)
    try:
        yield process, json.loads(process.stderr.readline())["listening"]
    finally:
        process.kill()
        process.communicate()


def post(port, body, path="/", headers=None, timeout=50):
    """(status, parsed JSON, headers) of one POST."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        connection.request("POST", path, body, headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read()), response.headers
