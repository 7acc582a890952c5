"""One word for one thing: retired words occur in nothing that people read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests import user_words


@pytest.mark.parametrize(
    "texts",
    [user_words.pages, user_words.messages, user_words.page_prose],
    ids=["docs", "help and messages", "page"],
)
def test_retired_words_are_gone(texts: Callable[[], Iterator[tuple[str, str]]]) -> None:
    wrong = user_words.found(texts())
    assert not wrong, "\n".join(wrong)


def test_texts_are_read() -> None:
    assert len(list(user_words.pages())) > 40
    assert len(list(user_words.page_prose())) > 1000
    assert list(user_words.messages())


def test_retired_words_are_seen() -> None:
    texts = iter([("a", "It waits behind the matrix product."), ("b", "The shards are gathered.")])
    assert [each.split(":")[0] for each in user_words.found(texts)] == ["a", "a"]
    assert not user_words.found(iter([("a", "the manifold unfolded, retold and retooled")]))
