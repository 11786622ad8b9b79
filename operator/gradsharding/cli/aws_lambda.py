"""``gradsharding lambda``: package, deploy and remove the function that ``spec.function.platform: Lambda`` calls."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from gradsharding.cli.answering import answering
from gradsharding.cli.options import Json

app = typer.Typer(
    name="lambda",
    help="Deploy the reducer as an AWS Lambda function, for rounds with spec.function.platform: Lambda.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

PACKAGE_EPILOG = """[bold]Example[/bold]

  gradsharding lambda package --out build --arch arm64

The same versions give the same bytes. numpy is downloaded with pip, and checked against the hashes of this release."""

DEPLOY_EPILOG = """[bold]Examples[/bold]

  gradsharding lambda deploy --function gradsharding-reducer --role arn:aws:iam::123456789012:role/gradsharding-reducer \\
    --allow-origin https://federation.s3.eu-central-1.amazonaws.com

  gradsharding lambda deploy --function gradsharding-reducer --memory 512   [dim]# the rest stays as it is[/dim]

The role needs no right but to write logs. The policies are in docs/lambda/policies."""

REMOVE_EPILOG = """[bold]Example[/bold]

  gradsharding lambda remove --function gradsharding-reducer"""

Arch = Literal["x86_64", "arm64"]
Python = Literal["3.12", "3.13", "3.14"]

FunctionName = Annotated[str, typer.Option("--function", metavar="NAME", help="The function's name.")]
Region = Annotated[str | None, typer.Option(metavar="REGION", help="Default: AWS_REGION, or the profile's.")]
Profile = Annotated[
    str | None, typer.Option(metavar="NAME", help="Credentials of this profile. Default: boto3's chain.")
]
PythonOption = Annotated[Python, typer.Option(help="Lambda's Python runtime.")]


@app.command(epilog=PACKAGE_EPILOG)
def package(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to put the zip; made if need be.")],
    arch: Annotated[Arch, typer.Option(help="The function's processor.")] = "x86_64",
    python: PythonOption = "3.14",
    as_json: Json = False,
) -> int:
    """Build the deployment zip: the reducer and numpy."""
    with answering(as_json):
        from gradsharding.cli.exits import DONE
        from gradsharding.cli.terminal import in_bytes, print_json, print_table
        from gradsharding.deploy.package import Target, build

        built = build(out, Target(python, arch))
    if as_json:
        print_json(
            {
                "succeeded": True,
                "reason": "Built",
                "path": str(built.path),
                "bytes": built.size,
                "code_sha256": built.code_sha256,
                "runtime": built.target.runtime,
                "arch": arch,
                "requirements": list(built.pins),
            }
        )
    else:
        print_table(
            [
                ("package", f"{built.path}, {in_bytes(built.size)}"),
                ("for", f"{built.target.runtime} on {arch}, with {', '.join(built.pins)}"),
                ("code sha256", built.code_sha256),
            ]
        )
    return DONE


@app.command(epilog=DEPLOY_EPILOG)
def deploy(
    function: FunctionName,
    memory: Annotated[
        int | None, typer.Option(min=128, max=10_240, metavar="MB", help="Memory. When it is created: 256.")
    ] = None,
    timeout: Annotated[
        int | None, typer.Option(min=1, max=900, metavar="SECONDS", help="Timeout. When it is created: 900.")
    ] = None,
    role: Annotated[
        str | None, typer.Option(metavar="ARN", help="Its execution role; needed when it is created.")
    ] = None,
    arch: Annotated[Arch | None, typer.Option(help="Its processor. When it is created: x86_64.")] = None,
    reserved_concurrency: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Calls at once that are kept for it, and the most it may have."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A store that it may talk to; needed when it is created. May be repeated."),
    ] = None,
    python: PythonOption = "3.14",
    region: Region = None,
    profile: Profile = None,
    as_json: Json = False,
) -> int:
    """Create the function, or bring code and settings up to date; wait until it is active, and print what changed.

    Settings that are not given stay as they are.
    """
    with answering(as_json):
        import tempfile

        from gradsharding.cli.exits import DONE
        from gradsharding.cli.terminal import print_json, print_table, say
        from gradsharding.deploy.function import Functions, Wish, settings
        from gradsharding.deploy.package import Target, build
        from gradsharding.platforms.lambda_function import origins

        for url in allow_origin or ():
            if not origins([url]) or url.rstrip("/").count("/") != 2:
                raise typer.BadParameter(f"--allow-origin {url} is not of the form https://host or http://host:port")
        wish = Wish(function, memory, timeout, role, tuple(allow_origin or ()), reserved_concurrency)
        functions = Functions.connect(region, profile)
        current = functions.find(function)
        target = Target(python, arch or (current or {}).get("Architectures", ["x86_64"])[0])
        settings(wish, target, current)  # complains before the download
        say(f"building the package for {target.runtime} on {target.arch}")
        with tempfile.TemporaryDirectory(prefix="gradsharding-lambda-") as directory:
            built = build(Path(directory), target)
            say(f"{'updating' if current else 'creating'} {function}")
            done = functions.deploy(wish, built)
    if as_json:
        print_json(
            {
                "succeeded": True,
                "reason": "Created" if done.created else "Updated" if done.changes else "Unchanged",
                "function": function,
                "arn": done.arn,
                "code_sha256": built.code_sha256,
                "changes": [
                    {"setting": change.setting, "before": change.before, "after": change.after}
                    for change in done.changes
                ],
            }
        )
    else:
        word = "created" if done.created else "updated" if done.changes else "as asked already, nothing was changed"
        print_table([(function, word), *((c.setting, f"{c.before or '(none)'} → {c.after}") for c in done.changes)])
    return DONE


@app.command(epilog=REMOVE_EPILOG)
def remove(function: FunctionName, region: Region = None, profile: Profile = None, as_json: Json = False) -> int:
    """Delete the function. Its log group, /aws/lambda/NAME, stays."""
    with answering(as_json):
        from gradsharding.cli.exits import DONE
        from gradsharding.cli.terminal import print_json, print_table
        from gradsharding.deploy.function import Functions

        removed = Functions.connect(region, profile).remove(function)
    if as_json:
        print_json({"succeeded": True, "reason": "Removed" if removed else "Absent", "function": function})
    else:
        print_table([(function, "removed" if removed else "there was none")])
    return DONE
