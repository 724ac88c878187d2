"""`python -m lightning_lowbw.demo`."""

import sys

from lightning_lowbw.demo.cli import main

sys.exit(main())
