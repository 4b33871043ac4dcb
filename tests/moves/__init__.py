"""Moves of transformers' model sources that releases make, and what of this package's gains survives them.

1. `trees.py`: what a model's file holds: its layers, its models, its functions, its calls.
2. `names.py`, `statements.py`, `shapes.py`: the moves. None of them changes what a model computes.
3. `faults.py`: changes that do change it.
4. `sources.py`: imports every model file moved, in this process.
5. `served.py`: what is served of a family, as plain data, and how two of these differ.
"""
