"""`python -m jmx.cli`: runs the command `jmx`."""

import sys

from jmx.cli import main

sys.exit(main())
