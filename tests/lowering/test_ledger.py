"""The ledger knows its rules."""

import pytest

from relower.lowering import RULES
from relower.lowering.ledger import Ledger


def test_counts_by_name():
    ledger = Ledger()
    ledger.add("value-name", 3)
    ledger.add("location")
    ledger.add("location")
    ledger.add("call-kept", 0)
    assert ledger.counts() == {"location": 2, "value-name": 3}


def test_a_rule_without_a_row_is_an_error():
    with pytest.raises(KeyError, match="not in RULES"):
        Ledger().add("made up")


def test_every_rule_is_described():
    assert all(text and not text.endswith(".") for text in RULES.values())
