"""Where the checkout and the helpers of its tests are."""

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
