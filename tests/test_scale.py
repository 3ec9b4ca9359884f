"""One parameter for the size of a notebook's run."""

import pytest

from helpers import scale


@pytest.mark.parametrize(("name", "draws"), [("demo", 3), ("full", 1000)])
def test_settings_of_the_scale_are_returned_and_printed(name, draws, capsys):
    assert scale.choose(name, demo={"draws": 3}, full={"draws": 1000}) == {"draws": draws}
    assert capsys.readouterr().out == f"scale {name}: draws {draws}\n"


def test_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="scale must be 'demo' or 'full', given 'ful'"):
        scale.choose("ful", demo={}, full={})


def test_scales_with_different_settings_are_refused():
    with pytest.raises(ValueError, match="only one has: draws, steps"):
        scale.choose("demo", demo={"draws": 3}, full={"steps": 4})
