"""Where the keys of a store come from. Keys stay in minio-py's providers: nothing here prints or stores them."""

from __future__ import annotations

import configparser

from minio.credentials.providers import (
    AWSConfigProvider,
    ChainedProvider,
    EnvAWSProvider,
    EnvMinioProvider,
    IamAwsProvider,
    Provider,
    StaticProvider,
)

from gradsharding.errors import StoreRefused

__all__ = ["Provider", "ambient", "static"]


def static(access_key: str, secret_key: str, session_token: str | None = None) -> Provider:
    """Keys that are already at hand. Raises StoreRefused when one of the two is empty."""
    if not access_key or not secret_key:
        raise StoreRefused("The store's access key or secret key is empty: give both.", "NoCredentials")
    return StaticProvider(access_key, secret_key, session_token or None)


def ambient(profile: str | None = None, *, iam: bool = False) -> Provider:
    """Keys from around this process: the environment, then the AWS credentials file, then, if asked, the IAM role.

    A ``profile`` that is named is the only source, as with the AWS command line. ``iam`` asks the metadata service of
    EC2, ECS or EKS over the network, so it is off unless wanted. Raises StoreRefused when there are no keys.
    """
    sources: list[Provider] = [AWSConfigProvider(profile=profile)]
    if profile is None:
        sources = [EnvAWSProvider(), EnvMinioProvider(), *sources]
        if iam:
            sources.append(IamAwsProvider())
    provider = ChainedProvider(sources)
    try:
        provider.retrieve()
    except configparser.Error:
        raise StoreRefused(
            "The AWS credentials file cannot be read: mend it, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
            "NoCredentials",
        ) from None
    except ValueError:
        where = f"in profile {profile!r} of the AWS credentials file" if profile else "for the store"
        raise StoreRefused(
            f"No keys were found {where}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN if "
            "there is one), or name a profile of the AWS credentials file in AWS_PROFILE.",
            "NoCredentials",
        ) from None
    return provider
