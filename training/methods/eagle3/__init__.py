"""EAGLE-3: a one-layer draft that reads the target's aux states, then its own.

Where to go: ``model`` the module and its arithmetic; ``collate`` which token meets which row;
``ttt`` the training loss; ``propose`` drafting from every row; ``reference`` the slow, readable
twin of both; ``checkpoint`` the files an engine loads; ``method`` the seam.
"""

from training.methods.eagle3.method import EAGLE3

__all__ = ["EAGLE3"]
