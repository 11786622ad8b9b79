"""Build the images of the end-to-end tests from this checkout, and print where they are as shell assignments.

    python tests/e2e/build_images.py CLUSTER_TOOL [TAG]

CLUSTER_TOOL is called as ``CLUSTER_TOOL python-image NAME:TAG --module MODULE PIP_ARGUMENT...`` and must make dev.local/NAME:TAG
known to the nodes. With another way to build images, set E2E_OPERATOR_IMAGE, E2E_REDUCER_IMAGE and E2E_OOM_IMAGE by hand.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BALLAST = Path(__file__).parent / "ballast"
HATCHLING = Path(sys.executable).parent / "hatchling"
ENTRANCE = "gradsharding_reducer.serve"


def wheel(project, folder):
    """Build the wheel of a project folder."""
    folder.mkdir()
    subprocess.run([HATCHLING, "build", "-t", "wheel", "-d", folder], cwd=project, check=True, stdout=sys.stderr)
    return next(folder.glob("*.whl"))


def pins(lock):
    """The versions of a lock as constraints. Without its hashes: the wheel of this checkout has none."""
    return "\n".join(re.findall(r"^([a-z0-9._-]+==[^\\\n]*)", lock.read_text(), re.MULTILINE))


def main(tool, tag="test"):
    with tempfile.TemporaryDirectory() as scratch:
        product = wheel(ROOT, Path(scratch) / "product")
        ballast = wheel(BALLAST, Path(scratch) / "ballast")
        for variable, name, entrance, wheels in (
            (
                "E2E_OPERATOR_IMAGE",
                "operator",
                ("--entrypoint", "python3 -m gradsharding"),
                [f"{product}[operator,lambda]"],
            ),
            ("E2E_REDUCER_IMAGE", "reducer", ("--module", ENTRANCE), [product]),
            ("E2E_OOM_IMAGE", "reducer-oom", ("--module", ENTRANCE), [product, ballast]),
        ):
            constraints = Path(scratch) / "constraints.txt"
            constraints.write_text(pins(ROOT / f"requirements/{'operator' if name == 'operator' else 'reducer'}.lock"))
            command = [tool, "python-image", f"{name}:{tag}", *entrance, *wheels, "-c", constraints]
            subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
            print(f"export {variable}=dev.local/{name}:{tag}")


if __name__ == "__main__":
    main(*sys.argv[1:])
