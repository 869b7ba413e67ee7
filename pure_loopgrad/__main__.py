"""`python -m pure_loopgrad` runs the main job."""

from __future__ import annotations

import sys

from pure_loopgrad.demo.cli import main

if __name__ == "__main__":
    sys.exit(main())
