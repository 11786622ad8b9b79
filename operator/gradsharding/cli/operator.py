"""``gradsharding operator``: the Kubernetes operator, as its image runs it."""

from typing import Annotated

import typer

EPILOG = """[bold]Examples[/bold]

  GRADSHARDING_REDUCER_IMAGE=registry.example/gradsharding-reducer:0.1.0 gradsharding operator --namespace federation

  gradsharding operator --all-namespaces   [dim]# needs a ClusterRole[/dim]

Inside of a pod it uses the pod's service account, elsewhere KUBECONFIG. All settings are environment variables that begin with
GRADSHARDING_; docs/operations.md lists them. SIGTERM stops it; rounds go on where they are when it starts again."""


def operator(
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace", "-n", metavar="NS", help="Watch this namespace. May be repeated. Default: default."
        ),
    ] = None,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Watch the whole cluster.")] = False,
    log_format: Annotated[str, typer.Option(help="json, or plain for people.")] = "json",
) -> int:
    """Watch AggregationRounds and run them, until stopped."""
    if namespace and all_namespaces:
        raise typer.BadParameter("--namespace and --all-namespaces exclude each other")
    if log_format not in ("json", "plain"):
        raise typer.BadParameter("--log-format must be json or plain")
    import os

    from gradsharding.cli.exits import DONE
    from gradsharding.kube.logs import configure
    from gradsharding.kube.main import run_until_signal
    from gradsharding.kube.settings import read_settings

    settings = read_settings(os.environ)
    configure(as_json=log_format == "json")
    run_until_signal(settings, None if all_namespaces else namespace or ["default"])
    return DONE
