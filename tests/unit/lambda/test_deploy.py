"""``lambda deploy`` and ``lambda remove`` against moto's control plane."""

import base64
import hashlib
import json
import zipfile

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from gradsharding.cli import main
from gradsharding.deploy import function as deploying
from gradsharding.deploy.function import Change, Functions, Wish
from gradsharding.deploy.package import HANDLER, Package, Target
from gradsharding.errors import DeployFailed

NAME = "gradsharding-test"
ORIGIN = "https://federation.s3.eu-west-1.amazonaws.com"


def package(directory, content="1", target=None):
    path = directory / f"{content}.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a.py"), content)
    digest = base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
    return Package(path, path.stat().st_size, digest, target or Target(), ("numpy==2",))


@pytest.fixture
def aws(monkeypatch):
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("REGION", "eu-west-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with mock_aws():
        yield boto3.client("lambda", region_name="eu-west-1")


@pytest.fixture
def role(aws):
    trust = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
        ],
    }
    iam = boto3.client("iam", region_name="eu-west-1")
    return iam.create_role(RoleName="reducer", AssumeRolePolicyDocument=json.dumps(trust))["Role"]["Arn"]


@pytest.fixture
def functions(aws):
    return Functions(aws, sleep=lambda seconds: None)


@pytest.fixture
def deployed(functions, role, tmp_path):
    return functions.deploy(Wish(NAME, role=role, allow_origins=(ORIGIN,)), package(tmp_path))


def configuration(aws):
    return aws.get_function_configuration(FunctionName=NAME)


def test_a_function_is_created_with_defaults(aws, role, deployed):
    assert deployed.created
    assert deployed.changes == ()
    found = configuration(aws)
    assert found["FunctionArn"] == deployed.arn
    assert (found["MemorySize"], found["Timeout"], found["Runtime"]) == (256, 900, "python3.14")
    assert (found["Handler"], found["Role"], found["Architectures"]) == (HANDLER, role, ["x86_64"])
    assert found["Environment"]["Variables"] == {"GRADSHARDING_ALLOWED_ORIGINS": f"{ORIGIN}:443"}


def test_asking_for_the_same_again_changes_nothing(aws, functions, role, deployed, tmp_path, monkeypatch):
    before = configuration(aws)
    for call in ("update_function_code", "update_function_configuration", "put_function_concurrency"):
        monkeypatch.setattr(aws, call, lambda **_: pytest.fail("nothing was to be changed"))
    again = functions.deploy(Wish(NAME, 256, 900, role, (ORIGIN,)), package(tmp_path))
    assert not again.created
    assert again.changes == ()
    assert configuration(aws)["LastModified"] == before["LastModified"]


def test_what_changed_is_told_and_the_rest_stays(aws, functions, role, deployed, tmp_path):
    aws.update_function_configuration(
        FunctionName=NAME, Environment={"Variables": {"MINE": "1", "GRADSHARDING_ALLOWED_ORIGINS": f"{ORIGIN}:443"}}
    )
    old, new = package(tmp_path), package(tmp_path, "2")
    done = functions.deploy(Wish(NAME, memory_mb=512, reserved_concurrency=8), new)
    assert set(done.changes) == {
        Change("code", old.code_sha256, new.code_sha256),
        Change("memory MB", "256", "512"),
        Change("reserved concurrency", "", "8"),
    }
    found = configuration(aws)
    assert (found["MemorySize"], found["Timeout"], found["Role"]) == (512, 900, role)
    assert found["CodeSha256"] == new.code_sha256
    assert found["Environment"]["Variables"]["MINE"] == "1"
    assert aws.get_function_concurrency(FunctionName=NAME)["ReservedConcurrentExecutions"] == 8


def test_other_origins_replace_the_former(aws, functions, deployed, tmp_path):
    done = functions.deploy(Wish(NAME, allow_origins=("http://minio:9000", ORIGIN)), package(tmp_path))
    assert done.changes == (Change("allowed origins", f"{ORIGIN}:443", f"http://minio:9000 {ORIGIN}:443"),)


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (Wish(NAME, allow_origins=(ORIGIN,)), "RoleMissing"),
        (Wish(NAME, role="arn:aws:iam::1:role/x"), "OriginsMissing"),
    ],
)
def test_a_new_function_needs_a_role_and_an_origin(functions, wish, reason, tmp_path):
    with pytest.raises(DeployFailed, match=f"no function {NAME} yet") as caught:
        functions.deploy(wish, package(tmp_path))
    assert caught.value.reason == reason


def test_a_wrong_role_is_told_in_lambdas_words(functions, tmp_path, monkeypatch):
    monkeypatch.setattr(deploying, "ROLE_SECONDS", 0.0)
    with pytest.raises(DeployFailed, match="role") as caught:
        functions.deploy(
            Wish(NAME, role="arn:aws:iam::123456789012:role/nobody", allow_origins=(ORIGIN,)), package(tmp_path)
        )
    assert caught.value.reason == "RoleUnusable"
    with pytest.raises(DeployFailed) as caught:
        functions.deploy(Wish(NAME, role="no arn", allow_origins=(ORIGIN,)), package(tmp_path))
    assert caught.value.reason == "RoleUnusable"


def test_a_role_that_is_not_known_everywhere_yet_is_waited_for(aws, role, functions, tmp_path, monkeypatch):
    create, refusals = aws.create_function, iter([True, True, False])

    def create_function(**wanted):
        if next(refusals):
            told = {
                "Code": "InvalidParameterValueException",
                "Message": "The role defined for the function cannot be assumed by Lambda.",
            }
            raise ClientError({"Error": told, "ResponseMetadata": {"HTTPStatusCode": 400}}, "CreateFunction")
        return create(**wanted)

    monkeypatch.setattr(aws, "create_function", create_function)
    assert functions.deploy(Wish(NAME, role=role, allow_origins=(ORIGIN,)), package(tmp_path)).created


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("AccessDeniedException", 403, "AccessDenied"),
        ("ExpiredTokenException", 403, "CredentialsExpired"),
        ("ServiceException", 500, "LambdaUnreachable"),
    ],
)
def test_what_aws_refuses_is_a_sentence(aws, functions, deployed, tmp_path, monkeypatch, code, status, reason):
    def refuse(**_):
        raise ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Update")

    monkeypatch.setattr(aws, "update_function_code", refuse)
    with pytest.raises(DeployFailed) as caught:
        functions.deploy(Wish(NAME), package(tmp_path, "2"))
    assert caught.value.reason == reason


def test_it_waits_until_the_function_is_active(aws, functions, deployed, tmp_path, monkeypatch):
    ask, pending = aws.get_function_configuration, iter([{}, {"State": "Pending"}, {"LastUpdateStatus": "InProgress"}])
    monkeypatch.setattr(aws, "get_function_configuration", lambda **of: ask(**of) | next(pending, {}))
    functions.deploy(Wish(NAME), package(tmp_path))
    assert next(pending, None) is None


def test_somebody_elses_function_is_neither_changed_nor_removed(aws, functions, role, tmp_path):
    aws.create_function(
        FunctionName=NAME, Runtime="python3.13", Role=role, Handler="app.main",
        Code={"ZipFile": package(tmp_path).path.read_bytes()},
    )  # fmt: skip
    for act in (lambda: functions.deploy(Wish(NAME), package(tmp_path)), lambda: functions.remove(NAME)):
        with pytest.raises(DeployFailed, match=r"its handler is app\.main"):
            act()
    assert configuration(aws)["Handler"] == "app.main"


def test_removing_twice(functions, deployed):
    assert functions.remove(NAME)
    assert not functions.remove(NAME)
    assert functions.find(NAME) is None


def test_the_commands_say_what_they_did(aws, role, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gradsharding.deploy.package.build", lambda directory, target: package(tmp_path, target=target))

    def run(*arguments):
        status = main(["lambda", *arguments, "--function", NAME, "--json"])
        return status, json.loads(capsys.readouterr().out)

    assert run("deploy", "--arch", "arm64")[1]["reason"] == "RoleMissing"
    status, told = run("deploy", "--role", role, "--allow-origin", ORIGIN, "--arch", "arm64")
    assert (status, told["reason"], told["changes"]) == (0, "Created", [])
    assert run("deploy")[1]["reason"] == "Unchanged"  # arm64 stays, too
    status, told = run("deploy", "--timeout", "60")
    assert told["changes"] == [{"setting": "timeout s", "before": "900", "after": "60"}]
    assert main(["lambda", "deploy", "--function", NAME, "--memory", "300"]) == 0
    assert "256 → 300" in capsys.readouterr().out
    assert main(["lambda", "deploy", "--function", NAME, "--allow-origin", "no-url"]) == 2
    assert run("remove") == (0, {"succeeded": True, "reason": "Removed", "function": NAME})
    assert run("remove")[1]["reason"] == "Absent"
