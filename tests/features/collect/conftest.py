"""Make the toy target importable by name: collection imports taps by dotted name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
