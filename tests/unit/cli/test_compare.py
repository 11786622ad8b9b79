"""``plan --compare``: other sizes with time and cost, as a table and as JSON."""

import json

from rounds_kit import tensors, upload

from gradsharding.cli.summary import summary

LAMBDA = {
    "platform": "Lambda",
    "memoryMiB": 200,
    "maxConcurrency": 4,
    "lambda": {"functionName": "gradsharding-reducer"},
}


def put_updates(bucket, elements=3000):
    for i in range(3):
        upload(bucket, f"{i}.safetensors", tensors(i, elements))


def test_the_table_marks_three_and_says_why(bucket, command, round_file):
    put_updates(bucket)
    status, out, _ = command("plan", round_file(function=LAMBDA), "--compare")
    assert status == 0
    lines = out.splitlines()
    assert any(line.startswith("estimate ") and "--compare shows" in line for line in lines)
    marked = [line.split()[5:] for line in lines if line.endswith(("cheapest", "fastest", "knee"))]
    assert sorted(word.strip(",") for words in marked for word in words) == ["cheapest", "fastest", "knee"]
    assert any(line.startswith(("The knee is", "128 MiB")) for line in lines)
    assert lines[-1].startswith("Estimates for AWS Lambda")


def test_json_has_every_row(bucket, command, round_file):
    put_updates(bucket)
    status, out, _ = command("plan", round_file(function=LAMBDA), "--compare", "--json")
    (line,) = out.splitlines()
    found = json.loads(line)
    comparison = found["comparison"]
    assert status == 0
    assert set(comparison) == {"prices", "rows", "misfits", "why"}
    assert {row["memory_mib"] for row in comparison["rows"]} >= {128, 200, 10_240}
    assert sorted(mark for row in comparison["rows"] for mark in row["marks"]) == ["cheapest", "fastest", "knee"]
    (own,) = [r for r in comparison["rows"] if (r["memory_mib"], r["shards"]) == (200, found["shards"]["total"])]
    assert {**own, "marks": []} == {**found["estimate"], "marks": []}


def test_without_the_option_and_lambda_there_is_no_estimate(bucket, command, round_file):
    put_updates(bucket)
    _, out, _ = command("plan", round_file(), "--json")
    assert not {"estimate", "comparison"} & set(json.loads(out))


def test_a_round_on_knative_can_be_compared(bucket, command, round_file):
    put_updates(bucket)
    status, out, _ = command("plan", round_file(), "--compare")
    assert status == 0
    assert "knee" in out


def test_the_end_of_a_round_tells_its_bill():
    result = {
        "succeeded": True, "reason": "Succeeded", "message": "done", "bytes_read": 0, "max_reducer_rss_bytes": 0, "seconds": 9.0,
        "updates": {"participants": 2, "found": 2, "rejected": [], "excluded": []},
        "shards": {"total": 0}, "output": {"bytes": None},
    }  # fmt: skip
    cost = {"usd_x86_64": 0.00125, "usd_arm64": 0.001125, "gb_seconds": 61.25}
    rows = dict(summary(result, {"attempts": [], "cost": cost}, 256))
    assert rows["cost"] == "$0.001250 on x86 (arm $0.001125), 61.2 GB-s"
    assert "cost" not in dict(summary(result, {"attempts": []}, 256))
