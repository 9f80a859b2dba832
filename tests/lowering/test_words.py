"""Numbers in sentences."""

import pytest

from relower.lowering.words import agreeing, plural


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 copies have"), (1, "1 copy has"), (1234, "1,234 copies have")]
)
def test_nouns_and_verbs_go_with_their_number(count, said):
    assert f"{plural(count, 'copy', 'copies')} {agreeing(count, 'has', 'have')}" == said
    assert plural(count, "site").endswith("site" if count == 1 else "sites")
