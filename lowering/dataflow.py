from .ir import Module
from .ledger import Ledger


def numbered(module: Module, ledger: Ledger) -> Module:
    return module
