"""Colours: one for each kind of draft, and marks that tell the drafts of a picture apart."""

from __future__ import annotations

from selfspec.tools.lab.report import BLACK, GREY, mark_of, marks_of


def test_a_kind_has_its_colour_in_every_picture() -> None:
    assert mark_of(None).colour == BLACK
    assert mark_of("exit:2").colour == mark_of("exit:4+vocab:words.json").colour == mark_of("exit").colour
    assert mark_of("int8+int4").colour == mark_of("lookup+int8").colour
    assert mark_of("exit:2").colour != mark_of("int8").colour
    assert mark_of("something else").colour == GREY


def test_a_cascade_is_hollow() -> None:
    assert mark_of("exit:4").filled
    assert not mark_of("lookup+exit:4").filled


def test_drafts_of_one_kind_are_told_apart() -> None:
    marks = marks_of(["exit:2", "exit:3", "skip:attn=1", "exit:4"])
    looks = {(mark.colour, mark.dashes, mark.marker) for mark in marks.values()}
    assert len(looks) == 4
    assert marks["exit:2"] == mark_of("exit:2")


def test_six_drafts_of_one_kind_have_lines_of_their_own() -> None:
    marks = marks_of([f"exit:{layer}" for layer in range(1, 7)])
    assert len({mark.dashes for mark in marks.values()}) == 6
