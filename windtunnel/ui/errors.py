"""What can be wrong with a question of the page."""

from __future__ import annotations

from typing import Any


class BadQuestion(ValueError):
    """A question that has no answer: the message says what is wrong and what to do, ``place`` where."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


def complaint(message: str, place: str = "", kind: str = "bad_question", **more: Any) -> dict[str, Any]:
    """An error as the page takes it: what is wrong (with the remedy), and which knob or part of the question it is."""
    return {"part": "error", "kind": kind, "message": message, "place": place, **more}
