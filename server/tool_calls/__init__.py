"""Tool calls and reasoning: formats, detection, grammars that enforce them, parsing."""
