"""JSON with a checksum has the bytes that Python's own encoder would give it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from virnucpro.core.json_checksum import add_checksum, parse_checked

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(VALUES)
def test_json_is_indented_as_by_python(value: object) -> None:
    text = add_checksum({"value": value, "empty": {}})
    expected = json.dumps({"json_format": 2, "value": value, "empty": {}}, indent=2)
    assert text.startswith(expected.removesuffix("\n}") + ',\n  "sha256": "')


def test_indented_json_has_its_checksum() -> None:
    content = {"inputs": [{"path": "a.fa", "n_bytes": 3}, {}], "ids": ["a", ["b"]], "none": None}
    assert parse_checked(add_checksum(content).encode()) == content
