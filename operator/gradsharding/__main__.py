"""``python -m gradsharding``: the command line, for images, where no script is installed."""

import sys

from gradsharding.cli import main

if __name__ == "__main__":
    sys.exit(main())
