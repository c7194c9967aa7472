"""``python -m windtunnel`` is the ``windtunnel`` command."""

import sys

from windtunnel.cli.main import main

sys.exit(main())
