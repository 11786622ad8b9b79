"""Build the images of the end-to-end tests from this checkout, and print where they are as shell assignments.

    python tests/e2e/build_images.py CLUSTER_TOOL [TAG]

CLUSTER_TOOL is called as ``CLUSTER_TOOL python-image NAME:TAG --module MODULE WHEEL...`` and must make dev.local/NAME:TAG
known to the nodes. With another way to build images, set E2E_REDUCER_IMAGE and E2E_OOM_IMAGE by hand.
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


def numpy_pin():
    """The numpy that the reducer's lock names."""
    return re.search(r"^numpy==\S+", (ROOT / "requirements/reducer.lock").read_text(), re.MULTILINE)[0]


def main(tool, tag="test"):
    with tempfile.TemporaryDirectory() as scratch:
        product = wheel(ROOT, Path(scratch) / "product")
        ballast = wheel(BALLAST, Path(scratch) / "ballast")
        for variable, name, wheels in (
            ("E2E_REDUCER_IMAGE", "reducer", [product]),
            ("E2E_OOM_IMAGE", "reducer-oom", [product, ballast]),
        ):
            command = [tool, "python-image", f"{name}:{tag}", "--module", ENTRANCE, *map(str, wheels), numpy_pin()]
            subprocess.run(command, check=True, stdout=sys.stderr)
            print(f"export {variable}=dev.local/{name}:{tag}")


if __name__ == "__main__":
    main(*sys.argv[1:])
