"""`python -m gateway` is `relaygen`."""

import sys

from gateway.cli import main

sys.exit(main())
