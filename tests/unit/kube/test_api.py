"""What the operator says when it cannot begin."""

import pytest
from kubernetes.aio.client import ApiException

from gradsharding.errors import SettingsError
from gradsharding.kube.api import KubeApi


class Refusing(KubeApi):
    def __init__(self, status):
        self.status = status

    async def rounds(self, namespace):
        raise ApiException(status=self.status)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("status", "namespace", "words"),
    [
        (404, "team", "no AggregationRounds: kubectl apply -f crds/"),
        (403, "team", "may not list AggregationRounds of namespace team"),
        (403, None, "may not list AggregationRounds of the cluster"),
    ],
)
async def test_rounds_that_cannot_be_listed_are_one_sentence(status, namespace, words):
    with pytest.raises(SettingsError, match=words):
        await Refusing(status).check_rounds(namespace)


@pytest.mark.asyncio
async def test_other_refusals_are_not_hidden():
    with pytest.raises(ApiException):
        await Refusing(500).check_rounds("team")
