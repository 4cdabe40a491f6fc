"""``python -m minipage``: the command ``minipage``, from a clone as well."""

import sys

from .cli import main

sys.exit(main())
