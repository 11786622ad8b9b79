"""The policies in the docs give what is needed and no more."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
POLICIES = {path.stem: json.loads(path.read_text()) for path in (DOCS / "lambda" / "policies").glob("*.json")}
FUNCTION = "arn:aws:lambda:eu-central-1:123456789012:function:gradsharding-reducer"


def statements(name):
    return POLICIES[name]["Statement"]


def as_list(value):
    return [value] if isinstance(value, str) else value


def actions(name):
    return {action for statement in statements(name) for action in as_list(statement["Action"])}


def resources(name):
    return {resource for statement in statements(name) for resource in as_list(statement["Resource"])}


@pytest.mark.parametrize("name", POLICIES)
def test_each_is_a_policy_that_allows_no_wildcard_action(name):
    assert POLICIES[name]["Version"] == "2012-10-17"
    assert {statement["Effect"] for statement in statements(name)} == {"Allow"}
    assert not [action for action in actions(name) if "*" in action]
    if name != "trust":
        assert not [
            resource for resource in resources(name) if re.match(r"\*|arn:aws:[a-z0-9]+:[^:]*:[^:]*:\*", resource)
        ]


def test_the_functions_role_writes_its_log_and_nothing_else():
    assert actions("execution") == {"logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents"}
    log = "arn:aws:logs:eu-central-1:123456789012:log-group:/aws/lambda/gradsharding-reducer"
    assert resources("execution") == {log, f"{log}:*"}
    assert statements("trust")[0]["Principal"] == {"Service": "lambda.amazonaws.com"}
    assert actions("trust") == {"sts:AssumeRole"}


def test_the_operator_calls_and_looks_at_this_function_only():
    assert actions("operator") == {"lambda:InvokeFunction", "lambda:GetFunctionConfiguration"}
    assert resources("operator") == {FUNCTION}


def test_who_deploys_may_do_what_the_code_does():
    source = (DOCS.parent / "operator" / "gradsharding" / "deploy" / "function.py").read_text()
    calls = set(re.findall(r"self\._client\.([a-z_]+)\(", source))
    assert calls
    needed = {"lambda:" + "".join(word.capitalize() for word in call.split("_")) for call in calls}
    assert actions("deploy") == needed | {"iam:PassRole"}
    (pass_role,) = (statement for statement in statements("deploy") if statement["Action"] == "iam:PassRole")
    assert pass_role["Condition"] == {"StringEquals": {"iam:PassedToService": "lambda.amazonaws.com"}}
    assert resources("deploy") == {FUNCTION, "arn:aws:iam::123456789012:role/gradsharding-reducer"}


def test_the_documentation_names_every_policy():
    page = (DOCS / "lambda.md").read_text()
    assert {name for name in POLICIES if f"lambda/policies/{name}.json" in page} == set(POLICIES)
