"""Small real tasks that every machine can train: no download, seconds per epoch on two CPU cores.

They serve the demo, the examples, the benchmarks and the default of `lowbw-train`. Nothing here knows about the
strategies of this package: the modules are ordinary Lightning code, which is the point.
"""

from lightning_lowbw.tools.zoo.digits import DigitsClassifier, DigitsData
from lightning_lowbw.tools.zoo.text import ByteLanguageModel, StdlibText

__all__ = ["ByteLanguageModel", "DigitsClassifier", "DigitsData", "StdlibText"]
