"""`python -m jmx.cli`: the command `jmx`."""

import sys

from jmx.cli import main

sys.exit(main())
