"""What the driver says of a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray")


def test_the_last_words_are_those_of_the_last_process_in_that_place(tmp_path: Path):
    from fewstep.engines.ray.group import last_words

    log = tmp_path / "critic-0.log"
    assert last_words(None) == last_words(log) == ""
    log.write_text("critic/0: process 17 on here\nout of luck\n")
    assert last_words(log) == "; its last words: out of luck"
    with log.open("a") as file:
        file.write("critic/0: process 18 on here\n")
    assert last_words(log) == ""
    with log.open("a") as file:
        file.write("one\n\ntwo: process 3 on a list\nthree\nfour\n")
    assert last_words(log) == "; its last words: two: process 3 on a list | three | four"
