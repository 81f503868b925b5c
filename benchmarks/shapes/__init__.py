from benchmarks.shapes.directory import write_model
from benchmarks.shapes.published import FAMILIES, SHAPES

__all__ = ["FAMILIES", "SHAPES", "write_model"]
