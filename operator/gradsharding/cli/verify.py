"""``gradsharding verify``: the output once more, by plain numpy, and bit by bit."""

from gradsharding.cli.answering import answering
from gradsharding.cli.options import Endpoint, Json, OutputKey, Profile, RoundFile

EPILOG = """[bold]Examples[/bold]

  gradsharding verify round.yaml

  gradsharding verify round.yaml --output-key digits/7/second.safetensors --json

All updates that took part are read again, in blocks: this takes little memory, but the network of a whole round."""


def verify(
    round_file: RoundFile,
    output_key: OutputKey = None,
    as_json: Json = False,
    profile: Profile = None,
    endpoint: Endpoint = None,
) -> int:
    """Compute a finished round's output anew from the updates that its manifest names, and compare all bits."""
    with answering(as_json):
        import time

        from gradsharding.cli import opening
        from gradsharding.cli.display import byte_bar
        from gradsharding.cli.exits import DONE, FAILED
        from gradsharding.cli.terminal import complain, in_bytes, print_json, print_table
        from gradsharding.errors import StoreUnreachable
        from gradsharding.rounds.verify import verify as compare

        started = time.monotonic()
        spec = opening.read_round(round_file, output_key)
        updates, output = opening.open_buckets(spec, profile, endpoint)
        try:
            with byte_bar("comparing with plain numpy") as watch:
                found = compare(updates, output, spec.output.key, watch)
        except StoreUnreachable as error:
            raise opening.advised(error, spec, endpoint) from None
        seconds = time.monotonic() - started
    where, different = f"{spec.output.bucket}/{spec.output.key}", found.difference
    if different is None:
        message = f"{where} has the bits of the reference, made of {found.participants} updates"
    else:
        element = f"tensor {different.tensor!r} at {list(different.position)}"
        message = (
            f"{where} differs first in {element}: it holds {different.output}, the reference {different.reference}"
        )
    if as_json:
        print_json(
            {
                "succeeded": different is None,
                "reason": "Equal" if different is None else "Different",
                "message": message,
                "output": {
                    "bucket": spec.output.bucket,
                    "key": spec.output.key,
                    "bytes": found.output.size,
                    "etag": found.output.etag,
                },
                "participants": found.participants,
                "bytes_read": found.bytes_read,
                "seconds": round(seconds, 3),
                "difference": different._asdict() if different else None,
            }
        )
    elif different is None:
        print_table([("equal", message), ("read", f"{in_bytes(found.bytes_read)} in {seconds:.1f} s")])
    if different is not None:
        complain("error", message)
    return DONE if different is None else FAILED
